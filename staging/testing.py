"""The tests that every staging store must pass, for backends of your own too.

In a test file of yours::

    class TestMyStore(StagingStoreContract):        # SharedStoreContract if processes share it
        DURABLE = "power"
        SHARED = "host"

        @pytest.fixture
        def backend(self, tmp_path: Path) -> StoreBackend:
            return MyBackend(tmp_path)              # a contract_suite.backend.StoreBackend

Override no test. ``contract_suite.stateful`` adds random operations against a model.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from tokenplane.schemas.errors import (
    KeyConflictError,
    RowHeldError,
    StoreError,
    StoreFullError,
)
from tokenplane.staging.contract_suite.backend import FakeClock, StoreBackend, plain_row, same_bits
from tokenplane.staging.contract_suite.blobs import BlobContract, BudgetContract
from tokenplane.staging.contract_suite.claims import ClaimContract, taken
from tokenplane.staging.contract_suite.holds import ALL_OF_IT, HoldContract
from tokenplane.staging.contract_suite.keys import KeyContract
from tokenplane.staging.contract_suite.retention import RetentionContract, SealContract
from tokenplane.staging.contract_suite.rows import RowContract
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import Durability, Sharing, to_blob

PROCESSES = 3
ROWS_PER_PROCESS = 12
BUDGET_ROW_BYTES = 20_000
BUDGET = 5 * (BUDGET_ROW_BYTES + 2_000)
BUDGET_ROWS = 6


class StagingStoreContract(
    RowContract,
    KeyContract,
    ClaimContract,
    BlobContract,
    BudgetContract,
    SealContract,
    RetentionContract,
    HoldContract,
):
    """What every store does. A subclass gives the fixture ``backend`` and the two constants."""

    DURABLE: ClassVar[Durability]
    """What the store must state, and what the tests of a shared store hold it to."""
    SHARED: ClassVar[Sharing]

    @pytest.fixture
    def backend(self) -> StoreBackend:
        """Opens the store under test."""
        raise TypeError("a backend's test class gives the fixture `backend`")

    @pytest.fixture
    def clock(self) -> FakeClock:
        """The store's clock."""
        return FakeClock()

    @pytest.fixture
    def store(self, backend: StoreBackend, clock: FakeClock) -> Iterator[StagingStore]:
        """An empty store without a budget."""
        with backend.open(clock=clock) as store:
            yield store

    def test_it_states_what_it_is(self, store: StagingStore) -> None:
        assert store.durable == self.DURABLE
        assert store.shared == self.SHARED
        assert ":" in store.url


