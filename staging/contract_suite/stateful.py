"""Random operations on a store against a model of dictionaries (hypothesis).

::

    def test_random_operations(tmp_path: Path) -> None:
        run_random_operations(MyBackend(tmp_path), reopens=True)

All examples share one store; each has a partition of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tokenplane.schemas.errors import (
    KeyConflictError,
    MissingRowError,
    RowHeldError,
    SealedPartitionError,
)
from tokenplane.staging.contract_suite.backend import FakeClock, StoreBackend, plain_row, same_bits
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import Hold, RetentionPolicy, to_blob

KEYS = st.sampled_from(["a", "a/1", "a/2", "a%", "b", "b/1", "\u00e9"])
PREFIXES = st.sampled_from(["", "a", "a/", "a%", "b", "\u00e9", "nothing"])
KEY_SETS = st.lists(KEYS, max_size=4, unique=True)
CONSUMERS = st.sampled_from(["one", "two"])
VALUES = st.integers(0, 2)
LEASE_S = 10.0


@dataclass
class _Consumer:
    acked: set[str] = field(default_factory=set)
    expires: dict[str, float] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)


@dataclass
class _Stored:
    value: int
    blob: bytes | None
    created_at: float


@dataclass
class _Session:
    """What the examples of one run share."""

    backend: StoreBackend
    clock: FakeClock
    store: StagingStore
    reopens: bool
    examples: int = 0


class StoreMachine(RuleBasedStateMachine):
    """One example: its operations on one partition, and what should have come of them."""

    def __init__(self, session: _Session) -> None:
        super().__init__()
        self.session = session
        self.clock = session.clock
        session.examples += 1
        self.partition = f"example {session.examples}"
        self.rows: dict[str, _Stored] = {}
        self.consumers: dict[str, _Consumer] = {}
        self.holds: list[Hold] = []
        self.sealed = False

    @property
    def store(self) -> StagingStore:
        """The store as opened last."""
        return self.session.store

    @staticmethod
    def row(value: int) -> pa.RecordBatch:
        """Values 0 and 1 are in groups, 2 is in none."""
        return plain_row(value, group=None if value == 2 else f"group {value}")

    @initialize()
    def the_partition_is_new(self) -> None:
        assert self.store.keys(self.partition) == []

    @rule(key=KEYS, value=VALUES, with_blob=st.booleans())
    def put(self, key: str, value: int, with_blob: bool) -> None:
        # One blob per value and example, so that rows share blobs.
        data = f"{self.partition} {value}".encode() if with_blob else None
        blobs = [] if data is None else [to_blob(data)]
        there = self.rows.get(key)
        if there is not None and there.value == value:
            assert self.store.put(self.partition, key, self.row(value), blobs=blobs) is False
        elif there is not None or self.sealed:
            error = SealedPartitionError if there is None else KeyConflictError
            with pytest.raises(error):
                self.store.put(self.partition, key, self.row(value), blobs=blobs)
        else:
            assert self.store.put(self.partition, key, self.row(value), blobs=blobs) is True
            self.rows[key] = _Stored(value, data, self.clock())

    @rule(keys=KEY_SETS)
    def get(self, keys: list[str]) -> None:
        if set(keys) <= self.rows.keys():
            found = self.store.get(self.partition, keys)
            for key, row in zip(keys, found, strict=True):
                assert same_bits(row, self.row(self.rows[key].value))
        else:
            with pytest.raises(MissingRowError):
                self.store.get(self.partition, keys)

    @rule(keys=KEY_SETS)
    def discard(self, keys: list[str]) -> None:
        there = [key for key in keys if key in self.rows]
        if any(self._is_held(key) for key in there):
            with pytest.raises(RowHeldError):
                self.store.discard(self.partition, keys)
            return
        assert self.store.discard(self.partition, keys) == len(there)
        self._forget(there)

    @rule(prefix=PREFIXES)
    def hold(self, prefix: str) -> None:
        self.holds.append(self.store.hold(self.partition, prefix, lease_s=LEASE_S))

    @precondition(lambda self: self.holds)
    @rule(ends=st.booleans())
    def end_or_extend_a_hold(self, ends: bool) -> None:
        hold = self.holds.pop(0)
        if ends:
            self.store.end_hold(hold)
            return
        live = hold.expires_at_s > self.clock()
        assert self.store.extend_hold(hold, lease_s=LEASE_S) is live
        if live:
            self.holds.append(replace(hold, expires_at_s=self.clock() + LEASE_S))

    def _is_held(self, key: str) -> bool:
        return any(
            key.startswith(hold.prefix) and hold.expires_at_s > self.clock() for hold in self.holds
        )

    @rule(prefix=PREFIXES)
    def scan(self, prefix: str) -> None:
        found = dict(self.store.scan(self.partition, prefix))
        assert list(found) == [key for key in self.rows if key.startswith(prefix)]
        assert self.store.keys(self.partition, prefix) == list(found)
        for key, row in found.items():
            assert same_bits(row, self.row(self.rows[key].value))

    @rule(consumer=CONSUMERS, max_rows=st.integers(1, 4), grouped=st.booleans())
    def claim(self, consumer: str, max_rows: int, grouped: bool) -> None:
        claims = self.store.claim(
            self.partition,
            consumer,
            max_rows=max_rows,
            lease_s=LEASE_S,
            group_column="group" if grouped else None,
        )
        reader = self.consumers.setdefault(consumer, _Consumer())
        assert [claim.key for claim in claims] == self._expected(reader, max_rows, grouped)
        for claim in claims:
            reader.attempts[claim.key] = reader.attempts.get(claim.key, 0) + 1
            reader.expires[claim.key] = self.clock() + LEASE_S
            assert claim.attempt == reader.attempts[claim.key]
            assert claim.expires_at_s == reader.expires[claim.key]
            assert same_bits(claim.row, self.row(self.rows[claim.key].value))

    def _expected(self, reader: _Consumer, max_rows: int, grouped: bool) -> list[str]:
        waiting = [key for key in self.rows if key not in reader.acked]
        free = [key for key in waiting if not self._is_leased(reader, key)]
        if not grouped:
            return free[:max_rows]
        groups = [[key for key in waiting if self.rows[key].value == value] for value in (0, 1)]
        groups += [[key] for key in waiting if self.rows[key].value == 2]
        ready = [group for group in groups if group and set(group) <= set(free)]
        ready.sort(key=lambda group: waiting.index(group[0]))
        taken: list[str] = []
        for group in ready:
            if not taken or len(taken) + len(group) <= max_rows:
                taken += group
            if len(taken) >= max_rows:
                break
        return [key for key in self.rows if key in taken]

    def _is_leased(self, reader: _Consumer, key: str) -> bool:
        return reader.expires.get(key, 0.0) > self.clock()

    @rule(consumer=CONSUMERS, keys=KEY_SETS)
    def ack(self, consumer: str, keys: list[str]) -> None:
        reader = self.consumers.setdefault(consumer, _Consumer())
        fresh = [key for key in keys if key in self.rows and key not in reader.acked]
        assert self.store.ack(self.partition, consumer, keys) == len(fresh)
        reader.acked |= set(fresh)
        for key in fresh:
            reader.expires.pop(key, None)

    @rule(consumer=CONSUMERS, keys=KEY_SETS)
    def release(self, consumer: str, keys: list[str]) -> None:
        reader = self.consumers.setdefault(consumer, _Consumer())
        live = [key for key in keys if self._is_leased(reader, key)]
        assert self.store.release(self.partition, consumer, keys) == len(live)
        for key in live:
            reader.expires[key] = self.clock()

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.rows)
    @rule()
    def seal(self) -> None:
        self.store.seal(self.partition)
        self.sealed = True

    @rule(
        age=st.sampled_from([0.0, 5.0]),
        prefix=PREFIXES,
        all_of_it=st.booleans(),
        whole=st.booleans(),
    )
    def sweep(self, age: float, prefix: str, all_of_it: bool, whole: bool) -> None:
        policy = RetentionPolicy(
            max_age_s=age,
            partition=self.partition,
            prefix=prefix,
            include_backlog=all_of_it,
            whole=whole,
        )
        dry = self.store.sweep(policy, dry_run=True)
        report = self.store.sweep(policy)
        assert (dry.rows, dry.bytes, dry.blobs) == (report.rows, report.bytes, report.blobs)
        chosen = [key for key in self.rows if key.startswith(prefix)]
        gone = [key for key in chosen if self._may_go(key, age, all_of_it)]
        if whole and gone != chosen:
            gone = []
        assert report.rows == len(gone)
        self._forget(gone)

    def _may_go(self, key: str, age: float, all_of_it: bool) -> bool:
        readers = self.consumers.values()
        if self.clock() - self.rows[key].created_at < age or self._is_held(key):
            return False
        if any(self._is_leased(reader, key) for reader in readers):
            return False
        return all_of_it or all(key in reader.acked for reader in readers)

    @precondition(lambda self: self.session.reopens)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.session.store = self.session.backend.open(clock=self.clock)

    def _forget(self, keys: list[str]) -> None:
        for key in keys:
            del self.rows[key]
            for reader in self.consumers.values():
                reader.acked.discard(key)
                reader.expires.pop(key, None)
                reader.attempts.pop(key, None)
        self.sealed = self.sealed and bool(self.rows)

    @invariant()
    def sizes_and_backlogs_agree(self) -> None:
        stats = self.store.stats(self.partition)
        assert stats.rows == len(self.rows)
        blobs = {stored.blob for stored in self.rows.values() if stored.blob is not None}
        assert (stats.blobs, stats.blob_bytes) == (len(blobs), sum(map(len, blobs)))
        assert stats.sealed == ((self.partition,) if self.sealed else ())
        for name, reader in self.consumers.items():
            assert stats.backlog[name] == len(self.rows) - len(reader.acked)
            live = sum(self._is_leased(reader, key) for key in self.rows)
            assert stats.leased[name] == live
        for data in blobs:
            assert self.store.get_blob(to_blob(data).sha256).to_pybytes() == data


def run_random_operations(backend: StoreBackend, *, reopens: bool, max_examples: int = 40) -> None:
    """Run the machine on a fresh backend.

    Args:
        reopens: rows outlive the object, so the machine may close and reopen the store.
    """
    clock = FakeClock()
    session = _Session(backend, clock, backend.open(clock=clock), reopens)

    class Example(StoreMachine):
        def __init__(self) -> None:
            super().__init__(session)

    try:
        run_state_machine_as_test(
            Example,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=25,
                # How long a store takes says nothing about whether it is right.
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
    finally:
        session.store.close()
