"""One row's values laid out as Arrow buffers: a batch of many columns at the price of a few.

pyarrow converts a row value by value and column by column; for the 43 columns of a staged row that
takes many times as long as writing their bytes. Here the buffers of all columns are written one
after the other into one Arrow batch message, whose metadata is the schema's own with lengths and
offsets filled in, and pyarrow reads that message: each column is a view of it (Arrow IPC format,
"RecordBatch message").

Only values of exactly a column's own Python type are taken. All else is left to pyarrow, which
converts it or says what is wrong with it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tokenplane.schemas.column_buffers import (
    CODES,
    LISTS,
    PADDING,
    Body,
    ForeignValueError,
    Write,
    make_writer,
)
from tokenplane.schemas.schema_memo import SchemaMemo

type _Part = bytes | np.ndarray
type _Place = Callable[[Any, _Row], None]

MAX_COPIED_BYTES: Final = 2**20
"""Of arrays in one row; larger ones are left to pyarrow, which does not copy them."""
ARRAY_PARTS: Final = 3
"""Offsets, the array, and its padding: an array is copied once, into the message."""


@dataclass(slots=True)
class _Row:
    """A body of which every column has its places; it starts as a row of nulls."""

    nodes: list[int]
    sizes: list[int]
    columns: list[_Part]
    """Each column's buffers, padded: one part, or ``ARRAY_PARTS`` of a column that takes arrays."""
    arrays_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Column:
    """Where a column's parts lie in a row."""

    at: int
    nodes: slice
    sizes: slice

    def fill(self, body: Body, row: _Row) -> None:
        row.nodes[self.nodes] = body.nodes
        row.sizes[self.sizes] = body.sizes
        row.columns[self.at] = b"".join(body.parts)


@dataclass(frozen=True, slots=True)
class _Layout:
    places: dict[str, _Place]
    """By column name: puts a value that is not null into a row."""
    nodes: list[int]
    sizes: list[int]
    columns: list[_Part]
    metadata: bytes
    """Of a batch message of one row, its continuation mark and length included."""
    body_length_at: int
    nodes_at: int
    buffers_at: int


def lay_out_row(schema: pa.Schema, values: Mapping[str, Any]) -> pa.RecordBatch | None:
    """The one-row batch of ``values``; absent ones are null. None: it is work for pyarrow.

    Unknown names, and nulls on the top level, are the caller's to check.
    """
    layout = _layout_of(schema)
    if layout is None:
        return None
    row = _Row(layout.nodes.copy(), layout.sizes.copy(), layout.columns.copy())
    places = layout.places
    try:
        for name, value in values.items():
            if value is not None:
                places[name](value, row)
    except (ForeignValueError, OverflowError, UnicodeEncodeError, struct.error):
        return None
    if row.arrays_nbytes > MAX_COPIED_BYTES:
        return None
    return pa.ipc.read_record_batch(pa.py_buffer(_message(layout, row)), schema)


def _message(layout: _Layout, row: _Row) -> bytes:
    buffers = np.zeros((len(row.sizes), 2), np.int64)
    buffers[:, 1] = row.sizes
    ends = ((buffers[:, 1] + 7) & ~7).cumsum()
    buffers[1:, 0] = ends[:-1]
    metadata = bytearray(layout.metadata)
    struct.pack_into("<q", metadata, layout.body_length_at, ends[-1])
    struct.pack_into(f"<{len(row.nodes)}q", metadata, layout.nodes_at, *row.nodes)
    metadata[layout.buffers_at : layout.buffers_at + buffers.nbytes] = buffers.tobytes()
    return b"".join((metadata, *row.columns))


def _make_layout(schema: pa.Schema) -> _Layout | None:
    if not len(schema) or len(set(schema.names)) < len(schema):
        return None
    places: dict[str, _Place] = {}
    nodes: list[int] = []
    sizes: list[int] = []
    columns: list[_Part] = []
    nulls = [pa.nulls(1, item.type) for item in schema]
    for null_array, item in zip(nulls, schema, strict=True):
        null = _as_written(null_array)
        column = _Column(
            len(columns),
            slice(len(nodes), len(nodes) + len(null.nodes)),
            slice(len(sizes), len(sizes) + len(null.sizes)),
        )
        place = _placer(item.type, column)
        if place is None:
            return None
        places[item.name] = place
        nodes += null.nodes
        sizes += null.sizes
        columns.append(b"".join(null.parts))
        if pa.types.is_list(item.type):
            columns += [b""] * (ARRAY_PARTS - 1)
    metadata, _ = _split(pa.RecordBatch.from_arrays(nulls, schema=schema))
    return _Layout(places, nodes, sizes, columns, metadata, *_find(metadata))


_layout_of = SchemaMemo(_make_layout)


