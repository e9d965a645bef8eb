"""A staged row's token columns apart from the rest, so that resolving a prefix moves nothing else.

Of these columns only the ids and their mask are big, and in the row's message they lie side by
side. ``token_part`` says where (the *slice*) and gives the small columns as a *head*, with a
checksum over both. A backend keeps head and message so that head and slice can be read alone.

Head (little-endian), its length a multiple of 16::

    0   8   magic b"TKPLTOK2"
    8   32  SHA-256 over partition, key, the rest of the head, and the slice
    40  24  prev_len, delta_len, cum_len
    64  32  chain_hash
    96  8   number of ids, number of mask items
    104 8   slice: where it starts in the message, its bytes
    112 8   bytes of the message, of the rollout id
    120 ..  rollout id (UTF-8), then zeros
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Buffer, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from tokenplane.schemas.columns import SCHEMA_FINGERPRINT_KEY
from tokenplane.schemas.errors import CorruptRowError
from tokenplane.schemas.row_message import HEADER_BYTES
from tokenplane.schemas.staged_row import STAGED_ROW_SCHEMA, TOKEN_COLUMNS
from tokenplane.staging.batch_bytes import BatchReader, BatchWriter, column_places

MAGIC: Final = b"TKPLTOK2"
MOST_TOKENS: Final = 2**31 - 1
"""In one Arrow array of lists."""
_PREFIX: Final = struct.Struct("<8s32s")
_FIXED: Final = struct.Struct("<3q32s2I4I")
_IDS, _MASK, _START, _SIZE, _WHOLE, _NAME = range(4, 10)
"""Places among the fixed fields."""
_ROLLOUT_AT: Final = _PREFIX.size + _FIXED.size
_U32: Final = struct.Struct("<I")
_OFFSETS: Final = struct.Struct("<2i")
_I64: Final = struct.Struct("<q")
_TOKEN_SET: Final = frozenset(TOKEN_COLUMNS)
_TOKEN_LIST: Final = list(TOKEN_COLUMNS)
_FINGERPRINT: Final = STAGED_ROW_SCHEMA.metadata[SCHEMA_FINGERPRINT_KEY]
_TOKEN_SCHEMA: Final = pa.schema(
    [STAGED_ROW_SCHEMA.field(name) for name in TOKEN_COLUMNS], metadata=STAGED_ROW_SCHEMA.metadata
)
_PLACES: Final = dict(zip(STAGED_ROW_SCHEMA.names, column_places(STAGED_ROW_SCHEMA), strict=True))
_NULLS: Final = itemgetter(*(2 * _PLACES[name].node + 1 for name in TOKEN_COLUMNS))
"""The columns' null counts among the nodes."""
_STARTS: Final = itemgetter(
    *(
        2 * (_PLACES[name].buffer + at)
        for name, at in (
            *(("rollout_id", 1), ("rollout_id", 2)),
            *((name, 1) for name in ("prev_len", "delta_len", "cum_len")),
            *(("token_ids_delta", 1), ("token_ids_delta", 3)),
            *(("token_mask_delta", 1), ("token_mask_delta", 3)),
            ("chain_hash", 1),
        )
    )
)
"""Where those of the columns' buffers start that are wanted, among the buffers."""
_READER: Final = BatchReader(STAGED_ROW_SCHEMA)
_WRITER: Final = BatchWriter(_TOKEN_SCHEMA)


@dataclass(frozen=True, slots=True)
class TokenPart:
    """What a message has of the token columns."""

    head: bytes
    start: int
    """Of the slice, in the message."""
    size: int
    """Of the slice, in bytes."""


def covers(columns: Sequence[str]) -> bool:
    """True if a token part has all of ``columns``."""
    return _TOKEN_SET.issuperset(columns)


def token_part(message: bytes, row: pa.RecordBatch, partition: str, key: str) -> TokenPart | None:
    """The token part of a row's message; None for a row of another schema, which has none."""
    if (row.schema.metadata or {}).get(SCHEMA_FINGERPRINT_KEY) != _FINGERPRINT:
        return None
    # Schema and batch are the payload's two messages; one without a body is its metadata.
    found = _READER.read(message, HEADER_BYTES + 8 + _U32.unpack_from(message, HEADER_BYTES + 4)[0])
    if found is None or len(message) >= 2**32:
        return None
    nodes, buffers, body = found
    if any(_NULLS(nodes)):
        return None
    at = [body + start for start in _STARTS(buffers)]
    name_offsets, names, *small, ids_offsets, ids, mask_offsets, mask, chain_hash = at
    numbers = [_I64.unpack_from(message, place)[0] for place in small]
    # A buffer may have the items of other rows too, if the batch was cut out of a longer one.
    (name_at, name_end), (ids_at, ids_end), (mask_at, mask_end) = (
        _OFFSETS.unpack_from(message, place) for place in (name_offsets, ids_offsets, mask_offsets)
    )
    name = message[names + name_at : names + name_end]
    ids_bytes, mask_bytes = 4 * (ids_end - ids_at), mask_end - mask_at
    start = ids + 4 * ids_at
    size = mask + mask_end - start
    if size < ids_bytes + mask_bytes:
        return None
    fixed = _FIXED.pack(
        *numbers,
        message[chain_hash : chain_hash + 32],
        ids_bytes // 4,
        mask_bytes,
        start,
        size,
        len(message),
        len(name),
    )
    rest = fixed + name + bytes(-(_ROLLOUT_AT + len(name)) % 16)
    digest = hashlib.sha256(b"".join((_start(partition), key.encode(), b"\0", rest)))
    digest.update(memoryview(message)[start : start + size])
    return TokenPart(_PREFIX.pack(MAGIC, digest.digest()) + rest, start, size)


