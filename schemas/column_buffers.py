"""Python values of one Arrow type as the buffers in which Arrow keeps them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, chain
from types import NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa

type Write = Callable[[list[Any], Body], None]
"""Appends values, nulls among them, to a body."""

PADDING: Final = tuple(bytes(n) for n in range(8))
"""By number of bytes."""
CODES: Final = {
    pa.int32(): (int, "i"),
    pa.int64(): (int, "q"),
    pa.uint8(): (int, "B"),
    pa.uint64(): (int, "Q"),
    pa.float32(): (float, "f"),
    pa.float64(): (float, "d"),
}
LISTS: Final = frozenset({list, tuple})
_DICTS: Final = frozenset({dict})


class ForeignValueError(Exception):
    """A value that is not exactly of its column's own Python type: it is work for pyarrow."""


@dataclass(slots=True)
class Body:
    """Field nodes and buffers in the order in which Arrow writes them: depth first."""

    nodes: list[int] = field(default_factory=list)
    """Length and number of nulls, in turn."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each buffer, without its padding."""
    parts: list[bytes | memoryview] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        self.sizes.append(len(data))
        self.parts.append(data)
        if len(data) & 7:
            self.parts.append(PADDING[-len(data) & 7])


def make_writer(kind: pa.DataType) -> Write | None:
    """Writes values of this type, nulls among them; None for a type that pyarrow shall do."""
    if kind in CODES:
        return _number_writer(*CODES[kind])
    if pa.types.is_string(kind):
        return _text_writer(str)
    if pa.types.is_binary(kind):
        return _text_writer(bytes)
    if pa.types.is_fixed_size_binary(kind):
        return _fixed_writer(kind.byte_width)
    if pa.types.is_boolean(kind):
        return _bool_writer
    if pa.types.is_list(kind):
        return _list_writer(kind)
    if pa.types.is_struct(kind):
        return _struct_writer(kind)
    return None


def _start(values: list[Any], body: Body, kinds: frozenset[type], instead: Any) -> list[Any]:
    """Write node and validity; the values, with ``instead`` for each null.

    Raises:
        ForeignValueError: a value of another type.
    """
    found = {*map(type, values)}
    if found <= kinds:
        body.nodes += (len(values), 0)
        body.add(b"")
        return values
    if not found <= kinds | {NoneType}:
        raise ForeignValueError
    there = [value is not None for value in values]
    body.nodes += (len(values), there.count(False))
    body.add(np.packbits(there, bitorder="little").tobytes())
    return [value if is_there else instead for value, is_there in zip(values, there, strict=True)]


def _number_writer(kind: type, code: str) -> Write:
    kinds, zero = frozenset({kind}), kind()

    def write(values: list[Any], body: Body) -> None:
        values = _start(values, body, kinds, zero)
        body.add(struct.pack(f"<{len(values)}{code}", *values))

    return write


def _bool_writer(values: list[Any], body: Body) -> None:
    values = _start(values, body, frozenset({bool}), False)
    body.add(np.packbits(np.array(values, bool), bitorder="little").tobytes())


def _text_writer(kind: type[str] | type[bytes]) -> Write:
    kinds, nothing = frozenset({kind}), kind()

    def write(values: list[Any], body: Body) -> None:
        values = _start(values, body, kinds, nothing)
        if kind is str:
            values = [value.encode() for value in values]
        _add_offsets(values, body)
        body.add(b"".join(values))

    return write


def _fixed_writer(width: int) -> Write:
    kinds, zeros = frozenset({bytes}), bytes(width)

    def write(values: list[Any], body: Body) -> None:
        values = _start(values, body, kinds, zeros)
        if any(len(value) != width for value in values):
            raise ForeignValueError
        body.add(b"".join(values))

    return write


def _list_writer(kind: pa.DataType) -> Write | None:
    write_items = make_writer(kind.value_type)
    required = not kind.value_field.nullable
    if write_items is None:
        return None

    def write(values: list[Any], body: Body) -> None:
        values = _start(values, body, LISTS, ())
        _add_offsets(values, body)
        items = [*chain.from_iterable(values)]
        if required and _count_nulls(items):
            raise ForeignValueError
        write_items(items, body)

    return write


def _struct_writer(kind: pa.DataType) -> Write | None:
    members = []
    for item in kind:
        write_item = make_writer(item.type)
        if write_item is None:
            return None
        members.append((item.name, not item.nullable, write_item))

    def write(values: list[Any], body: Body) -> None:
        given = _start(values, body, _DICTS, {})
        for name, required, write_member in members:
            items = [value.get(name) for value in given]
            if required and _count_nulls(items) != _count_nulls(values):
                raise ForeignValueError
            write_member(items, body)

    return write


def _count_nulls(values: list[Any]) -> int:
    return [*map(type, values)].count(NoneType)


def _add_offsets(values: list[Any], body: Body) -> None:
    ends = accumulate(map(len, values), initial=0)
    body.add(struct.pack(f"<{len(values) + 1}i", *ends))
