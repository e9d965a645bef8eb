"""Arrow batch messages as bytes: columns found in one, and one put together from columns.

pyarrow takes a message apart, or an array together, at some microseconds per column and row. Where
a schema is fixed, the bytes of its columns can be found by their number, and be laid out the same
way (Arrow IPC format: encapsulated messages; format/Message.fbs).
"""

from __future__ import annotations

import struct
from collections.abc import Buffer, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

_U16: Final = struct.Struct("<H")
_I32: Final = struct.Struct("<i")
_U32: Final = struct.Struct("<I")
_PADDING: Final = [bytes(count) for count in range(8)]


@dataclass(frozen=True, slots=True)
class BatchPlaces:
    """Where a batch message has its parts, as positions in the buffer that holds it."""

    rows: int
    body_bytes: int
    nodes: int
    """First (length, null count) pair."""
    buffers: int
    """First (offset in the body, bytes) pair."""
    body: int


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """A column's numbers among a schema's nodes and buffers."""

    node: int
    buffer: int


def find_batch(message: Buffer, at: int) -> BatchPlaces:
    """The places in the batch message that starts at ``at``; it is trusted to be one.

    The metadata is a flatbuffer: a table starts with the distance back to its field offsets. Of a
    ``Message``, field 2 is the header and 3 the body length; of a ``RecordBatch``, field 0 is the
    number of rows, 1 the nodes and 2 the buffers.
    """

    def follow(place: int) -> int:
        return place + int(_U32.unpack_from(message, place)[0])

    def member(table: int, index: int) -> int:
        offsets = table - _I32.unpack_from(message, table)[0] + 4
        return table + int(_U16.unpack_from(message, offsets + 2 * index)[0])

    table = follow(at + 8)
    batch = follow(member(table, 2))
    # A vector starts with its length in four bytes.
    return BatchPlaces(
        rows=member(batch, 0),
        body_bytes=member(table, 3),
        nodes=follow(member(batch, 1)) + 4,
        buffers=follow(member(batch, 2)) + 4,
        body=follow(at + 4) + 4,
    )


def column_places(schema: pa.Schema) -> list[ColumnPlace]:
    """Of each column, in order.

    Raises:
        TypeError: a type whose layout is not known here.
    """
    places = []
    node = buffer = 0
    for field in schema:
        places.append(ColumnPlace(node, buffer))
        nodes, buffers = _parts(field.type)
        node, buffer = node + nodes, buffer + buffers
    return places


def _parts(kind: pa.DataType) -> tuple[int, int]:
    """(nodes, buffers) of an array."""
    if pa.types.is_list(kind):
        nodes, buffers = _parts(kind.value_type)
        return nodes + 1, buffers + 2
    if pa.types.is_struct(kind):
        members = [_parts(kind.field(at).type) for at in range(kind.num_fields)]
        return 1 + sum(nodes for nodes, _ in members), 1 + sum(count for _, count in members)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return 1, 3
    if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind):
        return 1, 2
    raise TypeError(f"unknown layout: {kind}")


class BatchReader:
    """Finds columns in batch messages of one schema. Thread-safe.

    Where the metadata has what depends on the schema (and on who writes) alone, so it is looked for
    in one message and then known.
    """

    def __init__(self, schema: pa.Schema) -> None:
        sample = pa.RecordBatch.from_arrays([pa.nulls(1, f.type) for f in schema], schema=schema)
        message = sample.serialize().to_pybytes()
        self._places = find_batch(message, 0)
        kinds = [_parts(field.type) for field in schema]
        self._nodes = struct.Struct(f"<{2 * sum(nodes for nodes, _ in kinds)}q")
        self._buffers = struct.Struct(f"<{2 * sum(count for _, count in kinds)}q")

    def read(self, message: Buffer, at: int) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
        """(nodes, buffers, position of the body) of the batch message at ``at``.

        Nodes are pairs of length and null count, buffers of offset and bytes. None for a message
        whose metadata looks another way.
        """
        places = self._places
        if 8 + _U32.unpack_from(message, at + 4)[0] != places.body:
            return None
        nodes = self._nodes.unpack_from(message, at + places.nodes)
        return nodes, self._buffers.unpack_from(message, at + places.buffers), at + places.body


class BatchWriter:
    """Puts batches of one schema together. Thread-safe."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        empty = pa.RecordBatch.from_arrays([pa.nulls(1, f.type) for f in schema], schema=schema)
        message = empty.serialize().to_pybytes()
        self._places = find_batch(message, 0)
        self._metadata = message[: self._places.body]

    def batch(
        self, rows: int, lengths: Sequence[int], buffers: Sequence[Sequence[bytes]]
    ) -> pa.RecordBatch:
        """The batch of these buffers, which has no nulls.

        Args:
            lengths: of each array, in the order of Arrow's nodes.
            buffers: of each array, its own without the validity.
        """
        places = self._places
        metadata = bytearray(self._metadata)
        parts: list[Buffer] = [metadata]
        pairs: list[int] = []
        end = 0
        for own in buffers:
            pairs += (end, 0)
            for content in own:
                size = len(content)
                pairs += (end, size)
                parts += (content, _PADDING[-size % 8])
                end += (size + 7) & ~7
        nodes = [number for length in lengths for number in (length, 0)]
        struct.pack_into("<q", metadata, places.rows, rows)
        struct.pack_into("<q", metadata, places.body_bytes, end)
        struct.pack_into(f"<{len(nodes)}q", metadata, places.nodes, *nodes)
        struct.pack_into(f"<{len(pairs)}q", metadata, places.buffers, *pairs)
        return pa.ipc.read_record_batch(pa.py_buffer(b"".join(parts)), self._schema)