class SharedStoreContract(StagingStoreContract):
    """What a store does whose rows outlive the object and are seen by other processes."""

    def test_everything_survives_reopening(self, backend: StoreBackend, clock: FakeClock) -> None:
        blob = to_blob(b"b" * 10_000)
        with backend.open(clock=clock) as store:
            for number in range(4):
                store.put("p", str(number), plain_row(number), blobs=[blob])
                store.put("sealed", str(number), plain_row(number))
            store.seal("sealed")
            store.claim("p", "c", max_rows=2, lease_s=10)
            store.ack("p", "c", ["0"])
            before = store.stats()
        with backend.open(clock=clock) as store:
            assert store.stats() == before
            assert store.keys("p") == ["0", "1", "2", "3"]
            assert all(same_bits(row, plain_row(int(key))) for key, row in store.scan("p"))
            assert all(same_bits(row, plain_row(int(key))) for key, row in store.scan("sealed"))
            assert store.get_blob(blob.sha256).to_pybytes() == b"b" * 10_000
            assert store.put("p", "1", plain_row(1)) is False
            assert taken(store.claim("p", "c", max_rows=9, lease_s=10)) == "23"
            clock.advance(10)
            claims = store.claim("p", "c", max_rows=1, lease_s=10)
            assert [(claim.key, claim.attempt) for claim in claims] == [("1", 2)]

    def test_two_open_stores_see_each_other_at_once(
        self, backend: StoreBackend, clock: FakeClock
    ) -> None:
        with backend.open(clock=clock) as left, backend.open(clock=clock) as right:
            for number in range(20):
                left.put("p", f"l{number}", plain_row(number))
                assert same_bits(right.get("p", [f"l{number}"])[0], plain_row(number))
                right.put("p", f"r{number}", plain_row(number))
                assert left.keys("p")[-1] == f"r{number}"
            with pytest.raises(KeyConflictError):
                right.put("p", "l0", plain_row(5))
            assert len(left.claim("p", "c", max_rows=30, lease_s=10)) == 30
            assert len(right.claim("p", "c", max_rows=30, lease_s=10)) == 10
            right.discard("p", ["l0"])
            assert "l0" not in left.keys("p")
            left.seal("p")
            assert same_bits(right.get("p", ["r3"])[0], plain_row(3))
            assert right.discard("p", right.keys("p")) == 39
            assert left.put("p", "l0", plain_row(1))

    def test_a_hold_reaches_other_stores_and_outlives_its_reader(
        self, backend: StoreBackend, clock: FakeClock
    ) -> None:
        with backend.open(clock=clock) as remover:
            with backend.open(clock=clock) as reader:
                for key in ("a/1", "b/1"):
                    reader.put("p", key, plain_row())
                reader.hold("p", "a/", lease_s=10)
                with pytest.raises(RowHeldError):
                    remover.discard("p", ["a/1"])
            # The reader is gone without a word: for as long as it said, and no longer.
            assert remover.sweep(ALL_OF_IT).rows == 1
            assert remover.keys("p") == ["a/1"]
            clock.advance(10)
            assert remover.sweep(ALL_OF_IT).rows == 1

    def test_processes_share_one_budget(self, backend: StoreBackend) -> None:
        with backend.open() as store:
            done = threading.Event()
            most: list[int] = []

            def watch() -> None:
                while not done.wait(0.02):
                    most.append(store.stats().bytes)

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                opener = backend.opener(max_bytes=BUDGET, full_wait_s=0.1)
                results = run_processes(_fill_and_make_room, opener, PROCESSES)
            finally:
                done.set()
                watcher.join()
            assert max(most) <= BUDGET
            written = [count for count, _ in results]
            refused = sum(count for _, count in results)
            assert written == [BUDGET_ROWS] * PROCESSES
            assert refused > 0  # there was less room than all of them wanted at once
            assert store.keys("p") == []

    def test_one_of_many_racing_processes_wins_each_key(self, backend: StoreBackend) -> None:
        with backend.open() as store:
            results = run_processes(_race, backend.opener(), PROCESSES)
            for number in range(ROWS_PER_PROCESS):
                outcomes = [result[number] for result in results]
                same, different = zip(*outcomes, strict=True)
                assert sorted(same) == ["False"] * (PROCESSES - 1) + ["True"]
                assert sorted(different) == ["True"] + ["key_conflict"] * (PROCESSES - 1)
                winner = different.index("True")
                assert same_bits(
                    store.get("p", [f"different{number}"])[0], plain_row(winner, size=2000)
                )

    def test_processes_share_out_the_claims(self, backend: StoreBackend) -> None:
        with backend.open() as store:
            for number in range(40):
                store.put("p", str(number), plain_row(number))
            results = run_processes(_take_all, backend.opener(), PROCESSES)
            keys = sorted((key for result in results for key in result), key=int)
            assert keys == [str(number) for number in range(40)]
            assert store.stats("p").backlog == {"c": 0}


def run_processes(
    work: Callable[[Any, Callable[[], StagingStore], int], Any],
    opener: Callable[[], StagingStore],
    count: int,
) -> list[Any]:
    """What ``work(barrier, opener, index)`` gives in each of ``count`` new processes."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(count) as pool:
        barrier = manager.Barrier(count, timeout=120)
        jobs = [pool.apply_async(work, (barrier, opener, index)) for index in range(count)]
        return [job.get(timeout=150) for job in jobs]


def _fill_and_make_room(
    barrier: Any, opener: Callable[[], StagingStore], index: int
) -> tuple[int, int]:
    """(rows written, puts refused): whoever finds no room removes rows of its own."""
    mine: list[str] = []
    refused = 0
    with opener() as store:
        barrier.wait()
        for number in range(BUDGET_ROWS):
            key = f"{index}/{number}"
            while True:
                try:
                    store.put("p", key, plain_row(number, size=BUDGET_ROW_BYTES))
                    break
                except StoreFullError:
                    refused += 1
                    store.discard("p", [mine.pop(0)] if mine else [])
            mine.append(key)
        store.discard("p", mine)
    return BUDGET_ROWS, refused


def _race(barrier: Any, opener: Callable[[], StagingStore], index: int) -> list[tuple[str, str]]:
    with opener() as store:
        barrier.wait()
        return [
            (
                _outcome(store, f"same{number}", plain_row(number)),
                _outcome(store, f"different{number}", plain_row(index, size=2000)),
            )
            for number in range(ROWS_PER_PROCESS)
        ]


def _outcome(store: StagingStore, key: str, row: pa.RecordBatch) -> str:
    try:
        return str(store.put("p", key, row))
    except StoreError as exc:
        return exc.code


def _take_all(barrier: Any, opener: Callable[[], StagingStore], index: int) -> list[str]:
    keys: list[str] = []
    with opener() as store:
        barrier.wait()
        while claims := store.claim("p", "c", max_rows=1 + index, lease_s=600):
            keys += [claim.key for claim in claims]
            store.ack("p", "c", [claim.key for claim in claims])
    return keys
