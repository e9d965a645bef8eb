"""The log's file runs ahead of the log, and nothing that is stored is touched by it."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.file_backend import log_space
from tokenplane.staging.file_backend.database import AHEAD_PAGES, Database
from tokenplane.staging.file_backend.log_space import LogSpace
from tokenplane.staging.file_backend.store import FileStore

FRAME_BYTES = 4096 + 24


def log_bytes(root: Path) -> int:
    return (root / "rows.sqlite-wal").stat().st_size


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_file_is_longer_than_the_log_and_grows_before_it(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with FileStore(root) as store:
        wait_for(lambda: log_bytes(root) == AHEAD_PAGES * FRAME_BYTES)
        store.put("p", "k", plain_row(1, size=20_000))
        assert log_bytes(root) == AHEAD_PAGES * FRAME_BYTES
        for number in range(40):
            store.put("p", str(number), plain_row(number, size=20_000))
        used = store._database._log_pages * FRAME_BYTES
        wait_for(lambda: log_bytes(root) >= used + AHEAD_PAGES // 2 * FRAME_BYTES)
    assert not (root / "rows.sqlite-wal").exists()


def test_a_log_with_room_is_read_back_after_a_crash(tmp_path: Path) -> None:
    """As a killed writer leaves it: nothing was checkpointed, zeros follow the last frame."""
    root, copy = tmp_path / "s", tmp_path / "copy"
    with FileStore(root) as store:
        wait_for(lambda: log_bytes(root) == AHEAD_PAGES * FRAME_BYTES)
        for number in range(5):
            store.put("p", str(number), plain_row(number, size=9_000))
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*-shm"))
    assert log_bytes(copy) == AHEAD_PAGES * FRAME_BYTES
    with FileStore(copy) as again:
        assert again.keys("p") == [str(number) for number in range(5)]
        assert all(same_bits(row, plain_row(int(k), size=9_000)) for k, row in again.scan("p"))


def test_rows_are_whole_while_several_stores_write_and_lengthen_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros and frames go to the end of one file: only the write lock keeps them apart."""
    root = tmp_path / "s"
    monkeypatch.setattr(log_space, "STEP_BYTES", 4096)
    monkeypatch.setattr("tokenplane.staging.file_backend.database.AHEAD_PAGES", 12)
    stores = [FileStore(root) for _ in range(3)]

    def write(at: int) -> None:
        for number in range(60):
            stores[at].put("p", f"{at}/{number}", plain_row(number, size=9_000))

    threads = [threading.Thread(target=write, args=(at,)) for at in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*-shm"))
    for store in stores:
        store.close()
    for place in (root, copy):
        with FileStore(place) as store:
            rows = dict(store.scan("p"))
            assert len(rows) == 60 * len(stores)
            for key, row in rows.items():
                assert same_bits(row, plain_row(int(key.partition("/")[2]), size=9_000))


@pytest.mark.parametrize("what", ["no room", "a limit"])
def test_room_is_not_taken_where_it_is_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    looked = threading.Event()
    lengthen, make_room = LogSpace.lengthen, Database._make_room

    def limited(self: LogSpace, nbytes: int) -> bool:
        if what == "a limit":
            raise OSError(errno.EFBIG, "beyond the limit")
        return lengthen(self, nbytes)

    def seen(self: Database, db: apsw.Connection) -> None:
        make_room(self, db)
        looked.set()

    monkeypatch.setattr(LogSpace, "lengthen", limited)
    monkeypatch.setattr(Database, "_make_room", seen)
    if what == "no room":
        monkeypatch.setattr(log_space, "SPARE_BYTES", 2**70)
    with FileStore(tmp_path / "s") as store:
        assert looked.wait(60)
        assert log_bytes(tmp_path / "s") == 0
        assert store.put("p", "k", plain_row(1))
        assert 0 < log_bytes(tmp_path / "s") < 20 * FRAME_BYTES


def test_a_store_that_does_not_sync_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(LogSpace, "lengthen", lambda _self, nbytes: asked.append(nbytes))
    for durability in ("process", "power"):
        with FileStore(tmp_path / durability, durability=durability) as store:
            for number in range(30):
                store.put("p", str(number), plain_row(1, size=20_000))
            if durability == "power":
                wait_for(lambda: bool(asked))
        assert bool(asked) == (durability == "power")
