"""The one message that every backend stores for a row: a checked header, then an Arrow IPC stream.

Layout (64-byte header, little-endian)::

    0   8   magic b"TKPLROW1"
    8   8   payload length in bytes
    16  32  SHA-256 of the payload
    48  16  zero

Arrow validates neither values nor tears (a flipped byte passes ``validate(full=True)``), so the
header carries its own checksum.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa

from tokenplane.schemas.errors import CorruptRowError
from tokenplane.schemas.schema_memo import SchemaMemo

MAGIC = b"TKPLROW1"
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sQ32s16s")
_PREFIX = struct.Struct("<4sI")
_RESERVED = bytes(16)
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)


class _Start(NamedTuple):
    """The schema message that a stream begins with."""

    message: bytes
    hashed: hashlib._Hash
    """SHA-256 of it so far, to be copied."""


def _make_start(schema: pa.Schema) -> _Start:
    message = schema.serialize().to_pybytes()
    return _Start(message, hashlib.sha256(message))


_start_of = SchemaMemo(_make_start)


def encode_message(batch: pa.RecordBatch) -> bytes:
    """The batch as one message.

    The same values built the same way give equal bytes, and what ``decode_message`` returns encodes
    to the same bytes again. A slice of a longer batch may not: Arrow leaves undefined bytes under a
    null struct.
    """
    start = _start_of(batch.schema)
    body = batch.serialize()
    digest = start.hashed.copy()
    digest.update(body)
    digest.update(_END_OF_STREAM)
    size = len(start.message) + body.size + len(_END_OF_STREAM)
    head = _HEADER.pack(MAGIC, size, digest.digest(), _RESERVED)
    return b"".join((head, start.message, body, _END_OF_STREAM))


def decode_message(
    message: bytes | memoryview | pa.Buffer,
    columns: Sequence[str] | None = None,
    *,
    key: str | None = None,
) -> pa.RecordBatch:
    """The batch, optionally only ``columns`` of it; arrays are views of ``message``.

    The whole message is checked whatever columns are asked for.

    Raises:
        CorruptRowError: wrong magic, torn, trailing bytes, checksum mismatch, not one batch, or
            a column that it lacks.
    """
    buffer = message if isinstance(message, pa.Buffer) else pa.py_buffer(message)
    if buffer.size < HEADER_BYTES:
        raise CorruptRowError(
            "torn row message", expected="64-byte header", got=buffer.size, key=key
        )
    magic, size, digest, reserved = _HEADER.unpack_from(buffer)
    if magic != MAGIC or reserved != _RESERVED:
        raise CorruptRowError("not a row message of this version", got=repr(magic), key=key)
    if size != buffer.size - HEADER_BYTES:
        raise CorruptRowError(
            "torn row message", expected=f"{size} bytes", got=buffer.size - HEADER_BYTES, key=key
        )
    payload = buffer[HEADER_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise CorruptRowError("row message fails its checksum", key=key)
    try:
        batch = _read_batch(payload)
        return batch if columns is None else batch.select(list(columns))
    except (pa.ArrowInvalid, EOFError, KeyError, OSError, ValueError) as exc:
        raise CorruptRowError("row message is not one readable batch", key=key) from exc


def _read_batch(payload: pa.Buffer) -> pa.RecordBatch:
    """The one batch of an Arrow IPC stream: a schema message, a batch message, the end.

    Every row of a partition starts with the same schema message, and parsing it costs about as
    much as all the rest, so it is parsed once per distinct message.
    """
    head = _schema_bytes(payload)
    schema = _parse_schema(payload[:head].to_pybytes())
    rest = pa.BufferReader(payload[head:])
    batch = pa.ipc.read_record_batch(rest, schema)
    end = payload[head + rest.tell() :].to_pybytes()
    if end != _END_OF_STREAM:
        raise ValueError("more than one batch")
    return batch


def _schema_bytes(payload: pa.Buffer) -> int:
    """Length of the stream's first message; a schema message has no body (Arrow IPC format)."""
    mark, length = _PREFIX.unpack_from(payload) if payload.size >= _PREFIX.size else (b"", 0)
    if mark != _CONTINUATION:
        raise ValueError("not an Arrow IPC stream")
    return _PREFIX.size + int(length)


@lru_cache(maxsize=64)
def _parse_schema(message: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(message))


def message_digest(message: bytes | memoryview | pa.Buffer) -> bytes:
    """The 32-byte SHA-256 of the payload as the header states it (not recomputed).

    Raises:
        CorruptRowError: shorter than a header.
    """
    size = memoryview(message).nbytes
    if size < HEADER_BYTES:
        raise CorruptRowError("torn row message", expected="64-byte header", got=size)
    digest: bytes = _HEADER.unpack_from(message)[2]
    return digest
