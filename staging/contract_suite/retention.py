"""Contract of every store: sealed partitions and retention."""

from __future__ import annotations

import threading

import pytest

from tokenplane.schemas.errors import (
    ConfigError,
    InvalidKeyError,
    KeyConflictError,
    MissingRowError,
    SealedPartitionError,
)
from tokenplane.staging.contract_suite.backend import (
    FakeClock,
    named_row,
    plain_row,
    same_bits,
)
from tokenplane.staging.contract_suite.claims import fill, taken
from tokenplane.staging.contract_suite.rows import run_together
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import RetentionPolicy, to_blob


class SealContract:
    """See ``StagingStoreContract``."""

    def test_a_sealed_partition_reads_as_before(self, store: StagingStore) -> None:
        rows = {str(number): plain_row(number, group="ab"[number % 2]) for number in range(600)}
        for key, row in rows.items():
            store.put("p", key, row)
        store.put("q", "k", plain_row())
        before = store.stats("p")
        store.seal("p")
        store.seal("p")
        assert store.stats("p").sealed == ("p",)
        assert (store.stats("p").rows, store.stats("p").bytes) == (before.rows, before.bytes)
        assert [key for key, _ in store.scan("p")] == list(rows) == store.keys("p")
        assert all(same_bits(row, rows[key]) for key, row in store.scan("p"))
        assert all(
            same_bits(row, rows[key])
            for key, row in zip(
                ["599", "0", "256"], store.get("p", ["599", "0", "256"]), strict=True
            )
        )
        assert store.get("p", ["3"], ["text"])[0].schema.names == ["text"]
        assert [key for key, _ in store.scan("p", "59")] == ["59", *map(str, range(590, 600))]
        assert store.partitions() == ["p", "q"]
        with pytest.raises(MissingRowError):
            store.get("p", ["600"])

    def test_a_sealed_partition_takes_no_more_rows(self, store: StagingStore) -> None:
        store.put("p", "k", plain_row(1))
        store.seal("p")
        with pytest.raises(SealedPartitionError):
            store.put("p", "l", plain_row(2))
        assert store.put("p", "k", plain_row(1)) is False
        with pytest.raises(KeyConflictError):
            store.put("p", "k", plain_row(2))
        assert store.keys("p") == ["k"]
        assert store.put("q", "l", plain_row(2))

    def test_a_sealed_partition_is_claimed_and_discarded(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        fill(store, "abab")
        store.claim("p", "c", max_rows=1, lease_s=5)
        store.seal("p")
        assert taken(store.claim("p", "c", max_rows=9, lease_s=5, group_column="group")) == "13"
        store.ack("p", "c", ["1", "3"])
        clock.advance(6)
        claims = store.claim("p", "c", max_rows=9, lease_s=5)
        assert taken(claims) == "02"
        assert [claim.attempt for claim in claims] == [2, 1]
        assert same_bits(claims[1].row, plain_row(2, group="a"))
        assert store.discard("p", ["0", "1"]) == 2
        assert [key for key, _ in store.scan("p")] == ["2", "3"]
        with pytest.raises(MissingRowError):
            store.get("p", ["0"])

    def test_a_sealed_partition_that_is_emptied_is_open_again(self, store: StagingStore) -> None:
        fill(store, "..")
        store.seal("p")
        scan = store.scan("p")
        store.discard("p", ["0", "1"])
        assert [key for key, _ in scan] == ["0", "1"]
        assert store.stats().sealed == ()
        with pytest.raises(MissingRowError):
            store.get("p", ["0"])
        assert store.put("p", "0", plain_row(9))
        assert same_bits(store.get("p", ["0"])[0], plain_row(9))
        store.seal("p")
        assert same_bits(store.get("p", ["0"])[0], plain_row(9))

    def test_versions_of_a_schema_survive_sealing(self, store: StagingStore) -> None:
        rows = [named_row(1), named_row(2, extra="x"), named_row(1), named_row(2)]
        for number, row in enumerate(rows):
            store.put("p", str(number), row)
        store.seal("p")
        found = [row for _, row in store.scan("p")]
        assert all(same_bits(a, b) for a, b in zip(found, rows, strict=True))

    def test_there_is_nothing_to_seal_in_an_empty_partition(self, store: StagingStore) -> None:
        with pytest.raises(MissingRowError):
            store.seal("p")


class RetentionContract:
    """See ``StagingStoreContract``."""

    def test_old_rows_go_and_young_ones_stay(self, store: StagingStore, clock: FakeClock) -> None:
        store.put("p", "old", plain_row(1), blobs=[to_blob(b"b" * 1000)])
        clock.advance(100)
        store.put("p", "young", plain_row(2))
        before = store.stats()
        assert store.sweep(RetentionPolicy(max_age_s=100.5)).rows == 0
        report = store.sweep(RetentionPolicy(max_age_s=100))
        assert (report.rows, report.blobs, report.blob_bytes) == (1, 1, 1000)
        assert store.keys("p") == ["young"]
        after = store.stats()
        assert report.bytes == before.bytes - after.bytes
        assert report.remaining_bytes == after.bytes + after.blob_bytes
        assert (report.max_bytes, report.dry_run) == (None, False)

    def test_without_an_age_no_row_goes(self, store: StagingStore, clock: FakeClock) -> None:
        store.put("p", "k", plain_row())
        clock.advance(1e9)
        assert store.sweep(RetentionPolicy()).rows == 0
        assert store.keys("p") == ["k"]

    def test_a_dry_run_says_what_a_run_does(self, store: StagingStore, clock: FakeClock) -> None:
        shared, own = to_blob(b"s" * 500), to_blob(b"o" * 300)
        store.put("p", "a", plain_row(1), blobs=[shared, own])
        store.put("p", "b", plain_row(2))
        store.put("q", "c", plain_row(3), blobs=[shared])
        clock.advance(10)
        policy = RetentionPolicy(max_age_s=5, partition="p")
        dry = store.sweep(policy, dry_run=True)
        assert store.keys("p") == ["a", "b"]
        wet = store.sweep(policy)
        assert dry.dry_run
        assert not wet.dry_run
        for name in ("rows", "bytes", "blobs", "blob_bytes", "remaining_bytes"):
            assert getattr(dry, name) == getattr(wet, name), name
        assert (wet.rows, wet.blobs, wet.blob_bytes) == (2, 1, 300)
        assert store.partitions() == ["q"]
        assert store.get_blob(shared.sha256).size == 500

    def test_a_prefix_is_cleared_in_one_partition(self, store: StagingStore) -> None:
        for key in ("a/1", "a/2", "a_/1", "b/1"):
            store.put("p", key, plain_row())
            store.put("q", key, plain_row())
        report = store.sweep(RetentionPolicy(max_age_s=0, partition="p", prefix="a/"))
        assert report.rows == 2
        assert store.keys("p") == ["a_/1", "b/1"]
        assert len(store.keys("q")) == 4

    def test_a_whole_prefix_goes_or_nothing_of_it(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        def sweep(prefix: str) -> int:
            policy = RetentionPolicy(
                max_age_s=10, partition="p", prefix=prefix, whole=True, orphan_age_s=None
            )
            dry = store.sweep(policy, dry_run=True)
            report = store.sweep(policy)
            assert (dry.rows, dry.bytes, dry.remaining_bytes) == (
                report.rows,
                report.bytes,
                report.remaining_bytes,
            )
            return report.rows

        for key in ("a/1", "b/1", "c/1", "d/1", "e/1"):
            store.put("p", key, plain_row(), blobs=[to_blob(key.encode())])
        clock.advance(8)
        for key in ("a/2", "b/2", "c/2", "d/2"):
            store.put("p", key, plain_row())
        clock.advance(8)
        assert sweep("a/") == 0  # the second row is too young
        assert sweep("e/") == 1
        clock.advance(8)
        assert sweep("a/") == 2
        store.ack("p", "c", ["b/1"])
        assert sweep("b/") == 0  # a consumer waits for the second row
        store.ack("p", "c", ["b/2", "c/1", "c/2", "d/1", "d/2"])
        hold = store.hold("p", "c/2", lease_s=5)
        assert (sweep("b/"), sweep("c/")) == (2, 0)
        store.end_hold(hold)
        assert (sweep("c/"), sweep("nothing")) == (2, 0)
        assert store.keys("p") == ["d/1", "d/2"]

    def test_a_clock_that_jumps_removes_nothing_early(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        clock.advance(1e6)
        store.put("p", "k", plain_row())
        clock.advance(-1e6)  # the row is from the future now
        assert store.sweep(RetentionPolicy(max_age_s=0)).rows == 0
        clock.advance(1e6 + 9)
        assert store.sweep(RetentionPolicy(max_age_s=10)).rows == 0
        clock.advance(1)
        assert store.sweep(RetentionPolicy(max_age_s=10)).rows == 1

    def test_readers_see_whole_rows_or_none_while_they_are_sealed_and_swept(
        self, store: StagingStore
    ) -> None:
        rows = {str(number): plain_row(number, size=300) for number in range(30)}

        def read() -> None:
            while not done.is_set():
                for key in store.keys("p"):
                    try:
                        (row,) = store.get("p", [key])
                    except MissingRowError:
                        continue
                    assert same_bits(row, rows[key])
                assert all(same_bits(row, rows[key]) for key, row in store.scan("p"))

        def work() -> None:
            try:
                for _ in range(3):
                    for key, row in rows.items():
                        store.put("p", key, row)
                    store.seal("p")
                    assert store.sweep(RetentionPolicy(max_age_s=0)).rows == len(rows)
            finally:
                done.set()

        done = threading.Event()
        assert run_together(read, work) == [None, None]

    def test_a_leased_row_is_never_removed(self, store: StagingStore, clock: FakeClock) -> None:
        fill(store, "...")
        store.claim("p", "c", max_rows=1, lease_s=10)
        policy = RetentionPolicy(max_age_s=0, include_backlog=True)
        report = store.sweep(policy)
        assert (report.rows, report.kept_leased, report.kept_backlog) == (2, 1, 0)
        assert store.keys("p") == ["0"]
        clock.advance(10)
        assert store.sweep(policy).rows == 1

    def test_a_row_that_a_consumer_waits_for_is_kept(self, store: StagingStore) -> None:
        fill(store, "....")
        store.claim("p", "c", max_rows=2, lease_s=10)
        store.ack("p", "c", ["0", "2"])
        store.release("p", "c", ["1"])
        report = store.sweep(RetentionPolicy(max_age_s=0))
        assert (report.rows, report.kept_leased, report.kept_backlog) == (2, 0, 2)
        assert store.keys("p") == ["1", "3"]

    def test_a_sealed_partition_is_swept(self, store: StagingStore, clock: FakeClock) -> None:
        fill(store, "...")
        store.seal("p")
        clock.advance(10)
        assert store.sweep(RetentionPolicy(max_age_s=10)).rows == 3
        assert store.partitions() == []
        assert store.stats() == store.stats("p")

    def test_sizes_add_up(self, store: StagingStore) -> None:
        for key in ("r/1", "r/2", "s/1"):
            store.put("p", key, plain_row(), blobs=[to_blob(key.encode())])
        whole, part = store.stats("p"), store.stats("p", "r/")
        assert (whole.rows, part.rows) == (3, 2)
        assert whole.bytes == part.bytes + store.stats("p", "s/").bytes
        assert (part.blobs, part.blob_bytes) == (2, 6)
        assert store.stats("never written").rows == 0
        with pytest.raises(InvalidKeyError):
            store.stats(prefix="r/")

    @pytest.mark.parametrize("age", [-1.0, float("nan")])
    def test_a_policy_has_no_negative_age(self, age: float) -> None:
        with pytest.raises(ConfigError):
            RetentionPolicy(max_age_s=age)
        with pytest.raises(ConfigError):
            RetentionPolicy(orphan_age_s=age)
