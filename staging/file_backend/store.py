"""``file:``, the embedded store: a directory that several processes of one host share.

Rows are encoded messages in SQLite; big buffers are content-addressed files; a sealed partition is
one Arrow file. Why, and what was rejected: docs/adr/0003-file-store-on-sqlite.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

import pyarrow as pa

from tokenplane.schemas.errors import ConfigError, InvalidKeyError, MissingRowError
from tokenplane.staging.claim_order import check_claim, check_lease
from tokenplane.staging.file_backend.blobs import BlobFiles
from tokenplane.staging.file_backend.claims import Claims
from tokenplane.staging.file_backend.database import Database
from tokenplane.staging.file_backend.directory import check_format, make_directory
from tokenplane.staging.file_backend.errors import file_errors
from tokenplane.staging.file_backend.holds import Holds
from tokenplane.staging.file_backend.removal import Removal
from tokenplane.staging.file_backend.rows import Scan, list_keys, read_by_key
from tokenplane.staging.file_backend.schema import check_sqlite_version, create_database
from tokenplane.staging.file_backend.sealed import SealedFiles
from tokenplane.staging.file_backend.sealing import Sealing
from tokenplane.staging.file_backend.stats import read_stats
from tokenplane.staging.file_backend.writer import GroupWriter
from tokenplane.staging.row_packing import (
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
from tokenplane.staging.store_url import StoreUrl, one_of, positive_int, seconds, shown_url


class FileStore:
    """An open directory. Local disks only: SQLite's log does not work over a network.

    Args:
        max_bytes: budget over messages and blobs; None is unbounded.
        full_wait_s: how long a put waits for room.
        mode: ``rw``, or ``ro`` for a reader that creates and changes nothing.
        durability: ``process`` gives up power cuts for speed (tests and benchmarks).
        clock: Unix seconds, for ages and leases; processes that share a store share its meaning.

    Raises:
        UnsupportedStoreError: the directory holds something else or a newer format, or the linked
            SQLite is too old.
        StoreUnavailableError: the directory cannot be used.
    """

    shared: Sharing = "host"

    def __init__(
        self,
        path: str | Path,
        *,
        url: str | None = None,
        max_bytes: int | None = None,
        full_wait_s: float = 5.0,
        mode: str = "rw",
        durability: Durability = "power",
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_sqlite_version()
        root = Path(path).absolute()
        self.url = url or root.as_uri()
        self.durable: Durability = durability
        synchronous = "FULL" if durability == "power" else "OFF"
        with file_errors():
            if mode == "ro":
                check_format(root)
            else:
                make_directory(root)
                create_database(root, synchronous)
        durably = durability == "power"
        self._clock = clock
        self._max_bytes = max_bytes
        self._blobs = BlobFiles(root, durable=durably)
        self._sealed = SealedFiles(root, durable=durably)
        with file_errors():
            self._database = Database(root, read_only=mode == "ro", synchronous=synchronous)
        self._writer = GroupWriter(
            self._database,
            self._blobs,
            max_bytes=max_bytes,
            full_wait_s=full_wait_s,
            clock=clock,
        )
        self._claims = Claims(self._database, self._sealed, clock)
        self._holds = Holds(self._database, clock)
        self._removal = Removal(
            self._database, self._blobs, self._sealed, max_bytes=max_bytes, clock=clock
        )
        self._sealing = Sealing(self._database, self._sealed)

    def put(
        self, partition: str, key: str, row: pa.RecordBatch, *, blobs: Sequence[Blob] = ()
    ) -> bool:
        """See ``StagingStore.put``."""
        packed = pack_row(partition, key, row)
        self._database.check_writable()
        return self._writer.put(partition, key, packed, {blob.sha256: blob for blob in blobs})

    def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        """See ``StagingStore.get``."""
        check_name(partition, "partition")
        wanted = check_unique_keys(keys)
        with self._database.read() as db:
            return read_by_key(db, self._sealed, partition, wanted, columns)

    def get_blob(self, sha256: bytes) -> pa.Buffer:
        """See ``StagingStore.get_blob``."""
        with self._database.read() as db:
            if db.execute("SELECT 1 FROM blobs WHERE sha256=?", (sha256,)).fetchone() is None:
                raise MissingRowError("no row refers to such a blob", key=sha256.hex())
            return self._blobs.read(sha256)

    def discard(self, partition: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.discard``."""
        check_name(partition, "partition")
        return self._removal.discard(partition, list(dict.fromkeys(check_keys(keys))))

    def scan(
        self, partition: str, prefix: str = "", columns: Sequence[str] | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """See ``StagingStore.scan``. Until it ends or is dropped, the log cannot be shortened."""
        check_name(partition, "partition")
        check_prefix(prefix)
        return Scan(self._database, self._sealed, partition, prefix, columns)

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        """See ``StagingStore.keys``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        with self._database.read() as db:
            return list_keys(db, partition, prefix)

    def partitions(self) -> list[str]:
        """See ``StagingStore.partitions``."""
        with self._database.read() as db:
            rows = db.execute("SELECT name FROM partitions WHERE name<>'' AND rows>0").fetchall()
        return sorted(name for (name,) in rows)

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
        return self._claims.claim(partition, consumer, max_rows, lease_s, rule)

    def ack(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.ack``."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        return self._claims.ack(partition, consumer, check_keys(keys))

    def release(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.release``."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        return self._claims.release(partition, consumer, check_keys(keys))

    def hold(self, partition: str, prefix: str = "", *, lease_s: float) -> Hold:
        """See ``StagingStore.hold``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        check_lease(lease_s)
        return self._holds.hold(partition, prefix, lease_s)

    def extend_hold(self, hold: Hold, *, lease_s: float) -> bool:
        """See ``StagingStore.extend_hold``."""
        check_lease(lease_s)
        return self._holds.extend(hold, lease_s)

    def end_hold(self, hold: Hold) -> None:
        """See ``StagingStore.end_hold``."""
        self._holds.end(hold)

    def stats(self, partition: str | None = None, prefix: str = "") -> StoreStats:
        """See ``StagingStore.stats``."""
        if partition is not None:
            check_name(partition, "partition")
        elif prefix:
            raise InvalidKeyError("a prefix needs a partition", key=prefix)
        check_prefix(prefix)
        with self._database.read() as db:
            db.execute("BEGIN")
            return read_stats(db, partition, prefix, self._clock(), self._max_bytes)

    def seal(self, partition: str) -> None:
        """See ``StagingStore.seal``."""
        check_name(partition, "partition")
        self._sealing.seal(partition)

    def sweep(self, policy: RetentionPolicy, *, dry_run: bool = False) -> SweepReport:
        """See ``StagingStore.sweep``."""
        return self._removal.sweep(policy, dry_run=dry_run)

    def close(self) -> None:
        """See ``StagingStore.close``."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_file_store(url: StoreUrl, *, clock: Callable[[], float]) -> FileStore:
    """The store of a ``file:`` URL or a plain path.

    Options: ``max_bytes``, ``full_wait_s``, ``mode`` (``rw`` or ``ro``), ``durability``
    (``power`` or ``process``).

    Raises:
        ConfigError: a host in the URL, no path, or an unknown option.
    """
    path = url.rest
    if url.scheme:
        if path.startswith("//"):
            host, slash, rest = path[2:].partition("/")
            if host not in ("", "localhost"):
                raise ConfigError("a file store has no host", got=shown_url(url.text))
            path = slash + rest
        path = unquote(path)
    if not path:
        raise ConfigError("a file store needs a path", got=shown_url(url.text))
    options: dict[str, Any] = url.options(
        max_bytes=positive_int,
        full_wait_s=seconds,
        mode=one_of("rw", "ro"),
        durability=one_of("power", "process"),
    )
    return FileStore(path, url=url.text if url.scheme else None, clock=clock, **options)
