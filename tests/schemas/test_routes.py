"""The routed-experts envelope: exact both ways, strict about everything else."""

from __future__ import annotations

import base64
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.routes import (
    RouteDtype,
    classify_route_span,
    decode_routes,
    encode_routes,
    route_shape,
)

DTYPES: tuple[RouteDtype, ...] = get_args(RouteDtype)


@given(st.data(), st.sampled_from(DTYPES), st.tuples(*[st.integers(1, 4)] * 3))
def test_decoding_is_the_inverse(
    data: st.DataObject, dtype: RouteDtype, shape: tuple[int, int, int]
) -> None:
    routes = data.draw(hnp.arrays(np.dtype(dtype), shape))
    envelope = encode_routes(routes, dtype)
    assert route_shape(envelope) == (dtype, shape)
    for form in (routes.tolist(), routes.astype(">i8"), np.asfortranarray(routes)):
        assert encode_routes(form, dtype) == envelope
    for decoded in (decode_routes(envelope), decode_routes(routes.tolist())):
        assert decoded.shape == shape
        assert (decoded == routes).all()


def test_the_layout_is_token_layer_expert_little_endian() -> None:
    routes = [[[1, -1], [2, 3]]]
    head, body = encode_routes(routes).rsplit(":", 1)
    assert head == "nrlre1:int16:1x2x2"
    assert base64.b64decode(body) == b"\x01\x00\xff\xff\x02\x00\x03\x00"


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 7), ("int16", 15), ("int32", 31)])
def test_a_value_that_does_not_fit_is_refused(dtype: RouteDtype, bits: int) -> None:
    low, high = -(2**bits), 2**bits - 1
    assert decode_routes(encode_routes([[[low, high]]], dtype)).tolist() == [[[low, high]]]
    for value in (low - 1, high + 1, 2**70):
        with pytest.raises(InvalidRecordError):
            encode_routes([[[0, value]]], dtype)


BAD_NESTED: list[Any] = [
    *([], [[]], [[[]]], [1], [[1]], [[[1.0]]], [[[True]]], [[["1"]]], [[[None]]], None, 5, "x"),
    *([[[1], [2]], [[3]]], [[[1, 2], [3]]], [[[1]], []], [[[1]], 2], [[[1], 2]], [[[[1]]]]),
    *([[[1]], [[2], [3]]], [[[1], []]], ([[1]],), [([1],)], [[(1,)]]),
]


@pytest.mark.parametrize("routes", BAD_NESTED, ids=repr)
def test_nested_lists_must_be_rectangular_integers(routes: Any) -> None:
    with pytest.raises(InvalidRecordError):
        encode_routes(routes)
    with pytest.raises(InvalidRecordError):
        decode_routes(routes)


@pytest.mark.parametrize(
    "routes",
    [np.zeros((1, 1)), np.zeros((1, 1, 1)), np.zeros((1, 0, 1), int), np.zeros((1, 1, 1), bool)],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_must_be_three_dimensional_integers(routes: Any) -> None:
    with pytest.raises(InvalidRecordError):
        encode_routes(routes)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "", None], ids=repr)
def test_only_three_dtypes(dtype: Any) -> None:
    with pytest.raises(InvalidRecordError):
        encode_routes([[[1]]], dtype)


HUGE = f"{2**32}x{2**32}x1"
"""A product that wraps to 0 in 64 bits and so would match an empty body."""
BAD_HEADERS = [
    *("", "nrlre1", "nrlre1:int16:1x1x1", "nrlre2:int16:1x1x1:AAA=", "NRLRE1:int16:1x1x1:AAA="),
    *("nrlre1:int64:1x1x1:AAA=", "nrlre1::1x1x1:AAA=", " nrlre1:int16:1x1x1:AAA="),
    *(
        f"nrlre1:int16:{shape}:AAA="
        for shape in ("", "1x1", "1x1x1x1", "0x1x1", "-1x1x1", "1x1xa", "1.0x1x1", "²x1x1")
    ),
    f"nrlre1:int16:{'9' * 5000}x1x1:AAA=",
]
BAD_BODIES = [
    *("", "AA==", "AAAA", "AAAAAAA=", "AAA", "AA A=", "AAA=\n", "A-_=", "ééé=", "AAA=:x", "*AA="),
]


@pytest.mark.parametrize("envelope", BAD_HEADERS, ids=lambda e: repr(e)[:40])
def test_a_malformed_header_is_refused(envelope: str) -> None:
    with pytest.raises(InvalidRecordError):
        route_shape(envelope)
    with pytest.raises(InvalidRecordError):
        decode_routes(envelope)


@pytest.mark.parametrize("body", BAD_BODIES, ids=repr)
def test_a_malformed_body_is_refused(body: str) -> None:
    assert decode_routes("nrlre1:int16:1x1x1:AAA=").tolist() == [[[0]]]
    with pytest.raises(InvalidRecordError):
        decode_routes(f"nrlre1:int16:1x1x1:{body}")


def test_a_shape_whose_product_overflows_is_refused() -> None:
    with pytest.raises(InvalidRecordError, match="length"):
        decode_routes(f"nrlre1:int8:{HUGE}:")


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 14))
def test_route_spans(carry: int, generation: int, staged: int) -> None:
    got = classify_route_span(carry, generation, staged)
    if staged == 0:
        assert got == "sentinel"
    elif staged == carry + generation:
        assert got == "full"
    else:
        assert got == ("tail" if 0 < generation <= staged else "sentinel")


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None], ids=repr)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_route_spans_take_true_lengths(bad: Any, at: int) -> None:
    lengths: list[Any] = [1, 1, 1]
    lengths[at] = bad
    with pytest.raises(InvalidRecordError):
        classify_route_span(*lengths)
