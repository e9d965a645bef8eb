"""Puts rows into a Redis store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import pyarrow as pa

from tokenplane.schemas.errors import (
    KeyConflictError,
    SchemaMismatchError,
    SealedPartitionError,
    StoreError,
    StoreFullError,
)
from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.redis_backend.rows import stored_content
from tokenplane.staging.redis_backend.scripts import PUT
from tokenplane.staging.row_packing import PackedRow, pack_row
from tokenplane.staging.row_split import token_part
from tokenplane.staging.store_types import Blob

UPLOAD_FROM_BYTES: Final = 65536
"""Blobs from this size on are sent only after the server said that it lacks them, and beside the
script: a script copies its arguments several times."""
UPLOAD_S: Final = 3600
FIRST_POLL_S: Final = 0.01
LONGEST_POLL_S: Final = 0.25
_KINDS: Final = (b"o", b"l", b"p")


class RedisWriter:
    """See ``RedisStore.put``.

    A row is one script, and one round trip. Sent again after a lost reply it finds its own nonce
    and says that it wrote.

    Args:
        created_at: Unix seconds from which the age of a row counts.
    """

    def __init__(
        self,
        connection: RedisConnection,
        total: bytes,
        *,
        max_bytes: int | None,
        full_wait_s: float,
        created_at: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._total = total
        self._max_bytes = max_bytes
        self._full_wait_s = full_wait_s
        self._created_at = created_at

    def put(self, partition: str, key: str, row: pa.RecordBatch, blobs: Sequence[Blob]) -> bool:
        """See ``StagingStore.put``."""
        packed = pack_row(partition, key, row)
        contents = {blob.sha256: blob for blob in blobs}
        part = token_part(packed.message, row, partition, key)
        nonce = os.urandom(16)
        content = stored_content(packed.binding, nonce, self._created_at(), packed.message, part)
        names = self._names(partition, key)
        big = {sha for sha, blob in contents.items() if blob.nbytes >= UPLOAD_FROM_BYTES}
        args: list[bytes | str | int] = [
            partition,
            key,
            packed.label,
            content,
            len(packed.message),
            "" if self._max_bytes is None else self._max_bytes,
        ]
        for sha, blob in contents.items():
            args += [sha, blob.nbytes, b"" if sha in big else bytes(blob.data)]
        uploads: list[bytes] = []
        try:
            while True:
                verdict, *context = self._when_there_is_room(names, args, key)
                if verdict == b"new":
                    uploads.clear()  # the row has taken them
                if verdict != b"blobs":
                    return _put_result(verdict, context, partition, key, packed)
                for sha in context:
                    uploads.append(self._total[:-1] + b"u:" + nonce + sha)
                    data = bytes(contents[sha].data)
                    upload = ("SET", uploads[-1], data, "EX", UPLOAD_S)
                    self._when_there_is_memory(partial(self._connection.command, *upload))
        finally:
            if uploads:
                with suppress(StoreError):
                    self._connection.command("UNLINK", *uploads)

    def _names(self, partition: str, key: str) -> list[bytes]:
        """The server names that the put script always needs."""
        namespace, place = self._total[:-1], partition.encode()
        row = b"%sm:%d:%s:%s" % (namespace, len(place), place, key.encode())
        return [self._total, row, *(b"%s%s:%s" % (namespace, kind, place) for kind in _KINDS)]

    def _when_there_is_room(
        self, names: list[bytes], args: list[bytes | str | int], key: str
    ) -> list[bytes]:
        """The verdict of the put script, once it is another than ``full``."""
        deadline = time.monotonic() + self._full_wait_s
        wait = FIRST_POLL_S
        while True:
            reply = self._when_there_is_memory(partial(self._connection.script, PUT, names, *args))
            verdict: list[bytes] = [b"new"] if reply == 1 else reply
            if verdict[0] != b"full":
                return verdict
            need, used = (int(value) for value in verdict[1:])
            budget = self._max_bytes or 0
            left = deadline - time.monotonic()
            if need > budget or left <= 0:
                raise StoreFullError(
                    "the byte budget is used up",
                    expected=f"{need} bytes free",
                    got=f"{used} of {budget} used",
                    key=key,
                )
            time.sleep(min(wait, left))
            wait = min(2 * wait, LONGEST_POLL_S)

    def _when_there_is_memory[T](self, call: Callable[[], T]) -> T:
        """What ``call`` gives, once the server does not refuse it for want of memory or disk."""
        deadline = time.monotonic() + self._full_wait_s
        wait = FIRST_POLL_S
        while True:
            try:
                return call()
            except StoreFullError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
            time.sleep(min(wait, left))
            wait = min(2 * wait, LONGEST_POLL_S)


def _put_result(
    verdict: bytes, context: list[bytes], partition: str, key: str, packed: PackedRow
) -> bool:
    if verdict == b"conflict":
        raise KeyConflictError("another row is stored under this key", key=key)
    if verdict == b"sealed":
        raise SealedPartitionError("the partition takes no more rows", key=partition)
    if verdict == b"label":
        raise SchemaMismatchError(
            f"partition {partition!r} holds another kind of row",
            expected=context[0].decode(),
            got=packed.label,
        )
    return verdict == b"new"
