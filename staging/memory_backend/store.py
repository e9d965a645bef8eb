"""``memory:``, the reference implementation: encoded messages in dictionaries behind one lock."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from tokenplane.schemas.errors import (
    InvalidKeyError,
    KeyConflictError,
    MissingRowError,
    RowHeldError,
    StoreClosedError,
    StoreFullError,
)
from tokenplane.staging.claim_order import (
    GroupRule,
    PendingRow,
    check_claim,
    check_lease,
    choose_groups,
    group_value,
)
from tokenplane.staging.memory_backend.claims import Consumer
from tokenplane.staging.memory_backend.retention import Sweep
from tokenplane.staging.memory_backend.state import MemoryState, Row
from tokenplane.staging.row_packing import (
    check_blob,
    check_found,
    check_keys,
    check_name,
    check_prefix,
    check_unique_keys,
    pack_row,
)
from tokenplane.staging.store_types import (
    Blob,
    Claimed,
    Durability,
    Hold,
    RetentionPolicy,
    Sharing,
    StoreStats,
    SweepReport,
)
from tokenplane.staging.store_url import StoreUrl, positive_int, seconds


class MemoryStore:
    """A private store in this process's memory; it holds what the other backends hold.

    Args:
        max_bytes: budget over messages and blobs; None is unbounded.
        full_wait_s: how long a put waits for room.
        clock: Unix seconds, for ages and leases.
    """

    durable: Durability = "none"
    shared: Sharing = "private"

    def __init__(
        self,
        *,
        url: str = "memory:",
        max_bytes: int | None = None,
        full_wait_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = url
        self._max_bytes = max_bytes
        self._full_wait_s = full_wait_s
        self._clock = clock
        self._changed = threading.Condition()
        self._content: MemoryState | None = MemoryState()

    def put(
        self, partition: str, key: str, row: pa.RecordBatch, *, blobs: Sequence[Blob] = ()
    ) -> bool:
        """See ``StagingStore.put``."""
        packed = pack_row(partition, key, row)
        contents = {blob.sha256: blob for blob in blobs}
        deadline = time.monotonic() + self._full_wait_s
        with self._changed:
            while True:
                state = self._state()
                held = state.partition(partition)
                if key in held.rows:
                    if held.rows[key].packed.binding == packed.binding:
                        return False
                    raise KeyConflictError("another row is stored under this key", key=key)
                held.check_takes(partition, packed)
                need = state.bytes_to_add(packed, contents)
                if self._max_bytes is None or state.nbytes + need <= self._max_bytes:
                    state.add(partition, key, packed, contents, self._clock())
                    return True
                left = deadline - time.monotonic()
                if need > self._max_bytes or left <= 0 or not self._changed.wait(left):
                    raise StoreFullError(
                        "the byte budget is used up",
                        expected=f"{need} bytes free",
                        got=f"{state.nbytes} of {self._max_bytes} used",
                        key=key,
                    )

    def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        """See ``StagingStore.get``."""
        check_name(partition, "partition")
        wanted = check_unique_keys(keys)
        with self._changed:
            rows = self._state().partition(partition).rows
            check_found(wanted, rows.keys() & set(wanted), partition)
            found = [(key, rows[key]) for key in wanted]
        return [row.unpack(partition, key, columns) for key, row in found]

    def get_blob(self, sha256: bytes) -> pa.Buffer:
        """See ``StagingStore.get_blob``."""
        with self._changed:
            content = self._state().blobs.get(sha256)
        if content is None:
            raise MissingRowError("no row refers to such a blob", key=sha256.hex())
        return check_blob(content.data, sha256)

    def discard(self, partition: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.discard``."""
        check_name(partition, "partition")
        wanted = dict.fromkeys(check_keys(keys))
        with self._changed:
            state = self._state()
            held = state.partition(partition)
            there = [key for key in wanted if key in held.rows]
            now = self._clock()
            for key in there:
                if state.is_held(partition, key, now):
                    raise RowHeldError("somebody is reading the row", key=key)
            for key in there:
                state.remove(held, key)
            self._changed.notify_all()
            return len(there)

    def scan(
        self, partition: str, prefix: str = "", columns: Sequence[str] | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """See ``StagingStore.scan``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        with self._changed:
            rows = self._state().partition(partition).rows
            found = [(key, row) for key, row in rows.items() if key.startswith(prefix)]
        return self._unpacked(partition, found, columns)

    def _unpacked(
        self, partition: str, found: list[tuple[str, Row]], columns: Sequence[str] | None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        for key, row in found:
            with self._changed:
                self._state()
            yield key, row.unpack(partition, key, columns)

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        """See ``StagingStore.keys``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        with self._changed:
            rows = self._state().partition(partition).rows
            return [key for key in rows if key.startswith(prefix)]

    def partitions(self) -> list[str]:
        """See ``StagingStore.partitions``."""
        with self._changed:
            return sorted(name for name, held in self._state().partitions.items() if held.rows)

    def claim(
        self,
        partition: str,
        consumer: str,
        *,
        max_rows: int,
        lease_s: float,
        group_column: str | None = None,
        group_size: int | None = None,
        group_wait_s: float | None = None,
    ) -> list[Claimed]:
        """See ``StagingStore.claim``."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        rule = check_claim(max_rows, lease_s, group_column, group_size, group_wait_s)
        with self._changed:
            held, reader = self._state().consumer(partition, consumer)
            now = self._clock()
            key_of = {row.seq: key for key, row in held.rows.items() if row.seq not in reader.acked}
            if rule is None:
                seqs = [seq for seq in key_of if not reader.is_leased(seq, now)][:max_rows]
            else:
                pending = [
                    _pending(partition, key, held.rows[key], reader, rule, now)
                    for key in key_of.values()
                ]
                groups = choose_groups(pending, max_rows, rule, now)
                seqs = sorted(seq for group in groups for seq in group)
            rows = {seq: held.rows[key_of[seq]].unpack(partition, key_of[seq]) for seq in seqs}
            return [
                Claimed(key_of[seq], rows[seq], lease.lease_id, lease.attempt, lease.expires_at_s)
                for seq, lease in reader.lease(seqs, now, lease_s)
            ]

    def ack(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.ack``."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        wanted = check_keys(keys)
        with self._changed:
            held, reader = self._state().consumer(partition, consumer)
            return reader.ack(held.seqs_of(wanted))

    def release(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.release``."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        wanted = check_keys(keys)
        with self._changed:
            held, reader = self._state().consumer(partition, consumer)
            return reader.release(held.seqs_of(wanted), self._clock())

    def hold(self, partition: str, prefix: str = "", *, lease_s: float) -> Hold:
        """See ``StagingStore.hold``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        check_lease(lease_s)
        with self._changed:
            now = self._clock()
            hold = Hold(partition, prefix, uuid.uuid4().hex, now + lease_s)
            self._state().add_hold(hold, now)
            return hold

    def extend_hold(self, hold: Hold, *, lease_s: float) -> bool:
        """See ``StagingStore.extend_hold``."""
        check_lease(lease_s)
        with self._changed:
            state, now = self._state(), self._clock()
            known = state.holds.get(hold.hold_id)
            if known is None or known.expires_at_s <= now:
                return False
            state.add_hold(dataclasses.replace(known, expires_at_s=now + lease_s), now)
            return True

    def end_hold(self, hold: Hold) -> None:
        """See ``StagingStore.end_hold``."""
        with self._changed:
            self._state().holds.pop(hold.hold_id, None)

    def stats(self, partition: str | None = None, prefix: str = "") -> StoreStats:
        """See ``StagingStore.stats``."""
        if partition is not None:
            check_name(partition, "partition")
        elif prefix:
            raise InvalidKeyError("a prefix needs a partition", key=prefix)
        check_prefix(prefix)
        with self._changed:
            return self._state().stats(partition, prefix, self._clock(), self._max_bytes)

    def seal(self, partition: str) -> None:
        """See ``StagingStore.seal``."""
        check_name(partition, "partition")
        with self._changed:
            held = self._state().partition(partition)
            if not held.rows:
                raise MissingRowError("the partition holds no row", key=partition)
            held.sealed = True

    def sweep(self, policy: RetentionPolicy, *, dry_run: bool = False) -> SweepReport:
        """See ``StagingStore.sweep``."""
        with self._changed:
            sweep = Sweep(self._state(), policy, self._clock())
            report = sweep.report(self._max_bytes, dry_run=dry_run)
            self._changed.notify_all()
            return report

    def close(self) -> None:
        """See ``StagingStore.close``."""
        with self._changed:
            self._content = None
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _state(self) -> MemoryState:
        if self._content is None:
            raise StoreClosedError("the store was closed", got=self.url)
        return self._content


def _pending(
    partition: str, key: str, row: Row, reader: Consumer, rule: GroupRule, now: float
) -> PendingRow:
    return PendingRow(
        row.seq,
        group_value(row.unpack(partition, key, [rule.column])),
        leased=reader.is_leased(row.seq, now),
        delivered=reader.was_given(row.seq),
        created_at=row.created_at,
    )


def open_memory_store(url: StoreUrl, *, clock: Callable[[], float]) -> MemoryStore:
    """A new private store for ``memory:`` with the options ``max_bytes`` and ``full_wait_s``."""
    options = url.options(max_bytes=positive_int, full_wait_s=seconds)
    return MemoryStore(url=url.text, clock=clock, **options)
