"""Contract of every store: putting, getting, scanning and discarding rows."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable

import pytest

from tokenplane.schemas.errors import (
    CorruptRowError,
    KeyConflictError,
    MissingRowError,
    SchemaMismatchError,
    StoreClosedError,
    StoreError,
)
from tokenplane.schemas.row_message import decode_message, encode_message
from tokenplane.schemas.staged_row import TOKEN_COLUMNS, parse_staged_row
from tokenplane.staging.contract_suite.backend import (
    StoreBackend,
    plain_row,
    same_bits,
    staged_row,
)
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import RetentionPolicy

RACERS = 8


def run_together(*jobs: Callable[[], object]) -> list[object]:
    """Start the jobs in threads at one moment; each one's result, or the store's error.

    Raises:
        BaseException: whatever else a job raised, a failed assertion for example.
    """
    start = threading.Barrier(len(jobs))
    results: list[object] = [None] * len(jobs)
    failures: list[BaseException] = []

    def run(index: int, job: Callable[[], object]) -> None:
        start.wait()
        try:
            results[index] = job()
        except StoreError as exc:
            results[index] = exc
        except BaseException as exc:  # noqa: BLE001 - carried over to the test
            failures.append(exc)

    threads = [threading.Thread(target=run, args=job) for job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


class RowContract:
    """See ``StagingStoreContract``."""

    def test_get_returns_the_row_bit_for_bit(self, store: StagingStore) -> None:
        row = plain_row(7)
        assert store.put("p", "k", row) is True
        (found,) = store.get("p", ["k"])
        assert same_bits(found, row)
        assert encode_message(found) == encode_message(row)

    def test_what_is_stored_is_the_row_message(
        self, store: StagingStore, backend: StoreBackend
    ) -> None:
        row = plain_row(7)
        store.put("p", "k", row)
        message = backend.raw_read(store, "p", "k")
        assert message == encode_message(row)
        assert same_bits(decode_message(message), row)

    def test_a_staged_row_comes_back_whole(self, store: StagingStore) -> None:
        row = staged_row("\u00e9", "\U0001f600")
        store.put("staged", row.staging_key, row.to_batch())
        (found,) = store.get("staged", [row.staging_key])
        assert same_bits(found, row.to_batch())
        parse_staged_row(found, key=row.staging_key).call.check_digest()

    def test_an_identical_put_is_false_and_changes_nothing(self, store: StagingStore) -> None:
        assert store.put("p", "k", plain_row(1)) is True
        assert store.put("p", "k", plain_row(1)) is False
        assert store.keys("p") == ["k"]
        assert store.stats("p").rows == 1

    def test_another_row_under_a_key_is_refused(self, store: StagingStore) -> None:
        store.put("p", "k", plain_row(1))
        with pytest.raises(KeyConflictError) as caught:
            store.put("p", "k", plain_row(2))
        assert caught.value.key == "k"
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), KeyConflictError)
        assert same_bits(store.get("p", ["k"])[0], plain_row(1))

    def test_partitions_do_not_share_keys(self, store: StagingStore) -> None:
        assert store.put("p", "k", plain_row(1))
        assert store.put("q", "k", plain_row(2))
        assert same_bits(store.get("p", ["k"])[0], plain_row(1))
        assert store.partitions() == ["p", "q"]
        store.discard("p", ["k"])
        assert store.partitions() == ["q"]

    def test_one_of_many_identical_puts_writes(self, store: StagingStore) -> None:
        results = run_together(*[lambda: store.put("p", "k", plain_row(1))] * RACERS)
        assert sorted(map(str, results)) == ["False"] * (RACERS - 1) + ["True"]

    def test_one_of_many_different_puts_wins(self, store: StagingStore) -> None:
        rows = [plain_row(number) for number in range(RACERS)]
        results = run_together(*[lambda row=row: store.put("p", "k", row) for row in rows])
        assert results.count(True) == 1
        assert sum(isinstance(result, KeyConflictError) for result in results) == RACERS - 1
        assert same_bits(store.get("p", ["k"])[0], rows[results.index(True)])

    def test_many_threads_put_different_keys(self, store: StagingStore) -> None:
        def put_some(writer: int) -> None:
            for number in range(10):
                store.put("p", f"{writer}/{number}", plain_row(number))

        run_together(*[lambda writer=writer: put_some(writer) for writer in range(4)])
        assert len(store.keys("p")) == 40
        for writer in range(4):
            # One thread's rows are in the order in which it wrote them.
            assert store.keys("p", f"{writer}/") == [f"{writer}/{n}" for n in range(10)]

    def test_get_keeps_the_order_of_the_request(self, store: StagingStore) -> None:
        for number in range(5):
            store.put("p", f"k{number}", plain_row(number))
        wanted = ["k3", "k0", "k4"]
        found = store.get("p", wanted)
        assert [row.column("ids")[0].as_py()[0] for row in found] == [3, 0, 4]
        assert store.get("p", []) == []

    def test_get_names_every_missing_key(self, store: StagingStore) -> None:
        store.put("p", "there", plain_row())
        with pytest.raises(MissingRowError, match=r"gone.*lost") as caught:
            store.get("p", ["gone", "there", "lost"])
        assert caught.value.key == "gone"
        with pytest.raises(MissingRowError):
            store.get("never written", ["k"])

    def test_get_gives_only_the_columns_asked_for(self, store: StagingStore) -> None:
        row = staged_row()
        store.put("staged", row.staging_key, row.to_batch())
        (found,) = store.get("staged", [row.staging_key], TOKEN_COLUMNS)
        assert tuple(found.schema.names) == TOKEN_COLUMNS
        assert found.equals(row.to_batch().select(list(TOKEN_COLUMNS)))
        with pytest.raises(SchemaMismatchError):
            store.get("staged", [row.staging_key], ["no such column"])

    def test_damaged_bytes_never_become_a_row(
        self, store: StagingStore, backend: StoreBackend
    ) -> None:
        store.put("p", "k", plain_row())
        message = backend.raw_read(store, "p", "k")
        damaged = [message[:-1], message[:70], message[:10], b"", message + b"\0"]
        for at in range(0, len(message), 37):
            flipped = bytearray(message)
            flipped[at] ^= 1
            damaged.append(bytes(flipped))
        for content in damaged:
            backend.raw_write(store, "p", "k", content)
            with pytest.raises(CorruptRowError):
                store.get("p", ["k"])
            with pytest.raises(CorruptRowError):
                list(store.scan("p"))
        backend.raw_write(store, "p", "k", message)
        assert same_bits(store.get("p", ["k"])[0], plain_row())

    def test_a_row_under_another_key_is_noticed(
        self, store: StagingStore, backend: StoreBackend
    ) -> None:
        store.put("p", "k", plain_row(1))
        store.put("p", "l", plain_row(2))
        backend.raw_write(store, "p", "k", backend.raw_read(store, "p", "l"))
        with pytest.raises(CorruptRowError):
            store.get("p", ["k"])
        assert same_bits(store.get("p", ["l"])[0], plain_row(2))

    def test_scan_is_in_write_order_with_columns(self, store: StagingStore) -> None:
        keys = ["b", "a", "c/2", "c/1"]
        for number, key in enumerate(keys):
            store.put("p", key, plain_row(number))
        assert [key for key, _ in store.scan("p")] == keys
        assert [key for key, _ in store.scan("p", "c/")] == ["c/2", "c/1"]
        rows = [row for _, row in store.scan("p", columns=["text", "ids"])]
        assert [row.schema.names for row in rows] == [["text", "ids"]] * 4
        assert list(store.scan("empty")) == []

    def test_scan_is_a_snapshot(self, store: StagingStore) -> None:
        for number in range(6):
            store.put("p", f"k{number}", plain_row(number))
        scan = store.scan("p")
        first = next(scan)
        store.discard("p", ["k4"])
        store.put("p", "later", plain_row(9))
        assert [first[0], *(key for key, _ in scan)] == [f"k{number}" for number in range(6)]
        assert [key for key, _ in store.scan("p")] == ["k0", "k1", "k2", "k3", "k5", "later"]

    def test_an_abandoned_scan_holds_nothing_up(self, store: StagingStore) -> None:
        for number in range(3):
            store.put("p", f"k{number}", plain_row(number))
        for _ in range(40):
            next(store.scan("p"))
        assert store.discard("p", store.keys("p")) == 3

    def test_discard_is_idempotent(self, store: StagingStore) -> None:
        for number in range(3):
            store.put("p", f"k{number}", plain_row(number))
        assert store.discard("p", ["k0", "k2", "k2", "gone"]) == 2
        assert store.discard("p", ["k0", "k2"]) == 0
        assert store.discard("never written", ["k"]) == 0
        assert store.keys("p") == ["k1"]
        with pytest.raises(MissingRowError):
            store.get("p", ["k0", "k1"])
        assert store.put("p", "k0", plain_row(8))
        assert store.keys("p") == ["k1", "k0"]

    def test_readers_see_whole_rows_or_none_while_they_are_discarded(
        self, store: StagingStore
    ) -> None:
        keys = [f"k{number}" for number in range(20)]
        rows = {key: plain_row(number) for number, key in enumerate(keys)}
        for key in keys:
            store.put("p", key, rows[key])
        wrong: list[str] = []

        def read() -> None:
            while left := store.keys("p"):
                for key in left:
                    try:
                        (found,) = store.get("p", [key])
                    except MissingRowError:
                        continue
                    if not same_bits(found, rows[key]):
                        wrong.append(key)

        def remove() -> None:
            for key in keys:
                store.discard("p", [key])

        results = run_together(read, read, remove)
        assert results == [None, None, None]
        assert wrong == []

    def test_a_closed_store_says_so(self, backend: StoreBackend) -> None:
        store = backend.open()
        store.put("p", "k", plain_row())
        scan = store.scan("p")
        hold = store.hold("p", "other", lease_s=1)
        store.close()
        store.close()
        calls: list[Callable[[], object]] = [
            lambda: store.put("p", "k", plain_row()),
            lambda: store.get("p", ["k"]),
            lambda: store.get_blob(bytes(32)),
            lambda: store.discard("p", ["k"]),
            lambda: store.scan("p"),
            lambda: store.keys("p"),
            lambda: store.partitions(),
            lambda: store.claim("p", "c", max_rows=1, lease_s=1),
            lambda: store.ack("p", "c", ["k"]),
            lambda: store.release("p", "c", ["k"]),
            lambda: store.hold("p", lease_s=1),
            lambda: store.extend_hold(hold, lease_s=1),
            lambda: store.end_hold(hold),
            lambda: store.stats(),
            lambda: store.seal("p"),
            lambda: store.sweep(RetentionPolicy()),
            lambda: next(scan),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()
        with backend.open() as again:
            assert again.url
