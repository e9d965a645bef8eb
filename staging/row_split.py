"""A staged row's message in two parts, so that resolving a prefix moves its token columns only.

The token part holds the buffers of ``TOKEN_COLUMNS`` and a checksum of its own; the rest holds
every other byte of the message. ``join_message`` gives the message back, byte for byte.

Layout of the token part (little-endian)::

    0   8   magic b"TKPLTOK1"
    8   32  SHA-256 over partition, key and all that follows
    40  32  schema fingerprint (the first 32 of its hex digits, ASCII)
    72  4   length of the message in bytes
    76  4   number of ranges N
    80  8N  offset and length of each range in the message, in buffer order
    ..      the bytes of the ranges
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from tokenplane.schemas.columns import SCHEMA_FINGERPRINT_KEY
from tokenplane.schemas.errors import CorruptRowError
from tokenplane.schemas.row_message import HEADER_BYTES
from tokenplane.schemas.staged_row import STAGED_ROW_SCHEMA, TOKEN_COLUMNS
from tokenplane.staging.row_packing import row_binding, select_columns

MAGIC: Final = b"TKPLTOK1"
_PREFIX: Final = struct.Struct("<8s32s")
_HEAD: Final = struct.Struct("<32sII")
_TOKEN_SET: Final = frozenset(TOKEN_COLUMNS)
_FINGERPRINT: Final = STAGED_ROW_SCHEMA.metadata[SCHEMA_FINGERPRINT_KEY]
_TAG: Final = _FINGERPRINT[:32]
_FIELDS: Final = [STAGED_ROW_SCHEMA.field(name) for name in TOKEN_COLUMNS]
_TOKEN_SCHEMA: Final = pa.schema(_FIELDS, metadata=STAGED_ROW_SCHEMA.metadata)
_TYPES: Final = [field.type for field in _FIELDS]
# The schema message is the same in every row of this schema; the batch message follows it.
_BODY: Final = HEADER_BYTES + STAGED_ROW_SCHEMA.serialize().size


def covers(columns: Sequence[str] | None) -> bool:
    """True if a token part has all of ``columns``."""
    return columns is not None and _TOKEN_SET.issuperset(columns)


def split_message(
    message: bytes, schema: pa.Schema, partition: str, key: str
) -> tuple[bytes, bytes] | None:
    """(token part, rest); None for a row of another schema, whose message stays whole."""
    if (schema.metadata or {}).get(SCHEMA_FINGERPRINT_KEY) != _FINGERPRINT:
        return None
    base = pa.py_buffer(message)
    batch = pa.ipc.read_record_batch(base[_BODY:], STAGED_ROW_SCHEMA)
    ranges = []
    for name in TOKEN_COLUMNS:
        column = batch.column(name)
        if column.null_count:
            return None
        ranges += [
            (buffer.address - base.address, buffer.size)
            for buffer in column.buffers()
            if buffer is not None and buffer.size
        ]
    if len(ranges) != sum(map(_buffer_count, _TYPES)):
        return None  # an empty list has no buffer to cut out; such a row is small
    content = b"".join(
        (
            _HEAD.pack(_TAG, len(message), len(ranges)),
            *(struct.pack("<II", *span) for span in ranges),
            *(message[start : start + size] for start, size in ranges),
        )
    )
    rest, at = [], 0
    for start, size in sorted(ranges):
        rest.append(message[at:start])
        at = start + size
    rest.append(message[at:])
    digest = row_binding(partition, key, hashlib.sha256(content).digest())
    return _PREFIX.pack(MAGIC, digest) + content, b"".join(rest)


def join_message(token_part: bytes, rest: bytes, key: str) -> bytes:
    """The message that was split; its own checksum is left to the reader.

    Raises:
        CorruptRowError: the two parts cannot belong together.
    """
    _, length, ranges, at = _parse(token_part, key)
    if length != len(rest) + len(token_part) - at:
        raise CorruptRowError("torn row message", expected=length, got=len(rest), key=key)
    pieces: list[bytes] = []
    placed = taken = 0
    cut = []
    for start, size in ranges:
        cut.append((start, token_part[at : at + size]))
        at += size
    for start, piece in sorted(cut):
        pieces.append(rest[taken : taken + start - placed])
        taken += start - placed
        pieces.append(piece)
        placed = start + len(piece)
    pieces.append(rest[taken:])
    return b"".join(pieces)


def read_token_columns(
    token_part: bytes, partition: str, key: str, columns: Sequence[str]
) -> pa.RecordBatch:
    """``columns`` of the row, verified against the part's checksum and the row's own key.

    Raises:
        CorruptRowError: torn, flipped, or another key's.
    """
    tag, _, ranges, at = _parse(token_part, key)
    content = memoryview(token_part)[_PREFIX.size :]
    digest = row_binding(partition, key, hashlib.sha256(content).digest())
    if digest != token_part[len(MAGIC) : _PREFIX.size] or tag != _TAG:
        raise CorruptRowError("the token columns fail their checksum", key=key)
    base = pa.py_buffer(token_part)
    buffers = []
    for _, size in ranges:
        buffers.append(base.slice(at, size))
        at += size
    take = iter(buffers).__next__
    arrays = [_build(kind, take) for kind in _TYPES]
    batch = pa.RecordBatch.from_arrays(arrays, schema=_TOKEN_SCHEMA)
    identity = batch.column("staging_key")[0].as_py()
    if identity != key:
        raise CorruptRowError("the row is another key's", expected=key, got=identity, key=key)
    return select_columns(batch, columns, key)


def _parse(token_part: bytes, key: str) -> tuple[bytes, int, list[tuple[int, int]], int]:
    """(schema tag, message length, ranges, where their bytes begin)."""
    head = _PREFIX.size + _HEAD.size
    if len(token_part) < head or not token_part.startswith(MAGIC):
        raise CorruptRowError("torn token columns", got=len(token_part), key=key)
    tag, length, count = _HEAD.unpack_from(token_part, _PREFIX.size)
    at = head + 8 * count
    if at > len(token_part):
        raise CorruptRowError("torn token columns", got=len(token_part), key=key)
    ranges = list(struct.iter_unpack("<II", token_part[head:at]))
    if at + sum(size for _, size in ranges) != len(token_part):
        raise CorruptRowError("torn token columns", got=len(token_part), key=key)
    return tag, length, ranges, at


def _buffer_count(kind: Any) -> int:
    if pa.types.is_list(kind):
        return 1 + _buffer_count(kind.value_type)
    return 2 if pa.types.is_string(kind) else 1


def _build(kind: Any, take: Callable[[], pa.Buffer]) -> pa.Array:
    """A column of one row from its buffers; list buffers may be longer than their values."""
    if pa.types.is_list(kind):
        offsets, values = take(), take()
        length = int.from_bytes(offsets[4:8].to_pybytes(), "little")
        child = pa.Array.from_buffers(kind.value_type, length, [None, values])
        return pa.Array.from_buffers(kind, 1, [None, offsets], children=[child])
    if pa.types.is_string(kind):
        return pa.Array.from_buffers(kind, 1, [None, take(), take()])
    return pa.Array.from_buffers(kind, 1, [None, take()])
