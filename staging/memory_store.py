"""``memory:``, the reference implementation: encoded messages in dictionaries behind one lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import pyarrow as pa

from tokenplane.schemas.errors import (
    InvalidKeyError,
    KeyConflictError,
    MissingRowError,
    SchemaMismatchError,
    SealedPartitionError,
    StoreClosedError,
    StoreFullError,
)
from tokenplane.staging.claim_order import check_claim, choose_groups
from tokenplane.staging.memory_claims import Consumer
from tokenplane.staging.row_packing import (
    PackedRow,
    check_found,
    check_keys,
    check_name,
    check_prefix,
    check_unique_keys,
    pack_row,
    unpack_row,
)
from tokenplane.staging.store_types import (
    Blob,
    Claimed,
    Durability,
    RetentionPolicy,
    Sharing,
    StoreStats,
    SweepReport,
)
from tokenplane.staging.store_url import StoreUrl, positive_int, seconds


@dataclass(frozen=True, slots=True)
class _Row:
    seq: int
    packed: PackedRow
    created_at: float
    blobs: frozenset[bytes]


@dataclass(slots=True)
class _Partition:
    label: str = ""
    sealed: bool = False
    rows: dict[str, _Row] = field(default_factory=dict)
    """By key; insertion order is write order."""
    consumers: dict[str, Consumer] = field(default_factory=dict)

    def keys_of(self, seqs: Sequence[int]) -> dict[int, str]:
        wanted = set(seqs)
        return {row.seq: key for key, row in self.rows.items() if row.seq in wanted}

    def seqs_of(self, keys: Sequence[str]) -> list[int]:
        return [self.rows[key].seq for key in keys if key in self.rows]


@dataclass(slots=True)
class _Content:
    data: bytes
    refs: int


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
        self._partitions: dict[str, _Partition] = {}
        self._blobs: dict[bytes, _Content] = {}
        self._nbytes = 0
        self._last_seq = 0
        self._closed = False

    def put(
        self, partition: str, key: str, row: pa.RecordBatch, *, blobs: Sequence[Blob] = ()
    ) -> bool:
        """See ``StagingStore.put``."""
        packed = pack_row(partition, key, row)
        contents = {blob.sha256: blob for blob in blobs}
        deadline = time.monotonic() + self._full_wait_s
        with self._changed:
            while True:
                self._check_open()
                held = self._partitions.get(partition, _Partition())
                if key in held.rows:
                    if held.rows[key].packed.binding == packed.binding:
                        return False
                    raise KeyConflictError("another row is stored under this key", key=key)
                _check_takes(held, partition, packed)
                new = [blob for sha, blob in contents.items() if sha not in self._blobs]
                need = len(packed.message) + sum(blob.nbytes for blob in new)
                if self._max_bytes is None or self._nbytes + need <= self._max_bytes:
                    break
                left = deadline - time.monotonic()
                if need > self._max_bytes or left <= 0 or not self._changed.wait(left):
                    raise StoreFullError(
                        "the byte budget is used up",
                        expected=f"{need} of {self._max_bytes} bytes free",
                        got=f"{self._max_bytes - self._nbytes} free",
                        key=key,
                    )
            for sha, blob in contents.items():
                content = self._blobs.setdefault(sha, _Content(bytes(blob.data), 0))
                content.refs += 1
            self._last_seq += 1
            self._nbytes += need
            held = self._partitions.setdefault(partition, held)
            held.label = packed.label
            held.rows[key] = _Row(self._last_seq, packed, self._clock(), frozenset(contents))
            return True

    def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        """See ``StagingStore.get``."""
        check_name(partition, "partition")
        wanted = check_unique_keys(keys)
        with self._changed:
            rows = self._partition(partition).rows
            check_found(wanted, rows.keys() & set(wanted), partition)
            found = [rows[key] for key in wanted]
        return [
            _unpack(partition, key, row, columns) for key, row in zip(wanted, found, strict=True)
        ]

    def get_blob(self, sha256: bytes) -> pa.Buffer:
        """See ``StagingStore.get_blob``."""
        with self._changed:
            self._check_open()
            content = self._blobs.get(bytes(sha256))
        if content is None:
            raise MissingRowError("no row refers to such a blob", key=bytes(sha256).hex())
        return pa.py_buffer(content.data)

    def discard(self, partition: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.discard``."""
        check_name(partition, "partition")
        wanted = dict.fromkeys(check_keys(keys))
        with self._changed:
            held = self._partition(partition)
            there = [key for key in wanted if key in held.rows]
            for key in there:
                self._remove(held, key)
            self._changed.notify_all()
            return len(there)

    def scan(
        self, partition: str, prefix: str = "", columns: Sequence[str] | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """See ``StagingStore.scan``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        with self._changed:
            rows = self._partition(partition).rows
            found = [(key, row) for key, row in rows.items() if key.startswith(prefix)]
        return ((key, _unpack(partition, key, row, columns)) for key, row in found)

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        """See ``StagingStore.keys``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        with self._changed:
            return [key for key in self._partition(partition).rows if key.startswith(prefix)]

    def partitions(self) -> list[str]:
        """See ``StagingStore.partitions``."""
        with self._changed:
            self._check_open()
            return sorted(name for name, held in self._partitions.items() if held.rows)

    def claim(
        self,
        partition: str,
        consumer: str,
        *,
        max_rows: int,
        lease_s: float,
        group_column: str | None = None,
    ) -> list[Claimed]:
        """See ``StagingStore.claim``."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        check_claim(max_rows, lease_s)
        with self._changed:
            self._check_open()
            held = self._partitions.setdefault(partition, _Partition())
            reader = held.consumers.setdefault(consumer, Consumer())
            now = self._clock()
            open_rows = [
                (row.seq, key, reader.is_leased(row.seq, now))
                for key, row in held.rows.items()
                if row.seq not in reader.acked
            ]
            if group_column is None:
                seqs = [seq for seq, _, leased in open_rows if not leased][:max_rows]
            else:
                grouped = (
                    (seq, _value(partition, key, held.rows[key], group_column), leased)
                    for seq, key, leased in open_rows
                )
                seqs = [seq for group in choose_groups(grouped, max_rows) for seq in group]
            keys = held.keys_of(seqs)
            rows = {seq: _unpack(partition, keys[seq], held.rows[keys[seq]], None) for seq in seqs}
            return [
                Claimed(keys[seq], rows[seq], lease.lease_id, lease.attempt, lease.expires_at_s)
                for seq, lease in reader.lease(sorted(seqs), now, lease_s)
            ]

    def ack(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.ack``."""
        held, reader, wanted = self._reader(partition, consumer, keys)
        with self._changed:
            return reader.ack(held.seqs_of(wanted))

    def release(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.release``."""
        held, reader, wanted = self._reader(partition, consumer, keys)
        with self._changed:
            return reader.release(held.seqs_of(wanted), self._clock())

    def _reader(
        self, partition: str, consumer: str, keys: Sequence[str]
    ) -> tuple[_Partition, Consumer, list[str]]:
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        wanted = check_keys(keys)
        with self._changed:
            self._check_open()
            held = self._partitions.setdefault(partition, _Partition())
            return held, held.consumers.setdefault(consumer, Consumer()), wanted

    def stats(self, partition: str | None = None, prefix: str = "") -> StoreStats:
        """See ``StagingStore.stats``."""
        if partition is not None:
            check_name(partition, "partition")
        elif prefix:
            raise InvalidKeyError("a prefix needs a partition", key=prefix)
        check_prefix(prefix)
        with self._changed:
            self._check_open()
            chosen = dict(self._partitions)
            if partition is not None:
                chosen = {partition: self._partition(partition)}
            now = self._clock()
            rows = [
                row
                for held in chosen.values()
                for key, row in held.rows.items()
                if key.startswith(prefix)
            ]
            shas = frozenset[bytes]().union(*(row.blobs for row in rows))
            backlog: dict[str, int] = {}
            leased: dict[str, int] = {}
            for held in chosen.values():
                for name, reader in held.consumers.items():
                    live = sum(reader.is_leased(row.seq, now) for row in held.rows.values())
                    backlog[name] = backlog.get(name, 0) + len(held.rows) - len(reader.acked)
                    leased[name] = leased.get(name, 0) + live
            return StoreStats(
                rows=len(rows),
                bytes=sum(len(row.packed.message) for row in rows),
                blobs=len(shas),
                blob_bytes=sum(len(self._blobs[sha].data) for sha in shas),
                max_bytes=self._max_bytes,
                backlog=backlog,
                leased=leased,
                sealed=tuple(sorted(name for name, held in chosen.items() if held.sealed)),
            )

    def seal(self, partition: str) -> None:
        """See ``StagingStore.seal``."""
        check_name(partition, "partition")
        with self._changed:
            held = self._partition(partition)
            if not held.rows:
                raise MissingRowError("the partition holds no row", key=partition)
            held.sealed = True

    def sweep(self, policy: RetentionPolicy, *, dry_run: bool = False) -> SweepReport:
        """See ``StagingStore.sweep``."""
        with self._changed:
            self._check_open()
            now = self._clock()
            doomed: list[tuple[_Partition, str]] = []
            kept_leased = kept_backlog = 0
            for name, held in self._partitions.items():
                if policy.max_age_s is None or policy.partition not in (None, name):
                    continue
                for key, row in held.rows.items():
                    if not key.startswith(policy.prefix) or now - row.created_at < policy.max_age_s:
                        continue
                    readers = held.consumers.values()
                    if any(reader.is_leased(row.seq, now) for reader in readers):
                        kept_leased += 1
                    elif not policy.include_backlog and any(
                        row.seq not in reader.acked for reader in readers
                    ):
                        kept_backlog += 1
                    else:
                        doomed.append((held, key))
            removed = [held.rows[key] for held, key in doomed]
            freed = sum(len(row.packed.message) for row in removed)
            lost: dict[bytes, int] = {}
            for row in removed:
                for sha in row.blobs:
                    lost[sha] = lost.get(sha, 0) + 1
            gone = [sha for sha, count in lost.items() if count == self._blobs[sha].refs]
            blob_bytes = sum(len(self._blobs[sha].data) for sha in gone)
            if not dry_run:
                for held, key in doomed:
                    self._remove(held, key)
                self._changed.notify_all()
            return SweepReport(
                rows=len(removed),
                bytes=freed,
                blobs=len(gone),
                blob_bytes=blob_bytes,
                kept_leased=kept_leased,
                kept_backlog=kept_backlog,
                remaining_bytes=self._nbytes - (freed + blob_bytes if dry_run else 0),
                max_bytes=self._max_bytes,
                dry_run=dry_run,
            )

    def close(self) -> None:
        """See ``StagingStore.close``."""
        with self._changed:
            self._closed = True
            self._partitions.clear()
            self._blobs.clear()
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

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store was closed", got=self.url)

    def _partition(self, name: str) -> _Partition:
        self._check_open()
        return self._partitions.get(name) or _Partition()

    def _remove(self, held: _Partition, key: str) -> None:
        row = held.rows.pop(key)
        self._nbytes -= len(row.packed.message)
        for reader in held.consumers.values():
            reader.forget(row.seq)
        for sha in row.blobs:
            content = self._blobs[sha]
            content.refs -= 1
            if not content.refs:
                del self._blobs[sha]
                self._nbytes -= len(content.data)
        held.sealed = held.sealed and bool(held.rows)


def _check_takes(held: _Partition, partition: str, packed: PackedRow) -> None:
    if held.sealed:
        raise SealedPartitionError("the partition takes no more rows", key=partition)
    if held.rows and held.label != packed.label:
        raise SchemaMismatchError(
            f"partition {partition!r} holds another kind of row",
            expected=held.label,
            got=packed.label,
        )


def _unpack(partition: str, key: str, row: _Row, columns: Sequence[str] | None) -> pa.RecordBatch:
    return unpack_row(row.packed.message, partition, key, columns, binding=row.packed.binding)


def _value(partition: str, key: str, row: _Row, column: str) -> object:
    return _unpack(partition, key, row, [column]).column(0)[0].as_py()


def open_memory_store(url: StoreUrl, *, clock: Callable[[], float]) -> MemoryStore:
    """A new private store for ``memory:`` with the options ``max_bytes`` and ``full_wait_s``."""
    options = url.options(max_bytes=positive_int, full_wait_s=seconds)
    return MemoryStore(url=url.text, clock=clock, **options)
