"""The routed-experts text envelope and the classification of route spans (CONTRACT section 8)."""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokenplane.schemas.errors import InvalidRecordError

MAGIC = "nrlre1"
_DTYPES = {"int8": "<i1", "int16": "<i2", "int32": "<i4"}
RouteDtype = Literal["int8", "int16", "int32"]


def encode_routes(routes: NDArray[np.integer] | list[Any], dtype: RouteDtype = "int16") -> str:
    """``nrlre1:<dtype>:<T>x<L>x<K>:<base64>`` of an integer array [T, L, K]; −1 = unknown route.

    Raises:
        InvalidRecordError: unknown dtype, not a non-empty rectangular [T][L][K] of true integers,
            or a value that the dtype cannot hold.
    """
    if dtype not in _DTYPES:
        raise InvalidRecordError("route dtype", expected="int8, int16 or int32", got=dtype)
    array = routes if isinstance(routes, np.ndarray) else _from_nested(routes)
    if array.ndim != 3 or 0 in array.shape or array.dtype.kind not in "iu":
        raise InvalidRecordError(
            "routes must be integers [T, L, K]", got=f"{array.dtype}{array.shape}"
        )
    limits = np.iinfo(dtype)
    if int(array.min()) < limits.min or int(array.max()) > limits.max:
        raise InvalidRecordError(f"a route does not fit {dtype}", got=int(array.max()))
    body = base64.b64encode(array.astype(_DTYPES[dtype]).tobytes()).decode("ascii")
    return f"{MAGIC}:{dtype}:{'x'.join(map(str, array.shape))}:{body}"


def route_shape(envelope: str) -> tuple[str, tuple[int, int, int]]:
    """dtype and (T, L, K) from the header alone.

    Raises:
        InvalidRecordError: not an envelope.
    """
    parts = envelope.split(":", 3) if isinstance(envelope, str) else []
    if len(parts) != 4 or parts[0] != MAGIC or parts[1] not in _DTYPES:
        raise InvalidRecordError("not a routed-experts envelope", got=repr(envelope)[:80])
    sizes = parts[2].split("x")
    if len(sizes) != 3 or not all(_is_size(s) for s in sizes):
        raise InvalidRecordError("envelope shape", expected="TxLxK, all positive", got=parts[2])
    t, layers, k = map(int, sizes)
    return parts[1], (t, layers, k)


def _is_size(text: str) -> bool:
    """A positive count that fits 63 bits (beyond, neither an array nor int() would take it)."""
    return text.isascii() and text.isdigit() and len(text) <= 18 and int(text) > 0


def decode_routes(envelope: str | list[Any]) -> NDArray[np.integer]:
    """Integer array [T, L, K] from an envelope, or from the legacy nested JSON array (as int64).

    Raises:
        InvalidRecordError: malformed header, alphabet, padding or length.
    """
    if isinstance(envelope, list):
        return _from_nested(envelope)
    dtype, shape = route_shape(envelope)
    try:
        body = base64.b64decode(envelope.split(":", 3)[3], validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRecordError("envelope body is not base64") from exc
    expected = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if len(body) != expected:
        raise InvalidRecordError("envelope body length", expected=expected, got=len(body))
    return np.frombuffer(body, _DTYPES[dtype]).reshape(shape)


def _from_nested(routes: object) -> NDArray[np.int64]:
    layers = routes if isinstance(routes, list) else []
    flat = [row for token in layers if isinstance(token, list) for row in token]
    values = [x for row in flat if isinstance(row, list) for x in row]
    if not values or not set(map(type, values)) <= {int}:
        raise InvalidRecordError("routes must be a non-empty [T][L][K] of true integers")
    try:
        array = np.array(routes, dtype=np.int64)
    except (ValueError, OverflowError) as exc:
        raise InvalidRecordError("routes must be rectangular [T][L][K]") from exc
    if array.ndim != 3:
        raise InvalidRecordError("routes must be rectangular [T][L][K]", got=array.shape)
    return array


def classify_route_span(
    carry_len: int, generation_len: int, staged_route_len: int
) -> Literal["full", "tail", "sentinel"]:
    """How much of a call's delta the staged routes cover.

    ``full``: every delta token; ``tail``: use the last ``generation_len`` rows; ``sentinel``: none,
    fill with −1.

    Raises:
        InvalidRecordError: an argument is not a non-negative true integer.
    """
    for value in (carry_len, generation_len, staged_route_len):
        if type(value) is not int or value < 0:
            raise InvalidRecordError("route span lengths must be integers >= 0", got=repr(value))
    if 0 < staged_route_len == carry_len + generation_len:
        return "full"
    if staged_route_len > 0 and 0 < generation_len <= staged_route_len:
        return "tail"
    return "sentinel"
