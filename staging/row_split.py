"""A staged row's message in two parts, so that resolving a prefix moves its token columns only.

The token part is the row's ``TOKEN_COLUMNS`` as an Arrow batch message with a checksum of its own.
The token ids and their mask, nearly all of it, are cut out of the rest; ``join_message`` puts them
back and gives the message byte for byte.

Layout of the token part (little-endian)::

    0   8   magic b"TKPLTOK1"
    8   32  SHA-256 over partition, key and all that follows
    40  32  schema fingerprint (the first 32 of its hex digits, ASCII)
    72  4   length of the message in bytes
    76  24  ids, then mask: offset in the message, offset in this part, bytes
    100 12  zero
    112 ..  Arrow batch message, aligned
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from tokenplane.schemas.columns import SCHEMA_FINGERPRINT_KEY, list_value
from tokenplane.schemas.errors import CorruptRowError
from tokenplane.schemas.staged_row import STAGED_ROW_SCHEMA, TOKEN_COLUMNS
from tokenplane.staging.row_packing import select_columns

MAGIC: Final = b"TKPLTOK1"
_PREFIX: Final = struct.Struct("<8s32s")
_HEAD: Final = struct.Struct("<32sI6I12x")
_BATCH_AT: Final = _PREFIX.size + _HEAD.size
_PROBE: Final = 64
_CUT_COLUMNS: Final = ("token_ids_delta", "token_mask_delta")
_TOKEN_SET: Final = frozenset(TOKEN_COLUMNS)
_TOKEN_LIST: Final = list(TOKEN_COLUMNS)
_FINGERPRINT: Final = STAGED_ROW_SCHEMA.metadata[SCHEMA_FINGERPRINT_KEY]
_TAG: Final = _FINGERPRINT[:32]
_TOKEN_SCHEMA: Final = pa.schema(
    [STAGED_ROW_SCHEMA.field(name) for name in TOKEN_COLUMNS], metadata=STAGED_ROW_SCHEMA.metadata
)


def covers(columns: Sequence[str]) -> bool:
    """True if a token part has all of ``columns``."""
    return _TOKEN_SET.issuperset(columns)


def split_message(
    message: bytes, row: pa.RecordBatch, partition: str, key: str
) -> tuple[bytes, bytes] | None:
    """(token part, rest) of a row's message; None for another schema: such a message stays whole.

    Raises:
        CorruptRowError: the message is not the row's.
    """
    if (row.schema.metadata or {}).get(SCHEMA_FINGERPRINT_KEY) != _FINGERPRINT:
        return None
    batch = row.select(_TOKEN_LIST).serialize().to_pybytes()
    cuts = []
    start = inside = 0
    for name in _CUT_COLUMNS:
        # Wherever these bytes stand: equal bytes may be cut and put back at any place. The columns
        # lie in this order, so the second is found behind the first.
        content = list_value(row, name).tobytes()
        start, inside = _find(message, content, start), _find(batch, content, inside)
        if min(start, inside) < 0:
            raise CorruptRowError(f"the message lacks the row's {name}", key=key)
        cuts.append((start, inside, len(content)))
        start, inside = start + len(content), inside + len(content)
    head = _HEAD.pack(
        _TAG,
        len(message),
        *(number for start, inside, size in cuts for number in (start, _BATCH_AT + inside, size)),
    )
    rest, at = [], 0
    for start, _, size in cuts:
        rest.append(message[at:start])
        at = start + size
    rest.append(message[at:])
    digest = _digest(partition, key, head, batch)
    return b"".join((MAGIC, digest, head, batch)), b"".join(rest)


def _find(text: bytes, content: bytes, start: int) -> int:
    """Where ``content`` stands. Searching for its beginning costs a tenth of searching for it."""
    at = text.find(content[:_PROBE], start)
    if text.startswith(content, at):
        return at
    return text.find(content, start)


def join_message(token_part: bytes, rest: bytes, key: str) -> bytes:
    """The message that was split; its own checksum is left to the reader.

    Raises:
        CorruptRowError: the two parts cannot belong together.
    """
    _, length, numbers = _parse(token_part, key)
    cuts = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    if length != len(rest) + sum(size for _, _, size in cuts):
        raise CorruptRowError("torn row message", expected=length, got=len(rest), key=key)
    pieces: list[bytes] = []
    placed = taken = 0
    for start, inside, size in cuts:
        gap = max(0, start - placed)
        pieces += (rest[taken : taken + gap], token_part[inside : inside + size])
        taken += gap
        placed += gap + size
    pieces.append(rest[taken:])
    return b"".join(pieces)


def read_token_columns(
    token_part: bytes, partition: str, key: str, columns: Sequence[str]
) -> pa.RecordBatch:
    """``columns`` of the row, verified against the part's checksum and the row's own key.

    Raises:
        CorruptRowError: torn, flipped, or another key's.
    """
    tag, _, _ = _parse(token_part, key)
    content = memoryview(token_part)[_PREFIX.size :]
    digest = _digest(partition, key, content)
    if digest != token_part[len(MAGIC) : _PREFIX.size] or tag != _TAG:
        raise CorruptRowError("the token columns fail their checksum", key=key)
    batch = pa.ipc.read_record_batch(pa.py_buffer(token_part)[_BATCH_AT:], _TOKEN_SCHEMA)
    identity = batch.column(0)[0].as_py()
    if identity != key:
        raise CorruptRowError("the row is another key's", expected=key, got=identity, key=key)
    return batch if columns == TOKEN_COLUMNS else select_columns(batch, columns, key)


def _parse(token_part: bytes, key: str) -> tuple[bytes, int, tuple[int, ...]]:
    """(schema tag, message length, six numbers of the cuts)."""
    if len(token_part) < _BATCH_AT or not token_part.startswith(MAGIC):
        raise CorruptRowError("torn token columns", got=len(token_part), key=key)
    tag, length, *numbers = _HEAD.unpack_from(token_part, _PREFIX.size)
    return tag, length, tuple(numbers)


def _digest(partition: str, key: str, *content: bytes | memoryview) -> bytes:
    name = partition.encode()
    digest = hashlib.sha256(struct.pack("<I", len(name)) + name + key.encode() + b"\0")
    for part in content:
        digest.update(part)
    return digest.digest()
