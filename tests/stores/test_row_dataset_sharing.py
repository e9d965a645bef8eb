"""Published rows shared out: loader workers, processes, lost consumers, groups that come late."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.stores.redis_backend import RedisBackend
from tests.stores.redis_server import RedisServer
from tests.stores.test_row_dataset import publish
from tokenplane.schemas.training_row import TRAINING_PARTITION
from tokenplane.staging.contract_suite.backend import FakeClock
from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.open_store import open_store
from tokenplane.staging.row_dataset import acknowledge, row_dataset
from tokenplane.staging.row_dataset_batches import RowReader

GROUPS = "aabbccddeeffgghh"

READER = """
import sys, time
from tokenplane.staging import open_store
from tokenplane.staging.row_dataset_batches import RowReader
url, lease_s, hang = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "hang"
with open_store(url) as store:
    for batch in RowReader(store, "t", max_rows=2, lease_s=lease_s, idle_s=1.0):
        print(*batch.row_ids, flush=True)
        if hang:
            time.sleep(600)
        time.sleep(0.05)
        assert RowReader(store, "t", max_rows=2, lease_s=1).ack(batch) == len(batch)
"""


def start_reader(url: str, lease_s: float, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", READER, url, str(lease_s), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_workers_of_a_loader_hand_no_row_out_twice(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    url = (tmp_path / "store").as_uri()
    with open_store(url) as store:
        publish(store, GROUPS)
    dataset = row_dataset(url, "t", max_rows=2, lease_s=600.0)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}
    batches = list(DataLoader(dataset, batch_size=None, **options))
    handed = [row for batch in batches for row in batch["row_ids"]]
    assert sorted(handed, key=_number) == [f"row-{number}" for number in range(16)]
    for batch in batches:  # whole groups
        assert len(set(batch["group_ids"])) == 1
        assert len(batch["row_ids"]) == 2
    # Only half of them are trained on before the job is lost: the others come again, once.
    with open_store(url) as store:
        for batch in batches[:4]:
            assert acknowledge(store, "t", batch) == 2
        assert store.stats(TRAINING_PARTITION).backlog == {"t": 8}
    with open_store(url, clock=lambda: time.time() + 601) as later:
        again = list(RowReader(later, "t", max_rows=2, lease_s=600))
        rest = [row for batch in batches[4:] for row in batch["row_ids"]]
        assert [row for batch in again for row in batch.row_ids] == sorted(rest, key=_number)
        assert {attempt for batch in again for attempt in batch.attempts.tolist()} == {2}


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_a_killed_consumers_rows_come_again_when_its_lease_ends(
    kind: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    if kind == "redis":
        url = f"{redis_server.url}?namespace={RedisBackend(redis_server).namespace}"
    with open_store(url) as store:
        publish(store, GROUPS)
        lost = start_reader(url, 4.0, "hang")
        assert lost.stdout is not None
        held = lost.stdout.readline().split()
        lost.send_signal(signal.SIGKILL)
        lost.wait()
        lost.stdout.close()
        assert len(held) == 2
        readers = [start_reader(url, 600.0, "on") for _ in range(2)]
        seen: list[str] = []
        for reader in readers:
            said, _ = reader.communicate()
            assert reader.returncode == 0
            seen += said.split()
        # Whoever looked after the lease had ended was given its group, whole; nobody else's twice.
        deadline = time.monotonic() + 60
        while len(seen) < len(GROUPS):
            assert time.monotonic() < deadline
            for claim in store.claim(
                TRAINING_PARTITION, "t", max_rows=2, lease_s=600, group_column="group_id"
            ):
                assert (claim.key in held, claim.attempt) == (True, 2)
                seen.append(claim.key)
            time.sleep(0.1)
        assert sorted(seen, key=_number) == [f"row-{number}" for number in range(16)]


def _number(row_id: str) -> int:
    return int(row_id.removeprefix("row-"))


def test_a_group_comes_whole_though_its_members_come_one_by_one() -> None:
    clock = FakeClock()
    with MemoryStore(clock=clock) as store:

        def claimed(wait_s: float | None = None) -> list[tuple[str, ...]]:
            reader = RowReader(
                store, "t", max_rows=9, lease_s=60, group_size=3, group_wait_s=wait_s
            )
            return [batch.row_ids for batch in reader]

        publish(store, "ab")
        publish(store, "ab", first=2)
        assert claimed() == []
        publish(store, "a", first=4)
        assert claimed() == [("row-0", "row-2", "row-4")]
        assert store.stats(TRAINING_PARTITION).backlog == {"t": 5}
        clock.advance(30)  # the third member of b was lost with its publisher
        assert claimed(wait_s=31) == []
        assert claimed(wait_s=30) == [("row-1", "row-3")]
        clock.advance(61)
        store.ack(TRAINING_PARTITION, "t", ["row-0"])
        # A lease that ends in the middle of a group brings back what was not acknowledged of it.
        assert claimed() == [("row-1", "row-2", "row-3", "row-4")]
