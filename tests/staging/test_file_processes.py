"""Several processes and threads on one directory: opening, forking, racing, closing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tokenplane.schemas.errors import MissingRowError, StoreError
from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.file_backend.store import FileStore
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.testing import run_processes

ROWS = 60


def open_and_put(barrier: Any, opener: Any, index: int) -> list[str]:
    barrier.wait()
    with opener() as store:
        assert store.put("p", str(index), plain_row(index))
        return list(store.keys("p"))


def test_four_processes_open_a_new_directory_at_one_moment(tmp_path: Path) -> None:
    opener = partial(open_store, (tmp_path / "s").as_uri())
    seen = run_processes(open_and_put, opener, 4)
    assert all(str(index) in keys for index, keys in enumerate(seen))
    with opener() as store:
        assert sorted(store.keys("p")) == ["0", "1", "2", "3"]
        assert all(same_bits(row, plain_row(int(key))) for key, row in store.scan("p"))


def read_or_discard(barrier: Any, opener: Any, index: int) -> int:
    """Process 0 discards row after row; the others read them until they are gone."""
    with opener() as store:
        barrier.wait()
        if index == 0:
            return sum(store.discard("p", [str(number)]) for number in range(ROWS))
        seen = 0
        while keys := store.keys("p"):
            for key in keys:
                try:
                    (row,) = store.get("p", [key])
                except MissingRowError:
                    continue
                assert same_bits(row, plain_row(int(key), size=5000))
                seen += 1
            for key, row in store.scan("p"):
                assert same_bits(row, plain_row(int(key), size=5000))
        return seen


def test_rows_are_whole_or_gone_while_another_process_discards(tmp_path: Path) -> None:
    opener = partial(open_store, (tmp_path / "s").as_uri())
    with opener() as store:
        for number in range(ROWS):
            store.put("p", str(number), plain_row(number, size=5000))
    removed, *_ = run_processes(read_or_discard, opener, 3)
    assert removed == ROWS


def in_fork(work: Any) -> str:
    """What ``work()`` gives in a forked child, as text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the test
        pid = os.fork()
    if not pid:
        try:
            text = work()
        except BaseException as exc:  # noqa: BLE001 - the child must end here, whatever it was
            text = repr(exc)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read().decode()
    os.waitpid(pid, 0)
    return text


def code_of(call: Any) -> str:
    try:
        call()
    except StoreError as exc:
        return exc.code
    return "ok"


def test_a_forked_child_is_told_and_harms_nothing(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = FileStore(root)
    store.put("p", "k", plain_row(1))
    scan = store.scan("p")

    holder: list[Any] = [store, scan]

    def child() -> str:
        codes = [
            code_of(lambda: holder[0].put("p", "l", plain_row(2))),
            code_of(lambda: holder[0].get("p", ["k"])),
            code_of(lambda: next(holder[1])),
            code_of(lambda: FileStore(root)),
        ]
        holder[0].close()
        holder.clear()
        return " ".join(codes)

    assert in_fork(child) == "forked forked forked forked"
    assert [key for key, _ in scan] == ["k"]
    assert store.put("p", "l", plain_row(2))
    assert store.keys("p") == ["k", "l"]
    store.close()


def test_a_child_may_open_what_its_parent_closed(tmp_path: Path) -> None:
    root = tmp_path / "s"
    FileStore(root).close()

    def child() -> str:
        with FileStore(root) as store:
            return str(store.put("p", "k", plain_row(1)))

    assert in_fork(child) == "True"
    with FileStore(root) as store:
        assert store.keys("p") == ["k"]


def test_a_subprocess_may_open_what_its_parent_has_open(tmp_path: Path) -> None:
    program = (
        "import sys; from tokenplane.staging import open_store;"
        " print(open_store(sys.argv[1]).keys('p'))"
    )
    with FileStore(tmp_path / "s") as store:
        store.put("p", "k", plain_row())
        command = [sys.executable, "-c", program, store.url]
        assert subprocess.check_output(command, text=True) == "['k']\n"


def test_waiting_puts_share_a_commit(tmp_path: Path) -> None:
    with FileStore(tmp_path / "s") as store:
        commits: list[int] = []
        database = store._database

        def count() -> bool:
            commits.append(1)
            return False

        database._writer.set_commit_hook(count)
        threads = [threading.Thread(target=put_one, args=(store, number)) for number in range(12)]
        with database.write_lock:  # a long commit, behind which the others gather
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 60
            while len(store._writer._queue) < 12 and time.monotonic() < deadline:
                time.sleep(0.01)
        for thread in threads:
            thread.join()
        assert len(commits) == 1
        assert len(store.keys("p")) == 12


def put_one(store: StagingStore, number: int) -> None:
    assert store.put("p", str(number), plain_row(number))


def test_one_bad_put_does_not_spoil_its_group(tmp_path: Path) -> None:
    with FileStore(tmp_path / "s") as store:
        store.put("p", "0", plain_row(99))
        outcomes: dict[int, str] = {}

        def put(number: int) -> None:
            outcomes[number] = code_of(lambda: store.put("p", str(number), plain_row(number)))

        threads = [threading.Thread(target=put, args=(number,)) for number in range(5)]
        with store._database.write_lock:
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 60
            while len(store._writer._queue) < 5 and time.monotonic() < deadline:
                time.sleep(0.01)
        for thread in threads:
            thread.join()
        assert outcomes == {0: "key_conflict", 1: "ok", 2: "ok", 3: "ok", 4: "ok"}


def test_closing_while_others_work_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s")
    done: list[str] = []
    ends: list[str] = []

    def write(writer: int) -> None:
        for number in range(100_000):
            key = f"{writer}/{number}"
            code = code_of(partial(store.put, "p", key, plain_row(number)))
            if code != "ok":
                ends.append(code)
                return
            done.append(key)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    while len(done) < 20:
        time.sleep(0.005)
    store.close()
    for thread in threads:
        thread.join()
    assert ends == ["store_closed"] * 3
    with FileStore(tmp_path / "s") as again:
        assert len(again.get("p", done)) == len(done)
        assert set(again.keys("p")) == set(done)


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_a_dropped_store_lets_go_of_its_files(tmp_path: Path, mode: str) -> None:
    FileStore(tmp_path / "s").close()
    with FileStore(tmp_path / "s", mode=mode) as store:
        store.keys("p")
        assert open_files(tmp_path)
    assert open_files(tmp_path) == []


def open_files(below: Path) -> list[str]:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if link.is_symlink()]
    return [target for target in targets if target.startswith(str(below))]
