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
from tokenplane.staging.file_backend.holds import check_not_held
from tokenplane.staging.file_backend.judging import Judged, judge, partitions_of, removable
from tokenplane.staging.file_backend.rows import to_json
from tokenplane.staging.file_backend.schema import STORE_ROW, Sql, only_row
from tokenplane.staging.file_backend.sealed import SealedFiles
from tokenplane.staging.store_types import RetentionPolicy, SweepReport

BATCH_ROWS: Final = 500
"""Rows removed in one transaction: writers wait no longer than that takes."""
VACUUM_PAGES: Final = 2000


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
                check_not_held(db, partition, keys, self._clock())
                removed = _remove(db, rows[0][1], [seq for seq, _ in rows])
        self._unlink(removed)
        return removed.rows

    def sweep(self, policy: RetentionPolicy, *, dry_run: bool) -> SweepReport:
        """Apply a policy."""
        now = self._clock()
        with self._database.read() as db:
            db.execute("BEGIN")
            plan, kept = _plan(db, policy, now)
            orphans, strays = self._leftovers(db, policy.orphan_age_s)
        if not dry_run:
            plan = _Removed()
            for partition_id, name in self._partitions(policy):
                plan.add(self._sweep_partition(partition_id, name, policy, now))
            self._unlink_orphans(orphans)
            self._unlink_strays(strays)
            if policy.orphan_age_s is not None:
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
            kept_leased=kept["leased"],
            kept_held=kept["held"],
            kept_backlog=kept["backlog"],
            remaining_bytes=left,
            max_bytes=self._max_bytes,
            dry_run=dry_run,
        )

    def _leftovers(self, db: Sql, age_s: float | None) -> tuple[list[tuple[Path, int]], list[Path]]:
        if age_s is None:
            return [], []
        return self._blobs.orphans(db, age_s), self._stray_files(db, age_s)

    def _partitions(self, policy: RetentionPolicy) -> list[tuple[int, str]]:
        with self._database.read() as db:
            return partitions_of(db, policy)

    def _sweep_partition(
        self, partition_id: int, name: str, policy: RetentionPolicy, now: float
    ) -> _Removed:
        """In batches, each decided anew inside its transaction: a lease or hold may have come."""
        total = _Removed()
        while True:
            with self._database.write() as db:
                seqs = removable(
                    db,
                    partition_id,
                    name,
                    policy,
                    now=self._clock(),
                    started=now,
                    batch=BATCH_ROWS,
                )
                removed = _remove(db, partition_id, seqs)
            self._unlink(removed)
            total.add(removed)
            if policy.whole or len(seqs) < BATCH_ROWS:
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
        known = _known_files(db)
        limit = time.time() - age_s
        strays = []
        for path in self._sealed.paths():
            try:
                if path.name not in known and path.stat().st_mtime <= limit:
                    strays.append(path)
            except FileNotFoundError:
                continue
        return strays

    def _unlink_strays(self, strays: list[Path]) -> None:
        """In a write transaction: files become known in one that saw them in place."""
        if strays:
            with self._database.write() as db:
                known = _known_files(db)
                self._sealed.unlink([path.name for path in strays if path.name not in known])

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


def _known_files(db: Sql) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sealed_files")}


def _plan(db: Sql, policy: RetentionPolicy, now: float) -> tuple[_Removed, dict[str, int]]:
    """(what would go, how many rows are kept and why) as of this snapshot."""
    plan, kept = _Removed(), Judged().kept
    lost: dict[bytes, int] = {}
    for partition_id, name in partitions_of(db, policy):
        judged = judge(db, partition_id, name, policy, now)
        kept = {why: count + judged.kept[why] for why, count in kept.items()}
        if policy.whole and any(judged.kept.values()):
            continue
        plan.rows += len(judged.seqs)
        plan.nbytes += judged.sizes
        for seq in judged.seqs:
            for (sha,) in db.execute("SELECT sha256 FROM blob_refs WHERE seq=?", (seq,)):
                lost[sha] = lost.get(sha, 0) + 1
    for sha, count in lost.items():
        query = "SELECT bytes, refs FROM blobs WHERE sha256=?"
        size, refs = only_row(db.execute(query, (sha,)))
        if refs == count:
            plan.blobs[sha] = size
    return plan, kept


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
