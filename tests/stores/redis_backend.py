"""Redis under the contract suite: raw access through a client and a decoder of its own."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from functools import partial

import redis

from tests.stores.redis_server import RedisServer
from tokenplane.staging.contract_suite.backend import StoreBackend
from tokenplane.staging.open_store import open_store
from tokenplane.staging.redis_backend.store import RedisStore
from tokenplane.staging.store import StagingStore


class RedisBackend(StoreBackend):
    """A namespace of its own per object."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.namespace = uuid.uuid4().hex
        self.client: redis.Redis = server.client()

    def open(
        self,
        *,
        clock: Callable[[], float] | None = None,
        max_bytes: int | None = None,
        full_wait_s: float = 0.2,
    ) -> StagingStore:
        return RedisStore(
            self.server.url,
            namespace=self.namespace,
            max_bytes=max_bytes,
            full_wait_s=full_wait_s,
            clock=clock,
        )

    def name(self, kind: str, partition: str, key: str) -> bytes:
        size = len(partition.encode())
        return f"{{{self.namespace}}}:{kind}:{size}:{partition}:{key}".encode()

    def raw_read(self, store: StagingStore, partition: str, key: str) -> bytes:
        content = self.client.get(self.name("m", partition, key))
        assert isinstance(content, bytes)
        (head,) = struct.unpack("<I", content[56:60])
        return content[80 + head :]

    def raw_write(self, store: StagingStore, partition: str, key: str, message: bytes) -> None:
        name = self.name("m", partition, key)
        head = self.client.getrange(name, 0, 79)
        assert isinstance(head, bytes)
        assert len(head) == 80
        self.client.set(name, head[:56] + bytes(12) + head[68:] + message)

    def raw_write_blob(self, store: StagingStore, sha256: bytes, data: bytes) -> None:
        name = f"{{{self.namespace}}}:b:".encode() + sha256
        assert self.client.exists(name)
        self.client.set(name, data)

    def opener(
        self, *, max_bytes: int | None = None, full_wait_s: float | None = None
    ) -> Callable[[], StagingStore]:
        given = {"max_bytes": max_bytes, "full_wait_s": full_wait_s}
        more = "".join(f"&{name}={value}" for name, value in given.items() if value is not None)
        return partial(open_store, f"{self.server.url}?namespace={self.namespace}{more}")
