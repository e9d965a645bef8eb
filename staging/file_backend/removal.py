"""Removing rows from a file store: discard, retention, and what killed writers left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tokenplane.schemas.errors import StoreFullError
from tokenplane.staging.file_backend.blobs import BlobFiles
from tokenplane.staging.file_backend.database import Database
from tokenplane.staging.file_backend.errors import file_errors
from tokenplane.staging.file_backend.rows import key_range, to_json
from tokenplane.staging.file_backend.schema import STORE_ROW, Sql, only_row
from tokenplane.staging.file_backend.sealed import SealedFiles
from tokenplane.staging.store_types import RetentionPolicy, SweepReport

BATCH_ROWS: Final = 500
"""Rows removed in one transaction: writers wait no longer than that takes."""
VACUUM_PAGES: Final = 2000

_OLD = """
SELECT r.seq, r.bytes, r.leased, r.pending FROM (
    SELECT o.seq, o.bytes,
        EXISTS(
            SELECT 1 FROM consumers c JOIN deliveries d ON d.consumer_id=c.id AND d.seq=o.seq
            WHERE c.partition_id=o.partition_id AND d.acked=0 AND d.expires_at>:now
        ) AS leased,
        EXISTS(
            SELECT 1 FROM consumers c LEFT JOIN deliveries d ON d.consumer_id=c.id AND d.seq=o.seq
            WHERE c.partition_id=o.partition_id AND o.seq>c.watermark AND coalesce(d.acked, 0)=0
        ) AS pending
    FROM rows o
    WHERE o.partition_id=:partition AND o.created_at<=:limit {where}
) AS r
"""
_REMOVABLE = " WHERE NOT leased AND (NOT pending OR :include_backlog) LIMIT :batch"


@dataclass(slots=True)
class _Removed:
    rows: int = 0
    nbytes: int = 0
    blobs: dict[bytes, int] = field(default_factory=dict)
    """Hash to size of blobs that lost their last row."""
    files: list[str] = field(default_factory=list)
    """Sealed files that lost theirs."""

    def add(self, other: _Removed) -> None:
        self.rows += other.rows
        self.nbytes += other.nbytes
        self.blobs |= other.blobs
        self.files += other.files


class Removal:
    """See ``StagingStore.discard`` and ``sweep``; arguments are checked already."""

    def __init__(
        self,
        database: Database,
        blobs: BlobFiles,
        sealed: SealedFiles,
        *,
        max_bytes: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._sealed = sealed
        self._max_bytes = max_bytes
        self._clock = clock

    def discard(self, partition: str, keys: Sequence[str]) -> int:
        """Remove rows by key."""
        with self._database.write() as db:
            rows = db.execute(
                "SELECT r.seq, r.partition_id FROM json_each(?) j"
                " CROSS JOIN rows r INDEXED BY rows_key"
                " WHERE r.partition_id=(SELECT id FROM partitions WHERE name=?) AND r.key=j.value",
                (to_json(keys), partition),
            ).fetchall()
            removed = _Removed()
            if rows:
                removed = _remove(db, rows[0][1], [seq for seq, _ in rows])
        self._unlink(removed)
        return removed.rows

    def sweep(self, policy: RetentionPolicy, *, dry_run: bool) -> SweepReport:
        """Apply a policy."""
        now = self._clock()
        with self._database.read() as db:
            db.execute("BEGIN")
            plan, kept_leased, kept_backlog = _plan(db, policy, now)
            orphans = self._blobs.orphans(db, policy.orphan_age_s)
            strays = self._stray_files(db, policy.orphan_age_s)
        if not dry_run:
            plan = _Removed()
            for partition_id in self._partitions(policy):
                plan.add(self._sweep_partition(partition_id, policy, now))
            self._unlink_orphans(orphans)
            with file_errors():
                self._sealed.unlink([path.name for path in strays])
            self._shrink()
        with self._database.read() as db:
            query = "SELECT bytes FROM partitions WHERE id=?"
            (left,) = only_row(db.execute(query, (STORE_ROW,)))
        if dry_run:
            left -= plan.nbytes + sum(plan.blobs.values())
        return SweepReport(
            rows=plan.rows,
            bytes=plan.nbytes,
            blobs=len(plan.blobs) + len(orphans),
            blob_bytes=sum(plan.blobs.values()) + sum(size for _, size in orphans),
            kept_leased=kept_leased,
            kept_backlog=kept_backlog,
            remaining_bytes=left,
            max_bytes=self._max_bytes,
            dry_run=dry_run,
        )

    def _partitions(self, policy: RetentionPolicy) -> list[int]:
        with self._database.read() as db:
            return _partition_ids(db, policy)

    def _sweep_partition(self, partition_id: int, policy: RetentionPolicy, now: float) -> _Removed:
        """In batches, each decided anew inside its transaction: a lease may have come."""
        total = _Removed()
        while True:
            with self._database.write() as db:
                query, values = _old_rows(partition_id, policy, now)
                values |= {"include_backlog": policy.include_backlog, "batch": BATCH_ROWS}
                seqs = [row[0] for row in db.execute(query + _REMOVABLE, values)]
                removed = _remove(db, partition_id, seqs)
            self._unlink(removed)
            total.add(removed)
            if len(seqs) < BATCH_ROWS:
                return total

    def _unlink(self, removed: _Removed) -> None:
        """Remove files after the rows that named them are durably gone."""
        if removed.blobs:
            with self._database.write() as db:
                self._blobs.unlink_unreferenced(db, removed.blobs)
        with file_errors():
            self._sealed.unlink(removed.files)

    def _unlink_orphans(self, orphans: list[tuple[Path, int]]) -> None:
        if not orphans:
            return
        with self._database.write() as db:
            for path, _ in orphans:
                if self._blobs.is_unfinished(path):
                    path.unlink(missing_ok=True)
                else:
                    self._blobs.unlink_unreferenced(db, [bytes.fromhex(path.name)])

    def _stray_files(self, db: Sql, age_s: float) -> list[Path]:
        """Sealed files that a killed process placed (or began) and never made known."""
        known = {name for (name,) in db.execute("SELECT name FROM sealed_files")}
        limit = time.time() - age_s
        strays = []
        for path in self._sealed.paths():
            try:
                if path.name not in known and path.stat().st_mtime <= limit:
                    strays.append(path)
            except FileNotFoundError:
                continue
        return strays

    def _shrink(self) -> None:
        """Give freed pages back to the file system, a few at a time."""
        try:
            while True:
                with self._database.write_lock, self._database.autocommit() as db:
                    if not db.pragma("freelist_count"):
                        return
                    db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        except StoreFullError:
            # Moving pages needs room as well; free ones stay in the file for rows to come.
            return


def _partition_ids(db: Sql, policy: RetentionPolicy) -> list[int]:
    if policy.max_age_s is None:
        return []
    rows = db.execute(
        "SELECT id FROM partitions WHERE id<>? AND rows>0 AND (?2 IS NULL OR name=?2)",
        (STORE_ROW, policy.partition),
    )
    return [partition_id for (partition_id,) in rows]


def _old_rows(
    partition_id: int, policy: RetentionPolicy, now: float
) -> tuple[str, dict[str, float | str]]:
    where, bounds = key_range(policy.prefix)
    names = [":low", ":high"][: len(bounds)]
    for name in names:
        where = where.replace("?", name, 1)
    values: dict[str, float | str] = {
        "partition": partition_id,
        "now": now,
        "limit": now - (policy.max_age_s or 0.0),
    }
    values |= {name[1:]: bound for name, bound in zip(names, bounds, strict=True)}
    return _OLD.format(where=where), values


def _plan(db: Sql, policy: RetentionPolicy, now: float) -> tuple[_Removed, int, int]:
    """(what would go, rows kept for a lease, rows kept for a consumer) as of this snapshot."""
    plan = _Removed()
    kept_leased = kept_backlog = 0
    lost: dict[bytes, int] = {}
    for partition_id in _partition_ids(db, policy):
        query, values = _old_rows(partition_id, policy, now)
        for seq, size, leased, pending in db.execute(query, values).fetchall():
            if leased:
                kept_leased += 1
            elif pending and not policy.include_backlog:
                kept_backlog += 1
            else:
                plan.rows += 1
                plan.nbytes += size
                for (sha,) in db.execute("SELECT sha256 FROM blob_refs WHERE seq=?", (seq,)):
                    lost[sha] = lost.get(sha, 0) + 1
    for sha, count in lost.items():
        query = "SELECT bytes, refs FROM blobs WHERE sha256=?"
        size, refs = only_row(db.execute(query, (sha,)))
        if refs == count:
            plan.blobs[sha] = size
    return plan, kept_leased, kept_backlog


def _remove(db: Sql, partition_id: int, seqs: Sequence[int]) -> _Removed:
    """Remove rows of one partition and everything that hangs on them. In a transaction."""
    removed = _Removed()
    chosen = to_json(seqs)
    within = "IN (SELECT value FROM json_each(?))"
    lost = db.execute(
        f"SELECT sha256, count(*) FROM blob_refs WHERE seq {within} GROUP BY sha256", (chosen,)
    ).fetchall()
    for sha, count in lost:
        db.execute("UPDATE blobs SET refs=refs-? WHERE sha256=?", (count, sha))
        gone = "DELETE FROM blobs WHERE sha256=? AND refs=0 RETURNING sha256, bytes"
        removed.blobs |= dict(db.execute(gone, (sha,)).fetchall())
    db.execute(f"DELETE FROM blob_refs WHERE seq {within}", (chosen,))
    db.execute(
        "DELETE FROM deliveries WHERE consumer_id IN"
        f" (SELECT id FROM consumers WHERE partition_id=?) AND seq {within}",
        (partition_id, chosen),
    )
    sizes = db.execute(f"DELETE FROM rows WHERE seq {within} RETURNING bytes", (chosen,)).fetchall()
    removed.rows, removed.nbytes = len(sizes), sum(size for (size,) in sizes)
    for counter, freed in (
        (partition_id, removed.nbytes),
        (STORE_ROW, removed.nbytes + sum(removed.blobs.values())),
    ):
        db.execute(
            "UPDATE partitions SET rows=rows-?, bytes=bytes-? WHERE id=?",
            (removed.rows, freed, counter),
        )
    emptied = db.execute(
        "UPDATE partitions SET sealed=0 WHERE id=? AND rows=0 AND sealed<>0 RETURNING id",
        (partition_id,),
    ).fetchall()
    if emptied:
        db.execute(
            "DELETE FROM chunks WHERE file_id IN"
            " (SELECT id FROM sealed_files WHERE partition_id=?)",
            (partition_id,),
        )
        files = db.execute(
            "DELETE FROM sealed_files WHERE partition_id=? RETURNING name", (partition_id,)
        )
        removed.files = [name for (name,) in files.fetchall()]
    return removed
