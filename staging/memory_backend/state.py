"""What the memory store holds: partitions, rows, blobs and their totals. Its owner locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from tokenplane.schemas.errors import SchemaMismatchError, SealedPartitionError
from tokenplane.staging.memory_backend.claims import Consumer
from tokenplane.staging.row_packing import PackedRow, unpack_row
from tokenplane.staging.store_types import Blob, Hold, StoreStats


@dataclass(frozen=True, slots=True)
class Row:
    """One stored row."""

    seq: int
    packed: PackedRow
    created_at: float
    blobs: frozenset[bytes]

    def unpack(
        self, partition: str, key: str, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """The verified batch, see ``unpack_row``."""
        packed = self.packed
        return unpack_row(packed.message, partition, key, columns, binding=packed.binding)


@dataclass(slots=True)
class Partition:
    """One partition; a name that was never written to has an empty one."""

    label: str = ""
    sealed: bool = False
    rows: dict[str, Row] = field(default_factory=dict)
    """By key; insertion order is write order."""
    consumers: dict[str, Consumer] = field(default_factory=dict)

    def seqs_of(self, keys: Sequence[str]) -> list[int]:
        """Row numbers of the keys that are there."""
        return [self.rows[key].seq for key in keys if key in self.rows]

    def check_takes(self, name: str, packed: PackedRow) -> None:
        """Raises:
        SealedPartitionError: sealed.
        SchemaMismatchError: it holds another kind of row.
        """
        if self.sealed:
            raise SealedPartitionError("the partition takes no more rows", key=name)
        if self.rows and self.label != packed.label:
            raise SchemaMismatchError(
                f"partition {name!r} holds another kind of row",
                expected=self.label,
                got=packed.label,
            )


@dataclass(slots=True)
class _Content:
    data: bytes
    refs: int


@dataclass(slots=True)
class MemoryState:
    """Everything stored, and how many bytes that is. Not thread-safe."""

    partitions: dict[str, Partition] = field(default_factory=dict)
    blobs: dict[bytes, _Content] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    """By their ids; ended ones go when a new one comes."""
    nbytes: int = 0
    last_seq: int = 0

    def partition(self, name: str) -> Partition:
        """The partition, or an empty one that is not kept."""
        return self.partitions.get(name) or Partition()

    def consumer(self, partition: str, name: str) -> tuple[Partition, Consumer]:
        """The partition and one of its consumers, both kept from now on."""
        held = self.partitions.setdefault(partition, Partition())
        return held, held.consumers.setdefault(name, Consumer())

    def bytes_to_add(self, packed: PackedRow, blobs: dict[bytes, Blob]) -> int:
        """How much the row would add; blobs that are there already cost nothing."""
        new = sum(blob.nbytes for sha, blob in blobs.items() if sha not in self.blobs)
        return len(packed.message) + new

    def add(
        self, partition: str, key: str, packed: PackedRow, blobs: dict[bytes, Blob], now: float
    ) -> None:
        """Store a row whose key is free."""
        self.nbytes += self.bytes_to_add(packed, blobs)
        for sha, blob in blobs.items():
            self.blobs.setdefault(sha, _Content(bytes(blob.data), 0)).refs += 1
        self.last_seq += 1
        held = self.partitions.setdefault(partition, Partition())
        held.label = packed.label
        held.rows[key] = Row(self.last_seq, packed, now, frozenset(blobs))

    def remove(self, held: Partition, key: str) -> None:
        """Remove a row and the blobs that lose their last one."""
        row = held.rows.pop(key)
        self.nbytes -= len(row.packed.message)
        for reader in held.consumers.values():
            reader.forget(row.seq)
        for sha in row.blobs:
            content = self.blobs[sha]
            content.refs -= 1
            if not content.refs:
                del self.blobs[sha]
                self.nbytes -= len(content.data)
        held.sealed = held.sealed and bool(held.rows)

    def is_held(self, partition: str, key: str, now: float) -> bool:
        """True while somebody reads rows whose keys start like this one."""
        return any(
            hold.partition == partition and key.startswith(hold.prefix) and hold.expires_at_s > now
            for hold in self.holds.values()
        )

    def add_hold(self, hold: Hold, now: float) -> None:
        """Keep rows from being removed."""
        self.holds = {i: old for i, old in self.holds.items() if old.expires_at_s > now}
        self.holds[hold.hold_id] = hold

    def stats(
        self, partition: str | None, prefix: str, now: float, max_bytes: int | None
    ) -> StoreStats:
        """See ``StagingStore.stats``."""
        chosen = self.partitions
        if partition is not None:
            chosen = {partition: self.partition(partition)}
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
            blob_bytes=sum(len(self.blobs[sha].data) for sha in shas),
            max_bytes=max_bytes,
            backlog=backlog,
            leased=leased,
            sealed=tuple(sorted(name for name, held in chosen.items() if held.sealed)),
        )
