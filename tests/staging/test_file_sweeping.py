"""Sweeps of a file store beside its other users: writers, sealers, and their own death."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.staging.crash_writer import blobs_of
from tokenplane.schemas.errors import StoreUnavailableError
from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.file_backend.store import FileStore
from tokenplane.staging.store_types import RetentionPolicy, to_blob

EVERYTHING = RetentionPolicy(max_age_s=0, orphan_age_s=0)
LEFTOVERS = RetentionPolicy(orphan_age_s=0)

REMOVER = """
import os, sys
from tests.staging.crash_writer import blobs_of
from tokenplane.staging.contract_suite.backend import plain_row
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store_types import RetentionPolicy
with open_store(sys.argv[1]) as store:
    number = 0
    while True:
        for _ in range(12):
            row = plain_row(number, size=number % 900)
            store.put("p", str(number), row, blobs=blobs_of(number))
            number += 1
        if number % 5 == 0:
            store.seal("p")
        os.write(1, b".")
        store.discard("p", [str(number - 3), str(number - 8)])
        store.sweep(RetentionPolicy(max_age_s=0, partition="p", prefix=str(number - 1)[0]))
        if number % 5 == 0:
            store.sweep(RetentionPolicy(max_age_s=0, partition="p"))
"""


@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.4])
def test_a_killed_remover_leaves_whole_rows_and_true_totals(tmp_path: Path, after_s: float) -> None:
    root = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", REMOVER, root.as_uri()],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    process.stdout.read(3)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with FileStore(root) as store:
        shas: set[bytes] = set()
        for key, row in store.scan("p"):
            number = int(key)
            assert same_bits(row, plain_row(number, size=number % 900))
            for blob in blobs_of(number):
                assert store.get_blob(blob.sha256).size == blob.nbytes
                shas.add(blob.sha256)
        stats = store.stats()
        assert stats.rows == len(store.keys("p"))
        assert stats.blobs == len(shas)
        assert stats.bytes == store.stats("p").bytes
        with store._database.read() as db:
            assert db.execute("SELECT count(*), sum(bytes) FROM rows").fetchone() == (
                stats.rows,
                stats.bytes or None,
            )
        store.sweep(LEFTOVERS)
        assert {path.name for path in root.glob("blobs/*/*")} == {sha.hex() for sha in shas}
        store.sweep(EVERYTHING)
        left = store.stats()
        assert (left.rows, left.bytes, left.blobs, left.sealed) == (0, 0, 0, ())
        assert not list(root.glob("blobs/*/*"))
        assert not list(root.glob("sealed/*"))


def test_a_sweep_takes_no_file_from_a_running_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that jumps makes the newest file look old; the seal writes it again."""
    root = tmp_path / "store"
    rows = {str(number): plain_row(number, size=400) for number in range(40)}
    with FileStore(root) as store, FileStore(root) as sweeper:
        for key, row in rows.items():
            store.put("p", key, row)
        original, written = store._sealed.write, []

        def write(*args: Any) -> Any:
            files = original(*args)
            written.append(files)
            if len(written) < 3:
                sweeper.sweep(LEFTOVERS)
            return files

        monkeypatch.setattr(store._sealed, "write", write)
        store.seal("p")
        assert len(written) == 3
        sweeper.sweep(LEFTOVERS)
        assert all(same_bits(row, rows[key]) for key, row in sweeper.scan("p"))
        assert sweeper.stats("p").sealed == ("p",)
        assert len(list(root.glob("sealed/*"))) == 1


def test_a_seal_whose_files_always_vanish_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(tmp_path / "store") as store:
        store.put("p", "k", plain_row(1))
        with monkeypatch.context() as patched:
            patched.setattr(store._sealed, "all_there", lambda names: False)
            with pytest.raises(StoreUnavailableError):
                store.seal("p")
        assert same_bits(store.get("p", ["k"])[0], plain_row(1))
        store.seal("p")
        assert same_bits(store.get("p", ["k"])[0], plain_row(1))


def test_a_sweep_takes_no_blob_from_a_running_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    blob = to_blob(b"b" * 3000)
    with FileStore(root) as store, FileStore(root) as sweeper:
        original, written = store._blobs.write, []

        def write(*args: Any) -> None:
            original(*args)
            written.append(args)
            if len(written) < 3:
                assert sweeper.sweep(LEFTOVERS).blobs == 1

        monkeypatch.setattr(store._blobs, "write", write)
        assert store.put("p", "k", plain_row(1), blobs=[blob])
        assert len(written) == 3
        assert sweeper.get_blob(blob.sha256).to_pybytes() == b"b" * 3000


def test_a_full_disk_stops_a_seal_and_harms_nothing(tmp_path: Path) -> None:
    """Through the process's file size limit, in a process of its own."""
    root = tmp_path / "store"
    program = (
        "import resource, signal, sys\n"
        "from tokenplane.schemas.errors import StoreFullError\n"
        "from tokenplane.staging.contract_suite.backend import plain_row\n"
        "from tokenplane.staging.open_store import open_store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "with open_store(sys.argv[1]) as store:\n"
        "    for number in range(30):\n"
        "        store.put('p', str(number), plain_row(number, size=20_000))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        store.seal('p')\n"
        "    except StoreFullError as exc:\n"
        "        print(exc.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, root.as_uri()], capture_output=True, text=True, check=False
    )
    assert done.stdout == "store_full\n", done.stderr
    with FileStore(root) as store:
        assert not list(root.glob("sealed/*"))
        assert len(store.keys("p")) == 30
        store.seal("p")
        for key, row in store.scan("p"):
            assert same_bits(row, plain_row(int(key), size=20_000))
