"""Group commit: puts that wait for the disk at the same time share one transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tokenplane.schemas.errors import (
    KeyConflictError,
    SchemaMismatchError,
    SealedPartitionError,
    StoreError,
    StoreFullError,
)
from tokenplane.staging.file_backend.blobs import BlobFiles
from tokenplane.staging.file_backend.database import Database
from tokenplane.staging.file_backend.errors import to_store_error
from tokenplane.staging.file_backend.schema import STORE_ROW, Sql, only_row
from tokenplane.staging.row_packing import PackedRow
from tokenplane.staging.store_types import Blob

MAX_GROUP_BYTES: Final = 64 * 2**20
FULL_POLL_S: Final = 0.05
"""How often a put that waits for room looks again: room may be made by another process."""

# Three statements: one that joins the tables took twice as long as all of them.
_STORE = f"SELECT last_seq, bytes FROM partitions WHERE id={STORE_ROW}"
_PARTITION = "SELECT id, label, rows, sealed FROM partitions WHERE name=?"
_BINDING = "SELECT binding FROM rows WHERE partition_id=? AND key=?"
_ADD = f"""
UPDATE partitions
SET rows=rows+?1, bytes=bytes+?2, last_seq=last_seq+iif(id={STORE_ROW}, ?1, 0)
WHERE id=?3
"""
_REFUSALS = (StoreFullError, KeyConflictError, SchemaMismatchError, SealedPartitionError)


class _BlobGone(Exception):
    """A file was removed between being written and its row's transaction."""


@dataclass(slots=True)
class _Put:
    partition: str
    key: str
    packed: PackedRow
    blobs: dict[bytes, Blob]
    done: bool = False
    written: bool = False
    hopeless: bool = False
    """It would not fit into an empty store either."""
    error: StoreError | _BlobGone | None = None


@dataclass(slots=True)
class _Totals:
    """What a group adds, by ``partitions.id``, to what the store has."""

    last_seq: int
    stored: int
    rows: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)

    def add(self, partition_id: int, rows: int, nbytes: int) -> None:
        self.rows[partition_id] = self.rows.get(partition_id, 0) + rows
        self.bytes[partition_id] = self.bytes.get(partition_id, 0) + nbytes


