"""Sealing: a finished partition's rows move from the database into one Arrow file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from tokenplane.schemas.errors import CorruptRowError, MissingRowError, StoreUnavailableError
from tokenplane.staging.file_backend.database import Database
from tokenplane.staging.file_backend.errors import file_errors
from tokenplane.staging.file_backend.rows import list_seqs, read_by_seq, to_json
from tokenplane.staging.file_backend.schema import Sql, only_row
from tokenplane.staging.file_backend.sealed import SealedFiles, WrittenFile

SEALING: Final = 1
"""``partitions.sealed`` while rows are still in the database: no more rows are taken."""
SEALED: Final = 2
PLACING_TRIES: Final = 10


class Sealing:
    """See ``StagingStore.seal``. A process killed on the way leaves a partition that takes no rows
    and can be read; sealing it again finishes the work."""

    def __init__(self, database: Database, sealed: SealedFiles) -> None:
        self._database = database
        self._sealed = sealed

    def seal(self, partition: str) -> None:
        """Seal one partition."""
        with self._database.write() as db:
            found = db.execute(
                "SELECT id, sealed FROM partitions WHERE name=? AND rows>0", (partition,)
            ).fetchone()
            if found is None:
                raise MissingRowError("the partition holds no row", key=partition)
            partition_id, state = found
            if state == SEALED:
                return
            db.execute("UPDATE partitions SET sealed=? WHERE id=?", (SEALING, partition_id))
        for _ in range(PLACING_TRIES):
            with self._database.read() as db:
                db.execute("BEGIN")
                files = self._sealed.write(self._rows(db, partition))
            names = [file.name for file in files]
            with self._database.write() as db:
                # A sweep takes a file that is not known yet for a stray, if it is old enough.
                whole = self._sealed.all_there(names)
                placed = whole and _place(db, partition_id, files)
            if not placed:
                with file_errors():
                    self._sealed.unlink(names)
            if whole:
                return
        raise StoreUnavailableError(
            "sealed files were removed while they were placed", key=partition
        )

    def _rows(self, db: Sql, partition: str) -> Iterator[tuple[int, str, pa.RecordBatch]]:
        for seq in list_seqs(db, partition, ""):
            found = read_by_seq(db, self._sealed, partition, seq)
            if found is None:
                raise CorruptRowError("the index names a row that is not there", got=seq)
            yield seq, *found


def _place(db: Sql, partition_id: int, files: list[WrittenFile]) -> bool:
    """Make written files known and drop the rows' messages; False if another process was first."""
    query = "SELECT sealed FROM partitions WHERE id=?"
    (state,) = only_row(db.execute(query, (partition_id,)))
    if state != SEALING:
        return False
    for file in files:
        file_id = _insert(
            db,
            "INSERT INTO sealed_files(partition_id, name, schema) VALUES (?, ?, ?) RETURNING id",
            (partition_id, file.name, file.schema),
        )
        for chunk in file.chunks:
            chunk_id = _insert(
                db,
                "INSERT INTO chunks(file_id, offset, length, sha256) VALUES (?, ?, ?, ?)"
                " RETURNING id",
                (file_id, chunk.offset, chunk.length, chunk.sha256),
            )
            db.execute(
                "UPDATE rows SET chunk_id=?, message=NULL"
                " WHERE seq IN (SELECT value FROM json_each(?)) AND partition_id=?",
                (chunk_id, to_json(chunk.seqs), partition_id),
            )
    db.execute("UPDATE partitions SET sealed=? WHERE id=?", (SEALED, partition_id))
    return True


def _insert(db: Sql, statement: str, values: tuple[int | str | bytes, ...]) -> int:
    made: int = db.execute(statement, values).fetchall()[0][0]
    return made
