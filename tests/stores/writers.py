"""Writer processes that say on a file which rows were acknowledged, to be killed at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tokenplane.schemas.errors import StoreError
from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import to_blob


def written_row(writer: int, number: int) -> tuple[str, int]:
    """(key, row number) of a writer's row."""
    return f"{writer}/{number}", writer * 100_000 + number


def blob_data(writer: int, number: int) -> bytes:
    """What every fourth row has beside it."""
    return f"{writer}:{number}|".encode() * 3000


class Writer:
    """Puts rows until it is killed; a retryable error is met by another try."""

    def __init__(self, url: str, folder: Path, number: int) -> None:
        self.number = number
        self._log = folder / f"acked-{number}"
        self._log.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stores.writers", url, str(self._log), str(number)],
            cwd=Path(__file__).parents[2],
        )

    def acked(self) -> list[int]:
        """Numbers of the rows whose put returned."""
        lines = self._log.read_text().split("\n")
        return [int(line) for line in lines[:-1]]

    def wait_for(self, rows: int, *, within_s: float = 30.0) -> None:
        """Until so many rows are acknowledged."""
        deadline = time.monotonic() + within_s
        while len(self.acked()) < rows:
            assert self._process.poll() is None, "the writer ended"
            assert time.monotonic() < deadline, f"{len(self.acked())} rows in {within_s} s"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


def check_acked(store: StagingStore, writers: list[Writer]) -> int:
    """Every acknowledged row is there as written, and nothing else is wrong; rows checked."""
    checked = 0
    for writer in writers:
        there = set(store.keys("p", f"{writer.number}/"))
        acked = writer.acked()
        for number in acked:
            key, value = written_row(writer.number, number)
            (row,) = store.get("p", [key])
            assert same_bits(row, plain_row(value)), key
            there.discard(key)
            if number % 4 == 0:
                data = blob_data(writer.number, number)
                assert store.get_blob(to_blob(data).sha256).to_pybytes() == data
            checked += 1
        # At most the one row whose acknowledgement was cut off.
        assert there <= {written_row(writer.number, len(acked))[0]}
    for key, row in store.scan("p"):
        writer_number, number = map(int, key.split("/"))
        assert same_bits(row, plain_row(written_row(writer_number, number)[1]))
    return checked


def main(url: str, log: str, writer: int) -> None:
    """Write row after row."""
    with open_store(url) as store, open(log, "a", buffering=1) as acked:
        number = 0
        while True:
            key, value = written_row(writer, number)
            blobs = [to_blob(blob_data(writer, number))] if number % 4 == 0 else []
            try:
                store.put("p", key, plain_row(value), blobs=blobs)
            except StoreError as exc:
                if not exc.retryable:
                    raise
                time.sleep(0.05)
                continue
            acked.write(f"{number}\n")
            number += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
