"""Reading a file store's rows: by key, by prefix, in write order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, Final

import apsw
import orjson
import pyarrow as pa

from tokenplane.schemas.errors import CorruptRowError
from tokenplane.staging.file_backend.database import Database
from tokenplane.staging.file_backend.errors import file_errors
from tokenplane.staging.file_backend.schema import Sql
from tokenplane.staging.file_backend.sealed import SealedFiles
from tokenplane.staging.row_packing import check_found, select_columns, unpack_row

# One statement per request, however many keys it names.
_BY_KEY = """
SELECT j.value, r.seq, r.chunk_id, r.binding, r.message
FROM json_each(?1) AS j
CROSS JOIN rows AS r INDEXED BY rows_key
WHERE r.partition_id = (SELECT id FROM partitions WHERE name = ?2) AND r.key = j.value
"""
SNAPSHOT_TRIES: Final = 3
_BY_SEQ = "SELECT key, seq, chunk_id, binding, message FROM rows WHERE seq=?"


def read_by_key(
    db: Sql,
    sealed: SealedFiles,
    partition: str,
    keys: Sequence[str],
    columns: Sequence[str] | None,
) -> list[pa.RecordBatch]:
    """See ``StagingStore.get``; keys are checked already."""
    found = db.execute(_BY_KEY, (to_json(keys), partition)).fetchall()
    check_found(keys, {row[0] for row in found}, partition)
    try:
        rows = {row[0]: _unpack(db, sealed, partition, row) for row in found}
    except CorruptRowError:
        # A sealed partition that was emptied just now took its file with it.
        left = {row[0] for row in db.execute(_BY_KEY, (to_json(keys), partition))}
        check_found(keys, left, partition)
        raise
    return [select_columns(rows[key], columns, key) for key in keys]


def read_by_seq(
    db: Sql,
    sealed: SealedFiles,
    partition: str,
    seq: int,
    files: Mapping[str, BinaryIO] | None = None,
) -> tuple[str, pa.RecordBatch] | None:
    """(key, row) of a row number; None if it is gone."""
    found = db.execute(_BY_SEQ, (seq,)).fetchone()
    return None if found is None else (found[0], _unpack(db, sealed, partition, found, files))


def _unpack(
    db: Sql,
    sealed: SealedFiles,
    partition: str,
    row: tuple[str, int, int | None, bytes, bytes | None],
    files: Mapping[str, BinaryIO] | None = None,
) -> pa.RecordBatch:
    key, seq, chunk_id, binding, message = row
    if chunk_id is not None:
        return sealed.row(db, chunk_id, seq, key, files)
    return unpack_row(message or b"", partition, key, binding=binding)


def list_keys(db: Sql, partition: str, prefix: str) -> list[str]:
    """Keys with this prefix, in write order."""
    where, values = key_range(prefix)
    rows = db.execute(
        "SELECT key FROM rows INDEXED BY rows_key"
        f" WHERE partition_id=(SELECT id FROM partitions WHERE name=?){where} ORDER BY seq",
        (partition, *values),
    )
    return [key for (key,) in rows]


def list_seqs(db: Sql, partition: str, prefix: str) -> list[int]:
    """Row numbers of the keys with this prefix, in write order."""
    where, values = key_range(prefix)
    index = "rows_key" if prefix else "rows_order"
    rows = db.execute(
        f"SELECT seq FROM rows INDEXED BY {index}"
        f" WHERE partition_id=(SELECT id FROM partitions WHERE name=?){where} ORDER BY seq",
        (partition, *values),
    )
    return [seq for (seq,) in rows]


def key_range(prefix: str) -> tuple[str, tuple[str, ...]]:
    """SQL and values that let through exactly the keys with ``prefix``, by index.

    Text compares by its UTF-8 bytes, whose order is that of the code points.
    """
    if not prefix:
        return "", ()
    head = prefix.rstrip("\U0010ffff")
    if not head:
        return " AND key>=?", (prefix,)
    following = ord(head[-1]) + 1
    if following == 0xD800:  # surrogates are no characters
        following = 0xE000
    return " AND key>=? AND key<?", (prefix, head[:-1] + chr(following))


def to_json(values: Sequence[str] | Sequence[int]) -> str:
    """A list for ``json_each``."""
    return orjson.dumps(values).decode()


class Scan(Iterator[tuple[str, pa.RecordBatch]]):
    """A snapshot of a partition, held by a read transaction of its own until it ends."""

    def __init__(
        self,
        database: Database,
        sealed: SealedFiles,
        partition: str,
        prefix: str,
        columns: Sequence[str] | None,
    ) -> None:
        self._database = database
        self._sealed = sealed
        self._partition = partition
        self._columns = columns
        self._files: dict[str, BinaryIO] = {}
        self._db: apsw.Connection | None = None
        self._db = db = database.take_reader()
        try:
            with file_errors(db):
                for left in reversed(range(SNAPSHOT_TRIES)):
                    db.execute("BEGIN")
                    self._seqs = iter(list_seqs(db, partition, prefix))
                    try:
                        self._files = sealed.open_files(db, partition)
                        break
                    except FileNotFoundError as exc:
                        # The partition was emptied after this snapshot: take a newer one.
                        if not left:
                            raise CorruptRowError(
                                "a sealed file is gone", got=exc.filename, key=partition
                            ) from exc
                        db.execute("ROLLBACK")
        except BaseException:
            self.close()
            raise

    def __next__(self) -> tuple[str, pa.RecordBatch]:
        """The next row.

        Raises:
            StoreClosedError: the store was closed meanwhile.
            CorruptRowError: see ``StagingStore.get``.
        """
        if self._db is None:
            raise StopIteration
        try:
            self._database.check_open()
            seq = next(self._seqs)
            with file_errors(self._db):
                found = read_by_seq(self._db, self._sealed, self._partition, seq, self._files)
            if found is None:
                raise CorruptRowError("the index names a row that is not there", got=seq)
            key, row = found
            return key, select_columns(row, self._columns, key)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the snapshot early. Idempotent."""
        db, self._db = self._db, None
        if db is not None:
            self._database.give_reader(db)
        for handle in self._files.values():
            handle.close()

    def __del__(self) -> None:
        self.close()