def _find(metadata: bytes) -> tuple[int, int, int]:
    """Where a batch message's metadata has its body length, its nodes and its buffers.

    The metadata is a flatbuffer: a table starts with the distance back to its field offsets. Of a
    ``Message``, field 2 is the header and 3 the body length; of a ``RecordBatch``, field 1 are the
    nodes and 2 the buffers (format/Message.fbs).
    """

    def number(at: int, kind: str) -> int:
        found: int = struct.unpack_from(f"<{kind}", metadata, at)[0]
        return found

    def member(table: int, index: int) -> int:
        offsets = table - number(table, "i")
        return table + number(offsets + 4 + 2 * index, "H")

    def follow(at: int) -> int:
        return at + number(at, "I")

    message = follow(8)
    batch = follow(member(message, 2))
    # A vector starts with its length in four bytes.
    nodes, buffers = (follow(member(batch, index)) + 4 for index in (1, 2))
    return member(message, 3), nodes, buffers


def _split(batch: pa.RecordBatch) -> tuple[bytes, bytes]:
    """(metadata with its mark and length, body) of the batch as a message."""
    message = batch.serialize().to_pybytes()
    start = 8 + int.from_bytes(message[4:8], "little")
    return message[:start], message[start:]


def _as_written(array: pa.Array) -> Body:
    """As pyarrow writes it: so equal rows give equal bytes, whoever has laid them out."""
    metadata, data = _split(pa.RecordBatch.from_arrays([array], ["x"]))
    _, nodes_at, buffers_at = _find(metadata)
    return Body(_pairs(metadata, nodes_at), _pairs(metadata, buffers_at)[1::2], [data])


def _pairs(metadata: bytes, at: int) -> list[int]:
    (count,) = struct.unpack_from("<I", metadata, at - 4)
    return list(struct.unpack_from(f"<{2 * count}q", metadata, at))


def _placer(kind: pa.DataType, column: _Column) -> _Place | None:
    """Puts one value of this type into its column; None for a type that pyarrow shall do."""
    if pa.types.is_string(kind):
        return _text_placer(column)
    if pa.types.is_fixed_size_binary(kind):
        return _fixed_placer(kind.byte_width, column)
    if kind in CODES:
        return _number_placer(*CODES[kind], column)
    write = make_writer(kind)
    if write is None:
        return None
    if pa.types.is_list(kind):
        return _list_placer(kind, write, column)

    def place(value: Any, row: _Row) -> None:
        body = Body()
        write([value], body)
        column.fill(body, row)

    return place


def _text_placer(column: _Column) -> _Place:
    """Most columns are text, digests or numbers: they spare the detour over a list of values."""
    at, nulls_at, first = column.at, column.nodes.start + 1, column.sizes.start

    def place(value: Any, row: _Row) -> None:
        if type(value) is not str:
            raise ForeignValueError
        data = value.encode()
        size = len(data)
        row.nodes[nulls_at] = row.sizes[first] = 0
        row.sizes[first + 1], row.sizes[first + 2] = 8, size
        row.columns[at] = struct.pack("<2i", 0, size) + data + PADDING[-size & 7]

    return place


def _fixed_placer(width: int, column: _Column) -> _Place:
    at, nulls_at, first = column.at, column.nodes.start + 1, column.sizes.start
    padding = PADDING[-width & 7]

    def place(value: Any, row: _Row) -> None:
        if type(value) is not bytes or len(value) != width:
            raise ForeignValueError
        row.nodes[nulls_at] = row.sizes[first] = 0
        row.sizes[first + 1] = width
        row.columns[at] = value + padding

    return place


def _number_placer(kind: type, code: str, column: _Column) -> _Place:
    at, nulls_at, first = column.at, column.nodes.start + 1, column.sizes.start
    size = struct.calcsize(f"<{code}")
    pack = struct.Struct(f"<{code}{8 - size}x").pack

    def place(value: Any, row: _Row) -> None:
        if type(value) is not kind:
            raise ForeignValueError
        row.nodes[nulls_at] = row.sizes[first] = 0
        row.sizes[first + 1] = size
        row.columns[at] = pack(value)

    return place


def _list_placer(kind: pa.DataType, write: Write, column: _Column) -> _Place:
    empty = _as_written(pa.array([[]], kind))
    array_parts = slice(column.at, column.at + ARRAY_PARTS)
    dtype = None
    if kind.value_type in CODES:
        dtype = np.dtype(CODES[kind.value_type][1]).newbyteorder("<")

    def place(value: Any, row: _Row) -> None:
        body = empty
        if isinstance(value, np.ndarray):
            if dtype is None or value.dtype != dtype or value.ndim != 1:
                raise ForeignValueError
            row.arrays_nbytes += value.nbytes
            size = len(value)
            row.nodes[column.nodes] = [1, 0, size, 0]
            row.sizes[column.sizes] = [0, 8, 0, value.nbytes]
            row.columns[array_parts] = (
                struct.pack("<2i", 0, size),
                np.ascontiguousarray(value),
                PADDING[-value.nbytes & 7],
            )
            return
        if value or type(value) not in LISTS:
            body = Body()
            write([value], body)
        column.fill(body, row)

    return place
