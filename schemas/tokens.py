"""Token columns as arrays: the only way in from lists and numpy, with range and type checks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenplane.schemas.errors import InvalidRecordError, TokenIdRangeError

type Int32Array = NDArray[np.int32]
type UInt8Array = NDArray[np.uint8]
type Float32Array = NDArray[np.float32]

INT32_MAX = 2**31 - 1


def frozen[T: np.generic](array: NDArray[T]) -> NDArray[T]:
    """The same array (contiguous), marked read-only."""
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array


def to_token_ids(
    ids: Sequence[int] | NDArray[np.integer], *, name: str = "token_ids"
) -> Int32Array:
    """int32[T], read-only, C-contiguous.

    A read-only int32 array comes back as it is (no copy); any other array or sequence is copied,
    so the result never shares memory with something that a caller may still write to.

    Raises:
        InvalidRecordError: not one-dimensional, or an element is not a true integer
            (booleans, floats and numeric strings are refused, CONTRACT section 5).
        TokenIdRangeError: an id is negative or above 2**31 - 1.
    """
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1:
            raise InvalidRecordError(f"{name} must be one-dimensional", got=f"shape {ids.shape}")
        if ids.dtype.kind not in "iu":
            raise InvalidRecordError(f"{name} must hold integers", got=str(ids.dtype))
        if ids.dtype == np.int32 and ids.dtype.isnative:
            if ids.size and int(ids.min()) < 0:
                raise _out_of_range(name, int(ids.min()))
            if not ids.flags.writeable and ids.flags.c_contiguous:
                return ids.view(np.int32)
            return frozen(ids.astype(np.int32))
        wide = ids
    else:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise InvalidRecordError(
                f"{name} must be a sequence of integers", got=type(ids).__name__
            )
        if not set(map(type, ids)) <= {int}:
            bad = next(x for x in ids if type(x) is not int)
            raise InvalidRecordError(f"{name} must hold true integers", got=repr(bad))
        if len(ids) and (min(ids) < 0 or max(ids) > INT32_MAX):
            raise _out_of_range(name, min(ids) if min(ids) < 0 else max(ids))
        return frozen(np.array(ids, dtype=np.int32))
    if wide.size:
        low, high = int(wide.min()), int(wide.max())
        if low < 0 or high > INT32_MAX:
            raise _out_of_range(name, low if low < 0 else high)
    return frozen(wide.astype(np.int32))


def _out_of_range(name: str, value: int) -> TokenIdRangeError:
    return TokenIdRangeError(
        f"{name}: token id out of range", expected=f"0..{INT32_MAX}", got=value
    )


def to_log_probs(
    values: Sequence[float] | NDArray[np.floating], *, name: str = "log_probs"
) -> Float32Array:
    """float32[T], read-only, natural log. binary64 rounds to nearest-even.

    Raises:
        InvalidRecordError: not one-dimensional; an element is not floating-point typed
            (CONTRACT section 2: an integer ``0`` is an error); NaN, infinite or beyond binary32.
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise InvalidRecordError(f"{name} must be one-dimensional", got=f"shape {values.shape}")
        if values.dtype.kind != "f":
            raise InvalidRecordError(f"{name} must be floating point", got=str(values.dtype))
        if values.dtype == np.float32 and values.dtype.isnative:
            out = values
            if values.flags.writeable or not values.flags.c_contiguous:
                out = values.copy()
        else:
            out = _narrow(values)
    else:
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise InvalidRecordError(
                f"{name} must be a sequence of floats", got=type(values).__name__
            )
        if not set(map(type, values)) <= {float}:
            bad = next(x for x in values if type(x) is not float)
            raise InvalidRecordError(f"{name} must hold floats", got=repr(bad))
        out = _narrow(np.array(values, dtype=np.float64))
    if not np.isfinite(out).all():
        at = int(np.flatnonzero(~np.isfinite(out))[0])
        raise InvalidRecordError(f"{name} must be finite in binary32", got=f"{values[at]} at {at}")
    return frozen(out)


def _narrow(values: NDArray[np.floating]) -> Float32Array:
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float32)


def to_mask(
    values: Sequence[float] | NDArray[np.generic], *, name: str = "token_mask"
) -> UInt8Array:
    """uint8[T] of 0 and 1, read-only (1 = sampled by the engine).

    Raises:
        InvalidRecordError: an element is neither 0 nor 1.
    """
    try:
        array = np.asarray(values)
    except ValueError as exc:  # ragged
        raise InvalidRecordError(f"{name} must be one-dimensional numbers") from exc
    if array.ndim != 1 or (array.dtype.kind not in "iufb" and array.size):
        raise InvalidRecordError(f"{name} must be one-dimensional numbers", got=str(array.dtype))
    if array.dtype == np.uint8 and not array.flags.writeable and array.flags.c_contiguous:
        if array.size and int(array.max()) > 1:
            raise InvalidRecordError(f"{name} must be 0 or 1", got=int(array.max()))
        return array
    if not np.logical_or(array == 0, array == 1).all():
        raise InvalidRecordError(f"{name} must be 0 or 1")
    return frozen(array.astype(np.uint8))


def join[T: np.generic](parts: Sequence[NDArray[T]], dtype: type[T]) -> NDArray[T]:
    """The parts as one read-only array; no copy when there is exactly one read-only part.

    Raises:
        TypeError: a part's dtype holds values that ``dtype`` may not.
    """
    if len(parts) == 1 and parts[0].dtype == dtype and not parts[0].flags.writeable:
        return parts[0]
    return frozen(np.concatenate([*parts, np.empty(0, dtype)], dtype=dtype, casting="safe"))


def first_difference(left: Int32Array, right: Int32Array) -> int | None:
    """Index of the first position where the arrays differ (a shorter one differs at its end).

    ``None`` if they are equal.
    """
    n = min(len(left), len(right))
    unequal = left[:n] != right[:n]
    at = int(np.argmax(unequal)) if n else 0
    if n and unequal[at]:
        return at
    return None if len(left) == len(right) else n
