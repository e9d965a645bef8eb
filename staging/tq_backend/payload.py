"""What lies in TransferQueue for a row or blob: one buffer that says whose it is.

TransferQueue can hand out another key's data (stale metadata after a clear) and drops keys that it
does not know, so every buffer carries its name and is checked against what was asked for.

Layout (little-endian)::

    0   8   magic b"TKPLTQ01"
    8   16  origin: the journal that the row is in
    24  32  binding of the row (see row_packing.row_binding), or hash of the blob
    56  4   length of the name
    60  8   length of the content
    68  ..  name, then content
"""

from __future__ import annotations

import struct
from collections.abc import Buffer
from dataclasses import dataclass
from typing import Final

from tokenplane.schemas.errors import CorruptRowError

MAGIC: Final = b"TKPLTQ01"
_HEAD: Final = struct.Struct("<8s16s32sIQ")


@dataclass(frozen=True, slots=True)
class Payload:
    """A buffer taken apart; its content is not verified yet."""

    name: str
    origin: bytes
    binding: bytes
    content: memoryview


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


def wrap(name: str, origin: bytes, binding: bytes, content: Buffer) -> bytearray:
    """The buffer for the queue."""
    title = name.encode()
    body = memoryview(content).cast("B")
    head = _HEAD.pack(MAGIC, origin, binding, len(title), len(body))
    return bytearray(b"".join((head, title, body)))


def unwrap(buffer: bytes) -> Payload:
    """The parts of a buffer from the queue, which may have been padded.

    Raises:
        CorruptRowError: none of ours, or torn.
    """
    if len(buffer) < _HEAD.size or not buffer.startswith(MAGIC):
        raise CorruptRowError("no row of ours in the queue", got=bytes(buffer[:8]))
    _, origin, binding, title, size = _HEAD.unpack_from(buffer)
    start = _HEAD.size + title
    if len(buffer) < start + size:
        raise CorruptRowError("torn row in the queue", expected=start + size, got=len(buffer))
    try:
        name = buffer[_HEAD.size : start].decode()
    except UnicodeDecodeError as exc:
        raise CorruptRowError("no row of ours in the queue") from exc
    return Payload(name, origin, binding, memoryview(buffer)[start : start + size])
