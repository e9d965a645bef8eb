"""The typed binary encoding of ``extras`` (CONTRACT section 2, EXTRA) and its exact inverse."""

from __future__ import annotations

import math
import struct
from typing import Any

from tokenplane.schemas.errors import InvalidRecordError

_I64 = range(-(2**63), 2**63)


def encode_extra(value: Any) -> bytes:
    """One ASCII tag, then the value: null, bool, i64, f64, string, array or object.

    Canonical: equal values give equal bytes, and an integer never equals a float.

    Raises:
        InvalidRecordError: any other type (tuple, bytes, numpy, non-string key), an integer beyond
            64 bits signed, a float that is not finite, or nesting too deep for the interpreter.
    """
    out = bytearray()
    try:
        _encode(value, out)
    except RecursionError as exc:
        raise InvalidRecordError("extras: nested too deeply") from exc
    return bytes(out)


def _encode(value: Any, out: bytearray) -> None:
    kind = type(value)
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"B\x01" if value else b"B\x00"
    elif kind is int:
        if value not in _I64:
            raise InvalidRecordError("extras: integer beyond signed 64 bits", got=value)
        out += b"I" + struct.pack(">q", value)
    elif kind is float:
        if not math.isfinite(value):
            raise InvalidRecordError("extras: float must be finite", got=value)
        out += b"F" + struct.pack(">d", value)
    elif kind is str:
        out += b"S" + _text(value)
    elif kind is list:
        out += b"L" + struct.pack(">Q", len(value))
        for item in value:
            _encode(item, out)
    elif kind is dict:
        if not all(type(key) is str for key in value):
            raise InvalidRecordError("extras: object keys must be strings")
        out += b"D" + struct.pack(">Q", len(value))
        for data, key in sorted((_utf8(key), key) for key in value):
            out += struct.pack(">Q", len(data)) + data
            _encode(value[key], out)
    else:
        raise InvalidRecordError("extras: unsupported type", got=kind.__name__)


def _utf8(value: str) -> bytes:
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRecordError("extras: string is not encodable as UTF-8") from exc


def _text(value: str) -> bytes:
    data = _utf8(value)
    return struct.pack(">Q", len(data)) + data


def decode_extra(data: bytes) -> Any:
    """The value whose ``encode_extra`` is exactly ``data``.

    Raises:
        InvalidRecordError: truncated, trailing, malformed or non-canonical bytes (an unsorted or
            repeated key, a boolean beyond 0 and 1, a float that is not finite).
    """
    try:
        value, end = _decode(data, 0)
    except (struct.error, IndexError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRecordError("extras: malformed encoding") from exc
    if end != len(data):
        raise InvalidRecordError("extras: trailing bytes", expected=end, got=len(data))
    return value


def _decode(data: bytes, at: int) -> tuple[Any, int]:
    tag, at = data[at : at + 1], at + 1
    if tag == b"N":
        return None, at
    if tag == b"B":
        if data[at] > 1:
            raise InvalidRecordError("extras: boolean byte", expected="0 or 1", got=data[at])
        return data[at] == 1, at + 1
    if tag == b"I":
        return struct.unpack_from(">q", data, at)[0], at + 8
    if tag == b"F":
        number = struct.unpack_from(">d", data, at)[0]
        if not math.isfinite(number):
            raise InvalidRecordError("extras: float must be finite", got=number)
        return number, at + 8
    if tag == b"S":
        return _decode_text(data, at)
    if tag == b"L":
        count, at = struct.unpack_from(">Q", data, at)[0], at + 8
        items = []
        for _ in range(count):
            item, at = _decode(data, at)
            items.append(item)
        return items, at
    if tag == b"D":
        count, at = struct.unpack_from(">Q", data, at)[0], at + 8
        result: dict[str, Any] = {}
        previous: bytes | None = None
        for _ in range(count):
            start = at + 8
            key, at = _decode_text(data, at)
            if previous is not None and data[start:at] <= previous:
                raise InvalidRecordError("extras: keys must ascend", got=key)
            previous = data[start:at]
            result[key], at = _decode(data, at)
        return result, at
    raise InvalidRecordError("extras: unknown tag", got=tag)


def _decode_text(data: bytes, at: int) -> tuple[str, int]:
    size = struct.unpack_from(">Q", data, at)[0]
    at += 8
    if at + size > len(data):
        raise InvalidRecordError("extras: truncated string")
    return data[at : at + size].decode("utf-8"), at + size
