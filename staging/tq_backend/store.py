"""``tq:``, a journal with TransferQueue behind it: rows are durable here and readable elsewhere.

The journal (any other store of ours) holds the truth: what is stored, in which order, who claimed
it. TransferQueue carries every row to the other hosts of the Ray cluster, which read it by key. A
queue that loses rows, hangs or dies loses nothing: it is filled again from the journal.
"""

from __future__ import annotations

import hashlib
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from tokenplane.schemas.errors import (
    CorruptRowError,
    MissingRowError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
)
from tokenplane.staging.row_packing import (
    check_blob,
    check_name,
    check_unique_keys,
    pack_row,
    unpack_row,
)
from tokenplane.staging.row_split import covers, read_token_columns
from tokenplane.staging.store import StagingStore
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
from tokenplane.staging.store_url import shown_url
from tokenplane.staging.tq_backend.payload import Payload, blob_name, row_entry, row_name, unwrap
from tokenplane.staging.tq_backend.publisher import Publisher

if TYPE_CHECKING:
    from tokenplane.staging.tq_backend.link import QueueLink


class TransferQueueStore:
    """A journal whose rows are also in TransferQueue.

    ``durable`` and ``shared`` are the journal's: with a file store, every method works on this
    host's rows, and ``get`` and ``get_blob`` find those of other hosts in the queue.

    Args:
        journal: owned and closed by this object.
        connect: gives a link to a working queue, or raises a ``StoreError``.
        connect_s: how long to wait for the queue; 0 starts at once and publishes when it is there.

    Raises:
        StoreUnavailableError: no queue within ``connect_s``.
    """

    def __init__(
        self,
        url: str,
        journal: StagingStore,
        connect: Callable[[], QueueLink],
        *,
        connect_s: float = 180.0,
    ) -> None:
        self.url = shown_url(url)
        self.durable: Durability = journal.durable
        self.shared: Sharing = journal.shared
        self._journal = journal
        self._origin = _origin_of(journal)
        self._closed = False
        self._publisher = Publisher(journal, self._origin, connect)
        if connect_s and not self._publisher.wait(connect_s):
            error = self._publisher.error
            self.close()
            raise StoreUnavailableError(
                "no queue", expected=f"one within {connect_s} s", got=error
            ) from error

    def put(
        self, partition: str, key: str, row: pa.RecordBatch, *, blobs: Sequence[Blob] = ()
    ) -> bool:
        """See ``StagingStore.put``. Journal first; while the queue fails, the journal alone.

        The queue gets the blobs while the journal writes them, and lets nobody read them before
        the journal has the row.
        """
        self._check_open()
        check_name(partition, "partition")
        publication = self._publisher.begin(partition, check_name(key, "key"), blobs)
        try:
            # While the places are got and the blobs sent.
            packed = pack_row(partition, key, row)
            entry = row_entry(self._origin, partition, key, packed, row)
            wrote = self._journal.put(partition, key, row, blobs=blobs)
        except BaseException:
            self._publisher.abandon(publication)
            raise
        self._publisher.finish(publication, entry)
        return wrote

    def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        """See ``StagingStore.get``. Rows that the journal lacks come from the queue.

        Raises:
            StoreUnavailableError: the journal lacks some, and the queue does not answer.
        """
        self._check_open()
        check_name(partition, "partition")
        wanted = check_unique_keys(keys)
        try:
            return self._journal.get(partition, wanted, columns)
        except MissingRowError:
            found = self._read_queue(partition, wanted, columns)
        rest = [key for key in wanted if key not in found]
        if rest:
            rows = self._journal.get(partition, rest, columns)
            found |= dict(zip(rest, rows, strict=True))
        return [found[key] for key in wanted]

    def _read_queue(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None
    ) -> dict[str, pa.RecordBatch]:
        names = {row_name(partition, key): key for key in keys}
        rows: dict[str, pa.RecordBatch] = {}
        left = list(names)
        if columns is not None and covers(columns):
            parts = {
                names[payload.name]: payload.tokens
                for payload in self._fetch(left, bodies=False)
                if payload.tokens is not None
            }
            found = read_token_columns(partition, list(parts), list(parts.values()), columns)
            rows = dict(zip(parts, found, strict=True))
            left = [name for name in left if names[name] not in rows]
        for payload in self._fetch(left) if left else ():
            key = names[payload.name]
            rows[key] = unpack_row(
                payload.content(key), partition, key, columns, binding=payload.binding
            )
        return rows

    def _fetch(self, names: list[str], *, bodies: bool = True) -> list[Payload]:
        """What other journals have under these names.

        Raises:
            StoreUnavailableError: the queue does not answer.
            CorruptRowError: it gave something else than was asked for, twice.
        """
        for last in (False, True):
            link = self._publisher.link
            if link is None:
                raise StoreUnavailableError(
                    "the queue does not answer, and the journal lacks the row",
                    key=names[0],
                    got=self._publisher.error,
                )
            try:
                payloads = [unwrap(*pair) for pair in link.get(names, bodies=bodies)]
                strange = {payload.name for payload in payloads} - set(names)
                if strange:
                    raise CorruptRowError("the queue gave another row", got=sorted(strange)[:4])
            except CorruptRowError:
                # A clear at the same moment hands out what moved into the place: ask once more.
                if last:
                    raise
                continue
            except StoreError as exc:
                self._publisher.give_up(link, exc)
                raise
            # What the queue still has of this journal's rows was removed from the journal.
            return [payload for payload in payloads if payload.origin != self._origin]
        return []

    def get_blob(self, sha256: bytes) -> pa.Buffer:
        """See ``StagingStore.get_blob``."""
        self._check_open()
        try:
            return self._journal.get_blob(sha256)
        except MissingRowError:
            for payload in self._fetch([blob_name(sha256)]):
                return check_blob(payload.content(sha256.hex()), sha256)
            raise

    def discard(self, partition: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.discard``. Other hosts may read a removed row a moment longer."""
        self._check_open()
        removed = self._journal.discard(partition, keys)
        self._publisher.clear(partition, list(dict.fromkeys(keys)))
        if removed:
            self._publisher.request_tidying()  # blobs may have lost their last row
        return removed

    def scan(
        self, partition: str, prefix: str = "", columns: Sequence[str] | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """See ``StagingStore.scan``: the journal's rows."""
        return self._journal.scan(partition, prefix, columns)

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        """See ``StagingStore.keys``: the journal's rows."""
        return self._journal.keys(partition, prefix)

    def partitions(self) -> list[str]:
        """See ``StagingStore.partitions``."""
        return self._journal.partitions()

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
        """See ``StagingStore.claim``: the journal's rows."""
        return self._journal.claim(
            partition,
            consumer,
            max_rows=max_rows,
            lease_s=lease_s,
            group_column=group_column,
            group_size=group_size,
            group_wait_s=group_wait_s,
        )

    def ack(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.ack``."""
        return self._journal.ack(partition, consumer, keys)

    def release(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.release``."""
        return self._journal.release(partition, consumer, keys)

    def hold(self, partition: str, prefix: str = "", *, lease_s: float) -> Hold:
        """See ``StagingStore.hold``: this journal's rows, not those of other hosts."""
        return self._journal.hold(partition, prefix, lease_s=lease_s)

    def extend_hold(self, hold: Hold, *, lease_s: float) -> bool:
        """See ``StagingStore.extend_hold``."""
        return self._journal.extend_hold(hold, lease_s=lease_s)

    def end_hold(self, hold: Hold) -> None:
        """See ``StagingStore.end_hold``."""
        self._journal.end_hold(hold)

    def stats(self, partition: str | None = None, prefix: str = "") -> StoreStats:
        """See ``StagingStore.stats``: the journal's sizes; the queue holds about as much."""
        return self._journal.stats(partition, prefix)

    def seal(self, partition: str) -> None:
        """See ``StagingStore.seal``."""
        self._journal.seal(partition)

    def sweep(self, policy: RetentionPolicy, *, dry_run: bool = False) -> SweepReport:
        """See ``StagingStore.sweep``. The queue follows soon after."""
        report = self._journal.sweep(policy, dry_run=dry_run)
        if not dry_run:
            self._publisher.request_tidying()
        return report

    def wait_published(self, timeout_s: float) -> bool:
        """True when the queue holds every row of the journal; False when the time is over."""
        return self._publisher.wait(timeout_s)

    def close(self) -> None:
        """See ``StagingStore.close``. The queue and its rows stay."""
        if not self._closed:
            self._closed = True
            self._publisher.close()
            self._journal.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store was closed", got=self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _origin_of(journal: StagingStore) -> bytes:
    """Names the journal: equal for all who share it, different for all others."""
    if journal.shared == "private":
        return uuid.uuid4().bytes
    host = socket.gethostname() if journal.shared == "host" else ""
    return hashlib.sha256(f"{host}\0{journal.url}".encode()).digest()[:16]
