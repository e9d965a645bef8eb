"""Sealed partitions: rows as real columns in one Arrow file, read back chunk by chunk, verified.

The file is a plain Arrow IPC file that any Arrow reader opens: the rows' own columns, after two of
ours that say which row it is. A chunk is one record batch of it. The database keeps, per chunk,
where it lies and its SHA-256, and per row which chunk holds it. Chunks are read, not mapped: a file
cut short under a mapping would end the process instead of raising. Rows of an older schema version
in the same partition go to a file of their own.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokenplane.schemas.errors import CorruptRowError, SchemaMismatchError
from tokenplane.staging.file_backend.directory import SEALED, TEMPORARY, sync_directory
from tokenplane.staging.file_backend.schema import Sql

KEY_COLUMN: Final = "tokenplane_key"
SEQ_COLUMN: Final = "tokenplane_seq"
SUFFIX: Final = ".arrow"
CHUNK_ROWS: Final = 256
CHUNK_BYTES: Final = 2**20
CACHED_CHUNKS: Final = 8


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """One record batch of a sealed file."""

    seqs: tuple[int, ...]
    offset: int
    length: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A sealed file that is durable under its name, and not yet known to the database."""

    name: str
    schema: bytes
    chunks: tuple[WrittenChunk, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A verified record batch, taken apart."""

    seqs: NDArray[np.int64]
    keys: list[str]
    rows: pa.RecordBatch


class SealedFiles:
    """Writes and reads the files under ``sealed/``. Thread-safe."""

    def __init__(self, root: Path, *, durable: bool) -> None:
        self._root = root / SEALED
        self._durable = durable
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, _Chunk] = OrderedDict()

    def write(self, rows: Iterator[tuple[int, str, pa.RecordBatch]]) -> list[WrittenFile]:
        """One durable file per schema for (row number, key, row) in write order.

        Raises:
            SchemaMismatchError: a row has a column with one of our names.
            OSError: it cannot be written; nothing half-written remains.
        """
        writers: dict[bytes, _FileWriter] = {}
        try:
            for seq, key, row in rows:
                schema = row.schema.serialize().to_pybytes()
                if schema not in writers:
                    writers[schema] = _FileWriter(self._root, row.schema)
                writers[schema].add(seq, key, row)
            return [writer.finish(durable=self._durable) for writer in writers.values()]
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise

    def open_files(self, db: Sql, partition: str) -> dict[str, BinaryIO]:
        """The partition's files by name, open: they stay readable when they are unlinked.

        Raises:
            FileNotFoundError: one was unlinked since the database was asked.
        """
        rows = db.execute(
            "SELECT f.name FROM sealed_files f JOIN partitions p ON p.id=f.partition_id"
            " WHERE p.name=?",
            (partition,),
        )
        files: dict[str, BinaryIO] = {}
        try:
            for (name,) in rows:
                files[name] = (self._root / name).open("rb")
        except FileNotFoundError:
            for handle in files.values():
                handle.close()
            raise
        return files

    def row(
        self,
        db: Sql,
        chunk_id: int,
        seq: int,
        key: str,
        files: Mapping[str, BinaryIO] | None = None,
    ) -> pa.RecordBatch:
        """One row, verified. ``files``: handles to read from instead of opening.

        Raises:
            CorruptRowError: the chunk is torn, fails its checksum, or does not hold the row.
        """
        # Chunk numbers are never used twice, so what is remembered is never another chunk.
        with self._lock:
            chunk = self._cache.get(chunk_id)
            if chunk is not None:
                self._cache.move_to_end(chunk_id)
        if chunk is None:
            chunk = self._read_chunk(db, chunk_id, key, files or {})
            with self._lock:
                self._cache[chunk_id] = chunk
                while len(self._cache) > CACHED_CHUNKS:
                    self._cache.popitem(last=False)
        at = int(np.searchsorted(chunk.seqs, seq))
        if at == len(chunk.seqs) or chunk.seqs[at] != seq or chunk.keys[at] != key:
            raise CorruptRowError("the sealed chunk does not hold the row", key=key)
        return chunk.rows.slice(at, 1)

    def _read_chunk(
        self, db: Sql, chunk_id: int, key: str, files: Mapping[str, BinaryIO]
    ) -> _Chunk:
        found = db.execute(
            "SELECT f.name, f.schema, c.offset, c.length, c.sha256"
            " FROM chunks c JOIN sealed_files f ON f.id=c.file_id WHERE c.id=?",
            (chunk_id,),
        ).fetchone()
        if found is None:
            raise CorruptRowError("the row's chunk is unknown", key=key)
        name, schema, offset, length, expected = found
        try:
            if name in files:
                data = os.pread(files[name].fileno(), length, offset)
            else:
                with (self._root / name).open("rb") as handle:
                    data = os.pread(handle.fileno(), length, offset)
        except FileNotFoundError as exc:
            raise CorruptRowError("the sealed file is gone", got=name, key=key) from exc
        if _chunk_hash(schema, data) != expected:
            raise CorruptRowError("the sealed chunk fails its checksum", got=name, key=key)
        batch = pa.ipc.read_record_batch(
            pa.py_buffer(data), pa.ipc.read_schema(pa.py_buffer(schema))
        )
        own = batch.select(list(range(2, batch.num_columns)))
        return _Chunk(batch.column(1).to_numpy(), batch.column(0).to_pylist(), own)

    def unlink(self, names: list[str]) -> None:
        """Remove files that the database has dropped."""
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def all_there(self, names: Iterable[str]) -> bool:
        """True if every file is in place; asked inside the transaction that makes them known."""
        return all((self._root / name).exists() for name in names)

    def paths(self) -> Iterator[Path]:
        """Every file of ours, unfinished ones too."""
        for path in self._root.iterdir():
            if path.suffix == SUFFIX or path.name.startswith(TEMPORARY):
                yield path


class _FileWriter:
    """Writes one Arrow file under a temporary name."""

    def __init__(self, root: Path, schema: pa.Schema) -> None:
        if {KEY_COLUMN, SEQ_COLUMN} & set(schema.names):
            raise SchemaMismatchError("a row uses a reserved column name", got=schema.names)
        ours = [
            pa.field(KEY_COLUMN, pa.string(), nullable=False),
            pa.field(SEQ_COLUMN, pa.int64(), nullable=False),
        ]
        self._schema = pa.schema([*ours, *schema], metadata=schema.metadata)
        self._bytes = self._schema.serialize().to_pybytes()
        self._temporary = root / f"{TEMPORARY}{uuid.uuid4().hex}"
        self._sink = pa.OSFile(str(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._chunks: list[WrittenChunk] = []
        self._pending: list[tuple[int, str, pa.RecordBatch]] = []
        self._pending_bytes = 0

    def add(self, seq: int, key: str, row: pa.RecordBatch) -> None:
        """Append a row; rows come in write order."""
        if self._pending and (
            len(self._pending) == CHUNK_ROWS or self._pending_bytes + row.nbytes > CHUNK_BYTES
        ):
            self._flush()
        self._pending.append((seq, key, row))
        self._pending_bytes += row.nbytes

    def _flush(self) -> None:
        seqs, keys, rows = zip(*self._pending, strict=True)
        joined = pa.concat_batches(rows)
        arrays = [pa.array(keys, pa.string()), pa.array(seqs, pa.int64()), *joined.columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._writer.write_batch(batch)
        # The bytes as written are the bytes of the batch as a message of its own.
        message = batch.serialize()
        offset = self._sink.tell() - message.size
        self._chunks.append(
            WrittenChunk(tuple(seqs), offset, message.size, _chunk_hash(self._bytes, message))
        )
        self._pending, self._pending_bytes = [], 0

    def finish(self, *, durable: bool) -> WrittenFile:
        """Place the file under its name."""
        self._flush()
        self._writer.close()
        self._sink.close()
        name = f"{uuid.uuid4().hex}{SUFFIX}"
        self._check()
        if durable:
            with self._temporary.open("rb") as handle:
                os.fsync(handle.fileno())
        self._temporary.rename(self._temporary.with_name(name))
        if durable:
            sync_directory(self._temporary.parent)
        return WrittenFile(name, self._bytes, tuple(self._chunks))

    def _check(self) -> None:
        """The rows leave the database after this: what was written must read back."""
        with self._temporary.open("rb") as handle:
            for chunk in self._chunks:
                data = os.pread(handle.fileno(), chunk.length, chunk.offset)
                if _chunk_hash(self._bytes, data) != chunk.sha256:
                    raise CorruptRowError("a sealed chunk does not read back", got=chunk.offset)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._sink.close()
        self._temporary.unlink(missing_ok=True)


def _chunk_hash(schema: bytes, data: bytes | pa.Buffer) -> bytes:
    """SHA-256 over the schema message and the batch message."""
    state = hashlib.sha256(schema)
    state.update(data)
    return state.digest()
