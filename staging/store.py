"""The contract of every staging store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa

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


class StagingStore(Protocol):
    """Rows by partition and key: written once, read by key, scanned, claimed, removed.

    Synchronous and thread-safe. A row is a one-row record batch. Partitions and keys are non-empty
    strings without NUL, at most 4096 bytes of UTF-8. A row whose schema has an identity column
    (``staging_key`` of staged rows, ``row_id`` of training rows) is stored under that key only.
    Every method raises ``StoreClosedError`` after ``close``, and no foreign exception leaves it.
    """

    url: str
    durable: Durability
    shared: Sharing

    def put(
        self, partition: str, key: str, row: pa.RecordBatch, *, blobs: Sequence[Blob] = ()
    ) -> bool:
        """Store a row that is not there yet; durable and visible to all when it returns.

        Blobs become durable first and the row last: whoever sees the row finds its blobs.

        Returns:
            True: this call wrote it. False: the identical row (the same bytes) was there already.

        Raises:
            KeyConflictError: another row is stored under the key.
            StoreFullError: there was no room during the whole bounded wait; nothing was written.
            SchemaMismatchError: not one row, or not the kind of row that the partition holds.
            SealedPartitionError: the partition takes no more rows.
            InvalidKeyError: a malformed partition or key, or the row is another key's.
        """
        ...

    def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        """Exactly one row per key, in the order of ``keys``; identity and checksum are verified.

        Raises:
            MissingRowError: names the keys that have no row.
            InvalidKeyError: a key is repeated or malformed.
            CorruptRowError: stored bytes fail their checksum or belong to another key.
            SchemaMismatchError: a row lacks one of ``columns``.
        """
        ...

    def get_blob(self, sha256: bytes) -> pa.Buffer:
        """The bytes with this hash, verified.

        Raises:
            MissingRowError: no row refers to such a blob.
            CorruptRowError: the stored bytes have another hash.
        """
        ...

    def discard(self, partition: str, keys: Sequence[str]) -> int:
        """Remove rows (leased ones too) and the blobs that lose their last row.

        Idempotent: keys without a row count nothing. Returns the number of rows removed.

        Raises:
            RowHeldError: somebody is reading one of the rows; none was removed.
        """
        ...

    def scan(
        self, partition: str, prefix: str = "", columns: Sequence[str] | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """(key, row) of every row whose key starts with ``prefix``, in write order.

        A snapshot of the moment of the call: later writes and removals do not show.
        """
        ...

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        """Keys that start with ``prefix``, in write order."""
        ...

    def partitions(self) -> list[str]:
        """Names of the partitions that hold rows, sorted."""
        ...

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
        """Lease the oldest rows that ``consumer`` has neither acknowledged nor under lease.

        At least once: a row whose lease expires is handed out again. Consumers are independent.

        Args:
            group_column: rows with one value in this column are handed out together or not at all
                (null stands alone). A group with a row under lease waits. Groups are taken while
                they fit into ``max_rows``; the first one is taken whole even if it does not.
            group_size: a group of which the consumer was given nothing yet waits for this many
                rows: its members may be published one by one. None: it is taken as it is.
            group_wait_s: a smaller group is taken as it is when its newest row is this old, so that
                a member that never comes holds up nobody for ever. None: it waits, and shows in the
                backlog.

        Raises:
            ConfigError: ``max_rows`` is no integer from 1 to 2^31 - 1, ``lease_s`` <= 0, or a
                group's size or wait without what it goes with.
        """
        ...

    def ack(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """Rows that ``consumer`` is done with; they never come back to it.

        Counts the rows that were not acknowledged before. The lease may have expired meanwhile.
        """
        ...

    def release(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """Give leases back early: the rows can be claimed again at once. Counts live leases."""
        ...

    def hold(self, partition: str, prefix: str = "", *, lease_s: float) -> Hold:
        """Keep every row whose key starts with ``prefix`` while it is read; those that come too.

        When it returns, what is there stays there: ``sweep`` passes held rows over and ``discard``
        refuses them, in every process that sees the rows (``shared``), until ``end_hold`` or for
        ``lease_s`` seconds by the store's clock. Holds do not exclude each other.

        Raises:
            ConfigError: ``lease_s`` <= 0.
        """
        ...

    def extend_hold(self, hold: Hold, *, lease_s: float) -> bool:
        """Let a live hold last ``lease_s`` seconds from now.

        False: it has ended before, nothing is held, and rows may be gone.
        """
        ...

    def end_hold(self, hold: Hold) -> None:
        """The rows were read. Idempotent."""
        ...

    def stats(self, partition: str | None = None, prefix: str = "") -> StoreStats:
        """Sizes of the store, of a partition, or of the keys of a partition with ``prefix``.

        ``backlog`` and ``leased`` are those of the whole partition; for the whole store they are
        summed by consumer name.

        Raises:
            InvalidKeyError: a prefix without a partition.
        """
        ...

    def seal(self, partition: str) -> None:
        """Close a finished partition to further rows. Idempotent; everything else keeps working.

        A sealed partition that loses its last row is open again.

        Raises:
            MissingRowError: the partition holds no row.
        """
        ...

    def sweep(self, policy: RetentionPolicy, *, dry_run: bool = False) -> SweepReport:
        """Apply a retention policy, and remove what killed writers left behind."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