class GroupWriter:
    """Writes rows. The thread that gets the write lock commits for all that queued meanwhile.

    There is no writer thread: a put alone pays for no switch to another thread and back, and there
    is nothing to start, stop or lose in a fork.

    Args:
        max_bytes: budget over messages and blobs; None is unbounded.
        full_wait_s: how long a put waits for room.
    """

    def __init__(
        self,
        database: Database,
        blobs: BlobFiles,
        *,
        max_bytes: int | None,
        full_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._max_bytes = max_bytes
        self._full_wait_s = full_wait_s
        self._clock = clock
        self._queue: list[_Put] = []
        self._queue_lock = threading.Lock()

    def put(self, partition: str, key: str, packed: PackedRow, blobs: dict[bytes, Blob]) -> bool:
        """Store a row durably, or learn that it is there; see ``StagingStore.put``."""
        deadline = time.monotonic() + self._full_wait_s
        while True:
            job = _Put(partition, key, packed, blobs)
            try:
                for blob in blobs.values():
                    self._blobs.write(blob)
                self._submit(job)
            except OSError as exc:
                job.error = to_store_error(exc, key=key)
            if job.error is None:
                return job.written
            if isinstance(job.error, _BlobGone):
                continue
            full = isinstance(job.error, StoreFullError) and not job.hopeless
            if not full or time.monotonic() >= deadline:
                if isinstance(job.error, _REFUSALS):
                    self._drop_unused(blobs)
                raise job.error
            time.sleep(min(FULL_POLL_S, max(0.0, deadline - time.monotonic())))

    def _drop_unused(self, blobs: dict[bytes, Blob]) -> None:
        """A refused row leaves no files of its own behind (a full disk needs the room most)."""
        if blobs:
            with self._database.write() as db:
                self._blobs.unlink_unreferenced(db, blobs)

    def _submit(self, job: _Put) -> None:
        self._database.check_writable()
        with self._queue_lock:
            self._queue.append(job)
        with self._database.write_lock:
            while not job.done:
                self._commit_group(self._take())

    def _take(self) -> list[_Put]:
        with self._queue_lock:
            size = 0
            for count, job in enumerate(self._queue):
                size += len(job.packed.message)
                if size > MAX_GROUP_BYTES and count:
                    break
            else:
                count = len(self._queue)
            taken, self._queue = self._queue[:count], self._queue[count:]
            return taken

    def _commit_group(self, jobs: list[_Put]) -> None:
        try:
            with self._database.transaction() as db:
                self._apply(db, jobs)
        except StoreError as exc:
            if len(jobs) > 1 and isinstance(exc, StoreFullError):
                # There may be room for some of them.
                for job in jobs:
                    job.error, job.written = None, False
                    self._commit_group([job])
                return
            for job in jobs:
                job.error = _own_copy(exc, job.key)
        except BaseException as exc:
            for job in jobs:
                job.error = StoreError("the commit was interrupted", got=repr(exc), key=job.key)
            raise
        finally:
            for job in jobs:
                job.done = True

    def _apply(self, db: Sql, jobs: list[_Put]) -> None:
        totals = _Totals(*only_row(db.execute(_STORE)))
        for job in jobs:
            try:
                job.written = self._apply_one(db, job, totals)
            except (StoreError, _BlobGone) as exc:
                job.error = exc
        if totals.rows:
            added = [(rows, totals.bytes[place], place) for place, rows in totals.rows.items()]
            db.executemany(_ADD, added)

    def _apply_one(self, db: Sql, job: _Put, totals: _Totals) -> bool:
        """Insert one row, or raise before anything of it is changed."""
        partition_id, label, rows, sealed = _partition(db, job.partition)
        there = db.execute(_BINDING, (partition_id, job.key)).fetchone()
        if there is not None:
            if there[0] == job.packed.binding:
                return False
            raise KeyConflictError("another row is stored under this key", key=job.key)
        if sealed:
            raise SealedPartitionError("the partition takes no more rows", key=job.partition)
        empty = not rows and not totals.rows.get(partition_id)
        if label != job.packed.label and not empty:
            raise SchemaMismatchError(
                f"partition {job.partition!r} holds another kind of row",
                expected=label,
                got=job.packed.label,
            )
        if not self._blobs.all_there(job.blobs.values()):
            raise _BlobGone
        size = len(job.packed.message)
        new = {
            sha: blob.nbytes
            for sha, blob in job.blobs.items()
            if not db.execute("SELECT 1 FROM blobs WHERE sha256=?", (sha,)).fetchone()
        }
        self._check_room(size + sum(new.values()), totals, job)
        seq = totals.last_seq + totals.rows.get(STORE_ROW, 0) + 1
        db.execute(
            "INSERT INTO rows(seq, partition_id, key, bytes, created_at, binding, message)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                seq,
                partition_id,
                job.key,
                size,
                self._clock(),
                job.packed.binding,
                job.packed.message,
            ),
        )
        for sha, blob in job.blobs.items():
            db.execute(
                "INSERT INTO blobs VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET refs=refs+1",
                (sha, blob.nbytes),
            )
            db.execute("INSERT INTO blob_refs VALUES (?, ?)", (seq, sha))
        if label != job.packed.label:
            db.execute("UPDATE partitions SET label=? WHERE id=?", (job.packed.label, partition_id))
        totals.add(partition_id, 1, size)
        totals.add(STORE_ROW, 1, size + sum(new.values()))
        return True

    def _check_room(self, need: int, totals: _Totals, job: _Put) -> None:
        used = totals.stored + totals.bytes.get(STORE_ROW, 0)
        if self._max_bytes is not None and used + need > self._max_bytes:
            job.hopeless = need > self._max_bytes
            raise StoreFullError(
                "the byte budget is used up",
                expected=f"{need} bytes free",
                got=f"{used} of {self._max_bytes} used",
                key=job.key,
            )


def _own_copy(error: StoreError, key: str) -> StoreError:
    """Every caller of a failed group raises an instance of its own."""
    copy = type(error)(
        error.message, code=error.code, key=key, expected=error.expected, got=error.got
    )
    copy.__cause__ = error
    return copy


def _partition(db: Sql, name: str) -> tuple[int, str, int, int]:
    """(id, label, rows, sealed) of a partition, which is made if it is not there."""
    found = db.execute(_PARTITION, (name,)).fetchone()
    if found is None:
        db.execute("INSERT INTO partitions(name) VALUES (?)", (name,))
        found = only_row(db.execute(_PARTITION, (name,)))
    partition_id, label, rows, sealed = found
    return partition_id, label, rows, sealed
