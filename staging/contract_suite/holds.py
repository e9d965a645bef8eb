"""Contract of every store: rows that are being read are not removed."""

from __future__ import annotations

import threading

import pytest

from tokenplane.schemas.errors import ConfigError, InvalidKeyError, MissingRowError, RowHeldError
from tokenplane.staging.contract_suite.backend import ODD_KEYS, FakeClock, plain_row, same_bits
from tokenplane.staging.contract_suite.rows import run_together
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import Hold, RetentionPolicy, to_blob

ALL_OF_IT = RetentionPolicy(max_age_s=0, include_backlog=True)


class HoldContract:
    """See ``StagingStoreContract``."""

    def test_held_rows_are_not_removed_by_anybody(self, store: StagingStore) -> None:
        blob = to_blob(b"b" * 500)
        for key in ("a/1", "a/2", "b/1"):
            store.put("p", key, plain_row(), blobs=[blob] if key == "a/1" else [])
            store.put("q", key, plain_row())
        hold = store.hold("p", "a/", lease_s=10)
        with pytest.raises(RowHeldError) as caught:
            store.discard("p", ["b/1", "a/2", "gone"])
        assert caught.value.key == "a/2"
        assert caught.value.retryable
        assert store.keys("p") == ["a/1", "a/2", "b/1"]  # all or nothing
        dry = store.sweep(ALL_OF_IT, dry_run=True)
        report = store.sweep(ALL_OF_IT)
        assert (dry.rows, dry.kept_held) == (report.rows, report.kept_held) == (4, 2)
        assert (report.kept_leased, report.kept_backlog, report.blobs) == (0, 0, 0)
        assert store.keys("p") == ["a/1", "a/2"]
        assert store.get_blob(blob.sha256).size == 500
        assert store.discard("p", ["a/3", "b/1"]) == 0
        store.end_hold(hold)
        store.end_hold(hold)
        assert store.discard("p", ["a/1"]) == 1
        assert store.sweep(ALL_OF_IT).rows == 1

    def test_a_hold_ends_by_itself(self, store: StagingStore, clock: FakeClock) -> None:
        store.put("p", "k", plain_row())
        hold = store.hold("p", lease_s=10)
        assert hold == Hold("p", "", hold.hold_id, clock() + 10)
        clock.advance(9.5)
        assert store.sweep(ALL_OF_IT).kept_held == 1
        assert store.extend_hold(hold, lease_s=10) is True
        clock.advance(9.5)
        assert store.sweep(ALL_OF_IT).kept_held == 1
        clock.advance(0.5)
        assert store.extend_hold(hold, lease_s=10) is False
        assert store.discard("p", ["k"]) == 1

    def test_holds_do_not_exclude_each_other(self, store: StagingStore) -> None:
        first = store.hold("p", "a", lease_s=10)
        second = store.hold("p", "a", lease_s=10)
        assert first.hold_id != second.hold_id
        store.put("p", "ab", plain_row())  # rows that come later are held too
        store.end_hold(first)
        with pytest.raises(RowHeldError):
            store.discard("p", ["ab"])
        assert store.extend_hold(first, lease_s=10) is False
        store.end_hold(second)
        assert store.discard("p", ["ab"]) == 1

    def test_a_prefix_holds_what_starts_with_it(self, store: StagingStore) -> None:
        for prefix in ("a%", "a_", "a/", "A", "a\u00e9", "\U0010ffff", "a*?[b]"):
            for key in ODD_KEYS:
                store.put("p", key, plain_row())
            hold = store.hold("p", prefix, lease_s=10)
            assert store.sweep(ALL_OF_IT).kept_held > 0
            assert store.keys("p") == [key for key in ODD_KEYS if key.startswith(prefix)]
            store.end_hold(hold)
            store.discard("p", store.keys("p"))

    def test_a_sealed_partition_is_held(self, store: StagingStore) -> None:
        for key in ("a/1", "b/1"):
            store.put("p", key, plain_row())
        store.seal("p")
        hold = store.hold("p", "a/", lease_s=10)
        assert store.sweep(ALL_OF_IT).rows == 1
        assert same_bits(store.get("p", ["a/1"])[0], plain_row())
        store.end_hold(hold)
        assert store.sweep(ALL_OF_IT).rows == 1
        assert store.partitions() == []

    def test_a_hold_that_holds_nothing_is_refused(self, store: StagingStore) -> None:
        with pytest.raises(ConfigError):
            store.hold("p", lease_s=0)
        with pytest.raises(InvalidKeyError):
            store.hold("", lease_s=1)
        with pytest.raises(InvalidKeyError):
            store.hold("p", "a\0", lease_s=1)

    def test_what_a_reader_holds_stays_while_others_remove(self, store: StagingStore) -> None:
        rows = {f"r{n % 3}/{n}": plain_row(n, size=200) for n in range(24)}
        for key, row in rows.items():
            store.put("p", key, row)
        readers_are_done = threading.Event()

        def read(rollout: str) -> int:
            hold = store.hold("p", rollout, lease_s=1000)
            there = store.keys("p", rollout)
            for key in there * 2:  # one by one: a slow reader
                assert same_bits(store.get("p", [key])[0], rows[key])
            assert store.keys("p", rollout) == there
            store.end_hold(hold)
            return len(there)

        def read_both() -> list[int]:
            try:
                return [read("r0/"), read("r1/")]
            finally:
                readers_are_done.set()

        def sweep() -> None:
            while not readers_are_done.is_set():
                store.sweep(ALL_OF_IT)

        def discard() -> None:
            while not readers_are_done.is_set():
                for key in rows:
                    try:
                        store.discard("p", [key])
                    except RowHeldError:
                        continue

        hold = store.hold("p", "r0/", lease_s=1000)  # so that the first reader has rows to read
        counts, *others = run_together(read_both, sweep, discard)
        assert others == [None, None]
        assert isinstance(counts, list)
        assert counts[0] == 8
        store.end_hold(hold)
        store.sweep(ALL_OF_IT)
        with pytest.raises(MissingRowError):
            store.get("p", ["r0/0"])
