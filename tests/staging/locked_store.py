"""A store of one's own, as a user would write it: one pickled file, changed under a file lock.

Slow and simple. It passes the contract suite because it checks and chooses with the parts that the
package offers, here the memory store's state.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from tokenplane.schemas.errors import StoreClosedError, StoreFullError
from tokenplane.staging.memory_backend.state import MemoryState
from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.store_types import Blob, Durability, Sharing

READS = frozenset({"get", "get_blob", "keys", "partitions", "scan", "stats"})


class LockedStore:
    """Every call loads the state, does its work on it as a memory store, and writes it back."""

    durable: Durability = "power"
    shared: Sharing = "host"

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        max_bytes: int | None = None,
        full_wait_s: float = 5.0,
    ) -> None:
        self.url = f"locked:{path}"
        self._path = path
        self._clock = clock
        self._max_bytes = max_bytes
        self._full_wait_s = full_wait_s
        self._closed = False

    @contextlib.contextmanager
    def _opened(self, *, changes: bool) -> Iterator[MemoryStore]:
        if self._closed:
            raise StoreClosedError("the store was closed", got=self.url)
        store = MemoryStore(max_bytes=self._max_bytes, full_wait_s=0, clock=self._clock)
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._path.exists():
                store._content = pickle.loads(self._path.read_bytes())
            yield store
            if changes:
                self._write(store._content)

    def _write(self, state: MemoryState | None) -> None:
        temporary = self._path.with_suffix(".new")
        with temporary.open("wb") as handle:
            handle.write(pickle.dumps(state))
            handle.flush()
            os.fsync(handle.fileno())
        temporary.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def put(
        self, partition: str, key: str, row: pa.RecordBatch, *, blobs: Sequence[Blob] = ()
    ) -> bool:
        """Waits for room outside the lock, so that others can make some."""
        deadline = time.monotonic() + self._full_wait_s
        while True:
            try:
                with self._opened(changes=True) as store:
                    return store.put(partition, key, row, blobs=blobs)
            except StoreFullError as exc:
                need = int(str(exc.expected).split()[0])
                if need > (self._max_bytes or 0) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.02)

    def scan(
        self, partition: str, prefix: str = "", columns: Sequence[str] | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Reads from the state as it was: nobody changes that object any more."""
        with self._opened(changes=False) as store:
            rows = store.scan(partition, prefix, columns)
        return self._checked(rows)

    def _checked(
        self, rows: Iterator[tuple[str, pa.RecordBatch]]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        while True:
            if self._closed:
                raise StoreClosedError("the store was closed", got=self.url)
            try:
                yield next(rows)
            except StopIteration:
                return

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Every other method of the contract does nothing beyond the memory store's."""
        if name.startswith("_") or not callable(getattr(MemoryStore, name, None)):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            with self._opened(changes=name not in READS) as store:
                return getattr(store, name)(*args, **options)

        return call

    def close(self) -> None:
        """Nothing is open between two calls."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
