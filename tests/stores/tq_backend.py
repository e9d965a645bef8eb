"""TransferQueue behind a file store, or behind Redis, under the contract suite."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from tests.staging.test_file_store import FileBackend
from tests.stores.redis_backend import RedisBackend
from tests.stores.redis_server import RedisServer
from tokenplane.staging.contract_suite.backend import StoreBackend
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore


class QueueBackend(StoreBackend):
    """Raw access goes to the journal, where this host reads."""

    def __init__(self, address: str, root: Path, *, namespace: str = "contract") -> None:
        self.journal_url = root.as_uri()
        self.raw: StoreBackend = FileBackend(root)
        self.address = address
        self.namespace = namespace

    def url(self, **options: object) -> str:
        given = {"namespace": self.namespace, **options}
        more = "".join(f"&{name}={quote(str(value))}" for name, value in given.items())
        return f"tq://{self.address}?journal={quote(self.journal_url, safe='')}{more}"

    def open(
        self,
        *,
        clock: Callable[[], float] | None = None,
        max_bytes: int | None = None,
        full_wait_s: float = 0.2,
    ) -> StagingStore:
        budget = {} if max_bytes is None else {"max_bytes": max_bytes}
        url = self.url(full_wait_s=full_wait_s, **budget)
        return open_store(url, clock=clock or time.time)

    def raw_read(self, store: StagingStore, partition: str, key: str) -> bytes:
        return self.raw.raw_read(store, partition, key)

    def raw_write(self, store: StagingStore, partition: str, key: str, message: bytes) -> None:
        self.raw.raw_write(store, partition, key, message)

    def raw_write_blob(self, store: StagingStore, sha256: bytes, data: bytes) -> None:
        self.raw.raw_write_blob(store, sha256, data)

    def opener(
        self, *, max_bytes: int | None = None, full_wait_s: float | None = None
    ) -> Callable[[], StagingStore]:
        given = {"max_bytes": max_bytes, "full_wait_s": full_wait_s}
        more = {name: value for name, value in given.items() if value is not None}
        return partial(open_store, self.url(connect_s=0, **more))


class QueueOverRedis(QueueBackend):
    """The journal is a namespace of a Redis server."""

    def __init__(self, address: str, server: RedisServer, *, namespace: str = "contract") -> None:
        raw = RedisBackend(server)
        self.journal_url = f"{server.url}?namespace={raw.namespace}"
        self.raw = raw
        self.address = address
        self.namespace = namespace
