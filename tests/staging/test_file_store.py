"""The file store passes the contract suite."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import apsw
import pytest

from tokenplane.staging.contract_suite.backend import StoreBackend
from tokenplane.staging.contract_suite.stateful import run_random_operations
from tokenplane.staging.file_backend.store import FileStore
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.testing import SharedStoreContract


class FileBackend(StoreBackend):
    """Raw access goes through a connection and paths of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(
        self,
        *,
        clock: Callable[[], float] | None = None,
        max_bytes: int | None = None,
        full_wait_s: float = 0.2,
    ) -> StagingStore:
        return FileStore(
            self.root, max_bytes=max_bytes, full_wait_s=full_wait_s, clock=clock or time.time
        )

    def raw_read(self, store: StagingStore, partition: str, key: str) -> bytes:
        db = apsw.Connection(str(self.root / "rows.sqlite"))
        query = (
            "SELECT message FROM rows JOIN partitions p ON p.id=partition_id"
            " WHERE p.name=? AND key=?"
        )
        (message,) = db.execute(query, (partition, key)).fetchall()[0]
        db.close()
        assert isinstance(message, bytes)
        return message

    def raw_write(self, store: StagingStore, partition: str, key: str, message: bytes) -> None:
        db = apsw.Connection(str(self.root / "rows.sqlite"))
        db.set_busy_timeout(60_000)
        db.execute(
            "UPDATE rows SET message=? WHERE key=?"
            " AND partition_id=(SELECT id FROM partitions WHERE name=?)",
            (message, key, partition),
        )
        assert db.changes() == 1
        db.close()

    def raw_write_blob(self, store: StagingStore, sha256: bytes, data: bytes) -> None:
        (path,) = (self.root / "blobs").glob(f"*/{sha256.hex()}")
        path.write_bytes(data)

    def opener(
        self, *, max_bytes: int | None = None, full_wait_s: float | None = None
    ) -> Callable[[], StagingStore]:
        given = {"max_bytes": max_bytes, "full_wait_s": full_wait_s}
        query = urlencode({name: value for name, value in given.items() if value is not None})
        return partial(open_store, f"{self.root.as_uri()}?{query}")


class TestFileStore(SharedStoreContract):
    DURABLE = "power"
    SHARED = "host"

    @pytest.fixture
    def backend(self, tmp_path: Path) -> StoreBackend:
        return FileBackend(tmp_path / "store")


def test_random_operations(tmp_path: Path) -> None:
    run_random_operations(FileBackend(tmp_path / "store"), reopens=True, max_examples=12)
