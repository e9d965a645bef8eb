"""What lies in TransferQueue for a row or blob: a head that says whose it is, and a body.

TransferQueue can hand out another key's data (stale metadata after a clear) and drops keys that it
does not know, so every head carries its name and is checked against what was asked for. A body is
the content, or what the token part leaves of it (see row_split): a prefix is resolved from heads.

Head (little-endian)::

    0   8   magic b"TKPLTQ02"
    8   16  origin: the journal that the row is in
    24  32  binding of the row (see row_packing.row_binding), or hash of the blob
    56  8   length of the body
    64  16  lengths of the name, of the token part's head, of its slice; zero (uint32 each)
    80  ..  name, then the token part: head, slice
"""

from __future__ import annotations

import struct
from collections.abc import Buffer
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from tokenplane.schemas.errors import CorruptRowError
from tokenplane.staging.row_packing import PackedRow
from tokenplane.staging.row_split import cut_message, join_message, token_part

MAGIC: Final = b"TKPLTQ02"
_HEAD: Final = struct.Struct("<8s16s32sQ3I4x")


@dataclass(frozen=True, slots=True)
class Entry:
    """A row or blob as it is put into the queue."""

    name: str
    origin: bytes
    head: bytes
    body: Buffer
    """Not copied: it must not change while it is being sent."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A head taken apart, with its body if that was fetched; nothing of it is verified yet."""

    name: str
    origin: bytes
    binding: bytes
    tokens: tuple[bytes, bytes] | None
    """(head, slice) of the token part; None for blobs and rows without one."""
    body: bytes
    body_bytes: int

    def content(self, key: str) -> bytes:
        """The row's message, or the blob.

        Raises:
            CorruptRowError: torn.
        """
        if len(self.body) < self.body_bytes:
            raise CorruptRowError(
                "torn row in the queue", expected=self.body_bytes, got=len(self.body), key=key
            )
        body = self.body[: self.body_bytes]  # it may have been padded
        return body if self.tokens is None else join_message(*self.tokens, body, key)


def row_name(partition: str, key: str) -> str:
    """The row's key in the queue, where all our partitions share one of its own."""
    return f"r:{len(partition)}:{partition}:{key}"


def parse_row_name(name: str) -> tuple[str, str] | None:
    """(partition, key) of a row's name; None for another's."""
    kind, _, rest = name.partition(":")
    length, _, rest = rest.partition(":")
    if kind != "r" or not length.isdecimal():
        return None
    size = int(length)
    return rest[:size], rest[size + 1 :]


def blob_name(sha256: bytes) -> str:
    """The blob's key in the queue."""
    return f"b:{sha256.hex()}"


def blob_hash(name: str) -> bytes:
    """The hash in a blob's name."""
    return bytes.fromhex(name.partition(":")[2])


def row_entry(
    origin: bytes, partition: str, key: str, packed: PackedRow, row: pa.RecordBatch
) -> Entry:
    """A row for the queue."""
    name = row_name(partition, key)
    part = token_part(packed.message, row, partition, key)
    if part is None:
        return Entry(
            name, origin, _head(name, origin, packed.binding, packed.message), packed.message
        )
    tokens, rest = cut_message(packed.message, part)
    return Entry(name, origin, _head(name, origin, packed.binding, rest, part.head, tokens), rest)


def blob_entry(origin: bytes, sha256: bytes, content: Buffer) -> Entry:
    """A blob for the queue."""
    name = blob_name(sha256)
    return Entry(name, origin, _head(name, origin, sha256, content), content)


def _head(
    name: str,
    origin: bytes,
    binding: bytes,
    body: Buffer,
    token_head: bytes = b"",
    tokens: bytes = b"",
) -> bytes:
    title = name.encode()
    size = memoryview(body).nbytes
    fixed = _HEAD.pack(MAGIC, origin, binding, size, len(title), len(token_head), len(tokens))
    return b"".join((fixed, title, token_head, tokens))


def unwrap(head: bytes, body: bytes = b"") -> Payload:
    """The parts of what came from the queue, which may have been padded.

    Raises:
        CorruptRowError: none of ours, or torn.
    """
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise CorruptRowError("no row of ours in the queue", got=bytes(head[:8]))
    _, origin, binding, body_bytes, *sizes = _HEAD.unpack_from(head)
    parts = []
    at = _HEAD.size
    for size in sizes:
        parts.append(head[at : at + size])
        at += size
    if len(head) < at:
        raise CorruptRowError("torn row in the queue", expected=at, got=len(head))
    try:
        name = parts[0].decode()
    except UnicodeDecodeError as exc:
        raise CorruptRowError("no row of ours in the queue") from exc
    token_part = (parts[1], parts[2]) if parts[1] else None
    return Payload(name, origin, binding, token_part, body, body_bytes)