def cut_message(message: bytes, part: TokenPart) -> tuple[bytes, bytes]:
    """(slice, what it leaves of the message)."""
    end = part.start + part.size
    return message[part.start : end], message[: part.start] + message[end:]


def join_message(head: bytes, tokens: Buffer, rest: Buffer, key: str) -> bytes:
    """The message that was cut; its own checksum is left to the reader.

    Raises:
        CorruptRowError: the parts cannot belong together.
    """
    fields, _ = _parse(head, key)
    left = memoryview(rest)
    size, start, whole = memoryview(tokens).nbytes, fields[_START], fields[_WHOLE]
    if size != fields[_SIZE] or start > left.nbytes or left.nbytes + size != whole:
        raise CorruptRowError("torn row message", expected=whole, got=left.nbytes + size, key=key)
    return b"".join((left[:start], tokens, left[start:]))


def read_token_columns(
    partition: str,
    keys: Sequence[str],
    parts: Sequence[tuple[bytes, Buffer]],
    columns: Sequence[str],
) -> list[pa.RecordBatch]:
    """``columns`` of the row of each key, from its (head, slice), verified.

    The rows are slices of one batch: decoding a chain at once costs a fraction of decoding its rows
    one by one.

    Raises:
        CorruptRowError: torn, flipped, or another key's.
    """
    if not keys:
        return []
    rows = [
        (key.encode(), memoryview(tokens), *_parse(head, key))
        for key, (head, tokens) in zip(keys, parts, strict=True)
    ]
    start = _start(partition)
    for key, (head, _), (name, tokens, fields, _) in zip(keys, parts, rows, strict=True):
        size = fields[_SIZE]
        if tokens.nbytes != size or 4 * fields[_IDS] + fields[_MASK] > size:
            raise CorruptRowError("torn token columns", expected=size, got=tokens.nbytes, key=key)
        digest = hashlib.sha256(b"".join((start, name, b"\0", head[_PREFIX.size :])))
        digest.update(tokens)
        if digest.digest() != head[8 : _PREFIX.size]:
            raise CorruptRowError("the token columns fail their checksum", key=key)
    names, slices, heads, rollouts = zip(*rows, strict=True)
    prev_len, delta_len, cum_len, chain_hash, ids, mask, *_ = zip(*heads, strict=True)
    half = len(keys) // 2
    if half and sum(ids) > MOST_TOKENS:
        first = read_token_columns(partition, keys[:half], parts[:half], columns)
        return first + read_token_columns(partition, keys[half:], parts[half:], columns)
    count = len(rows)
    batch = _WRITER.batch(
        count,
        [*[count] * 6, sum(ids), count, sum(mask), count],
        [
            (_offsets(map(len, names)), b"".join(names)),
            (_offsets(map(len, rollouts)), b"".join(rollouts)),
            (_packed("q", prev_len),),
            (_packed("q", delta_len),),
            (_packed("q", cum_len),),
            (_offsets(ids),),
            (b"".join([part[: 4 * n] for part, n in zip(slices, ids, strict=True)]),),
            (_offsets(mask),),
            (b"".join([part[len(part) - n :] for part, n in zip(slices, mask, strict=True)]),),
            (b"".join(chain_hash),),
        ],
    )
    if list(columns) != _TOKEN_LIST:
        batch = batch.select(list(columns))
    return [batch] if count == 1 else [batch.slice(at, 1) for at in range(count)]


def _packed(kind: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def _offsets(lengths: Iterable[int]) -> bytes:
    return _packed("i", list(accumulate(lengths, initial=0)))


def _parse(head: bytes, key: str) -> tuple[tuple[Any, ...], bytes]:
    """(fixed fields, rollout id as UTF-8)."""
    if len(head) < _ROLLOUT_AT or not head.startswith(MAGIC):
        raise CorruptRowError("torn token columns", got=len(head), key=key)
    fields = _FIXED.unpack_from(head, _PREFIX.size)
    end = _ROLLOUT_AT + fields[_NAME]
    if len(head) != end + -end % 16:
        raise CorruptRowError("torn token columns", got=len(head), key=key)
    return fields, head[_ROLLOUT_AT:end]


def _start(partition: str) -> bytes:
    """What a digest starts with, before the key and a NUL."""
    name = partition.encode()
    return _U32.pack(len(name)) + name
