"""What was acknowledged is there after the writers were killed, in any state they were in."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import apsw
import pytest

from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.file_backend.store import FileStore
from tokenplane.staging.store_types import RetentionPolicy, to_blob

PROGRAM = Path(__file__).with_name("crash_writer.py")
ROUNDS = 3
WRITERS = 3


def start(root: Path, writer: str, first: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(PROGRAM), root.as_uri(), writer, str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def kill_all(processes: list[subprocess.Popen[bytes]], after_s: float) -> list[list[str]]:
    """Wait until each has acknowledged something, let them run, kill them; what each one said."""
    firsts = []
    for process in processes:
        assert process.stdout is not None
        firsts.append(process.stdout.readline())
    time.sleep(after_s)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    said = []
    for process, first in zip(processes, firsts, strict=True):
        rest, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        said.append((first + rest).decode().split("\n")[:-1])
    return said


@pytest.mark.slow
def test_every_acknowledged_row_survives_kill_9_of_its_writers(tmp_path: Path) -> None:
    root = tmp_path / "store"
    rng = random.Random(7)
    acknowledged: list[str] = []
    with FileStore(root) as reader:  # open all the while: readers must not mind either
        for cycle in range(ROUNDS):
            writers = [start(root, f"w{n}", cycle * 100_000) for n in range(WRITERS)]
            for said in kill_all(writers, rng.uniform(0.0, 0.4)):
                assert said
                acknowledged += said
            check_rows(reader, acknowledged)
    with FileStore(root) as reopened:
        check_rows(reopened, acknowledged)
        assert reopened.put("p", "after", plain_row(1))
    db = apsw.Connection(str(root / "rows.sqlite"))
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()


def check_rows(store: FileStore, acknowledged: list[str]) -> None:
    from_blobs = 0
    for key, row in zip(acknowledged, store.get("p", acknowledged), strict=True):
        number = int(key.split("/")[1])
        assert same_bits(row, plain_row(number, size=number % 9000))
    # Rows that were committed and not yet acknowledged are whole as well.
    for key, row in store.scan("p"):
        number = int(key.split("/")[1])
        assert same_bits(row, plain_row(number, size=number % 9000))
        if number % 4 == 0:
            data = f"blob {number // 8}".encode() * 3000
            assert store.get_blob(to_blob(data).sha256).to_pybytes() == data
            from_blobs += 1
    assert from_blobs


def test_what_killed_writers_leave_is_swept(tmp_path: Path) -> None:
    root = tmp_path / "store"
    kill_all([start(root, "w", 0)], 0.1)
    with FileStore(root) as store:
        unfinished = root / "blobs" / "00" / ".tmp-left"
        orphan = root / "blobs" / "ab" / ("ab" * 32)
        stray = root / "sealed" / "left.arrow"
        for path in (unfinished, orphan, stray):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"left")
        rows = store.stats().rows
        assert store.sweep(RetentionPolicy()).blobs == 0  # young files may be somebody's work
        dry = store.sweep(RetentionPolicy(orphan_age_s=0), dry_run=True)
        report = store.sweep(RetentionPolicy(orphan_age_s=0))
        assert (report.blobs, report.blob_bytes) == (dry.blobs, dry.blob_bytes)
        assert report.blobs >= 2
        assert not any(path.exists() for path in (unfinished, orphan, stray))
        assert store.stats().rows == rows
        keys = store.keys("p")
        check_rows(store, keys)


def test_a_seal_that_was_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "store"
    rng = random.Random(3)
    number = 0
    for _ in range(4):
        (said,) = kill_all([start(root, "seal", number)], rng.uniform(0.0, 0.05))
        with FileStore(root) as store:
            for name in said:
                partition = f"sealed{name}"
                assert len(store.keys(partition)) == 30
                for key, row in store.scan(partition):
                    assert same_bits(row, plain_row(int(key), size=500))
                store.seal(partition)
                for key, row in store.scan(partition):
                    assert same_bits(row, plain_row(int(key), size=500))
            store.sweep(RetentionPolicy(orphan_age_s=0))
            known = {path.name for path in (root / "sealed").iterdir()}
            assert len(known) == len(store.stats().sealed)
        number = int(said[-1]) + 2
