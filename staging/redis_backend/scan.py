"""A scan of a Redis store: a snapshot that is read page by page."""

from __future__ import annotations

import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Self

import pyarrow as pa

from tokenplane.schemas.errors import MissingRowError, StoreError
from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.redis_backend.rows import unpack_stored
from tokenplane.staging.redis_backend.scan_scripts import SCAN, SCAN_END, SCAN_LEASE_S, SCAN_READ

ROWS_PER_PAGE: Final = 64


class RedisScan(Iterator[tuple[str, pa.RecordBatch]]):
    """Rows as they were when the object was made.

    While it runs the server keeps the rows that are removed. It says that it still runs with every
    page; a scan that rests longer than ``SCAN_LEASE_S`` may find such a row gone.
    """

    def __init__(
        self,
        connection: RedisConnection,
        total: bytes,
        now: Callable[[], str],
        partition: str,
        prefix: str,
        columns: Sequence[str] | None,
    ) -> None:
        self._ended = True
        self._connection = connection
        self._total = total
        self._now = now
        self._partition = partition
        self._columns = columns
        self._id = uuid.uuid4().hex
        self._page: deque[tuple[str, bytes | None]] = deque()
        listed = connection.script(SCAN, [total], now(), partition, prefix, self._id, SCAN_LEASE_S)
        self._left = deque(zip(listed[::2], listed[1::2], strict=True))
        self._ended = not listed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, pa.RecordBatch]:
        """The next row.

        Raises:
            MissingRowError: the scan rested too long and the row was removed meanwhile.
            StoreClosedError: the store was closed.
        """
        self._connection.check_open()
        if not self._page:
            if not self._left:
                self.close()
                raise StopIteration
            self._read_page()
        key, content = self._page.popleft()
        if content is None:
            raise MissingRowError(
                f"removed while the scan rested longer than {SCAN_LEASE_S} s", key=key
            )
        return key, unpack_stored(content, self._partition, key, self._columns)

    def _read_page(self) -> None:
        page = [self._left.popleft() for _ in range(min(ROWS_PER_PAGE, len(self._left)))]
        values = self._connection.script(
            SCAN_READ,
            [self._total],
            self._now(),
            self._partition,
            self._id,
            SCAN_LEASE_S,
            *(part for entry in page for part in entry),
        )
        pairs = zip(page, values, strict=True)
        self._page.extend((key.decode(), content) for (key, _), content in pairs)

    def close(self) -> None:
        """Tell the server that nothing is wanted any more. Idempotent; never raises."""
        if not self._ended:
            self._ended = True
            self._left.clear()
            # The server forgets the scan by itself when its lease ends.
            with contextlib.suppress(StoreError):
                self._connection.script(SCAN_END, [self._total], self._now(), self._id)

    def __del__(self) -> None:
        self.close()
