"""The typed extras encoding: canonical, exact, and the only inverse of itself."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schemas.stable_ids import stable_repr
from tests.schemas.strategies import EXTRA_VALUES
from tokenplane.schemas.digests import ABSENT_EXTRAS_DIGEST, extras_digest
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.extras import decode_extra, encode_extra


def exact(value: Any) -> Any:
    """A form in which 1, 1.0, True, -0.0 and the order of keys all differ."""
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, list):
        return [exact(item) for item in value]
    if isinstance(value, dict):
        return [(key, exact(item)) for key, item in value.items()]
    return (type(value).__name__, value)


def by_utf8(value: Any) -> Any:
    if isinstance(value, list):
        return [by_utf8(item) for item in value]
    if isinstance(value, dict):
        return {key: by_utf8(value[key]) for key in sorted(value, key=str.encode)}
    return value


@given(EXTRA_VALUES)
def test_decode_is_the_exact_inverse(value: Any) -> None:
    assert exact(decode_extra(encode_extra(value))) == exact(by_utf8(value))


@given(st.dictionaries(st.text("aé🙂\ue000", max_size=3), st.integers(0, 9), max_size=5), st.data())
def test_the_order_of_keys_does_not_matter(value: dict[str, int], data: st.DataObject) -> None:
    shuffled = dict(data.draw(st.permutations(list(value.items()))))
    assert encode_extra(shuffled) == encode_extra(value)


@given(EXTRA_VALUES, st.data())
def test_what_decodes_is_what_would_be_encoded(value: Any, data: st.DataObject) -> None:
    message = bytearray(encode_extra(value))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    try:
        changed = decode_extra(bytes(message))
    except InvalidRecordError:
        return
    assert encode_extra(changed) == bytes(message)


@given(EXTRA_VALUES)
def test_every_shorter_or_longer_message_is_refused(value: Any) -> None:
    message = encode_extra(value)
    for end in range(len(message)):
        with pytest.raises(InvalidRecordError):
            decode_extra(message[:end])
    with pytest.raises(InvalidRecordError, match="trailing"):
        decode_extra(message + b"N")


def test_the_layout_is_the_contract_s() -> None:
    value = {"b": [True, None, -1], "a": "é", "c": 1.0}
    assert encode_extra(value) == b"".join(
        [
            *(b"D", struct.pack(">Q", 3)),
            *(struct.pack(">Q", 1), b"a", b"S", struct.pack(">Q", 2), b"\xc3\xa9"),
            *(struct.pack(">Q", 1), b"b", b"L", struct.pack(">Q", 3)),
            *(b"B\x01", b"N", b"I", struct.pack(">q", -1)),
            *(struct.pack(">Q", 1), b"c", b"F", struct.pack(">d", 1.0)),
        ]
    )


@pytest.mark.parametrize(
    "value",
    [
        *((1, 2), b"x", {1}, {1: "a"}, 2**63, -(2**63) - 1, math.nan, math.inf, -math.inf),
        *("\ud800", {"\ud800": 1}, [object()], {"a": [b""]}),
    ],
    ids=stable_repr,
)
def test_what_has_no_encoding_is_refused(value: object) -> None:
    with pytest.raises(InvalidRecordError):
        encode_extra(value)
    with pytest.raises(InvalidRecordError):
        extras_digest({"value": value})


@pytest.mark.parametrize("value", [[], [1], "text", 1, True, ()], ids=stable_repr)
def test_extras_are_an_object_or_null(value: Any) -> None:
    with pytest.raises(InvalidRecordError, match="object or null"):
        extras_digest(value)


def key(name: bytes) -> bytes:
    return struct.pack(">Q", len(name)) + name + b"N"


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"X", b"B\x02", b"F\x7f\xf8" + bytes(6), b"F\x7f\xf0" + bytes(6)),
        b"S" + struct.pack(">Q", 1) + b"\xff",
        b"S" + struct.pack(">Q", 2**64 - 1),
        b"L" + struct.pack(">Q", 2**64 - 1),
        b"D" + struct.pack(">Q", 2) + key(b"b") + key(b"a"),
        b"D" + struct.pack(">Q", 2) + key(b"a") + key(b"a"),
    ],
    ids=stable_repr,
)
def test_malformed_or_not_canonical_bytes_are_refused(message: bytes) -> None:
    with pytest.raises(InvalidRecordError):
        decode_extra(message)


def test_endless_nesting_is_a_coded_error_both_ways() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRecordError, match="deep"):
        encode_extra(deep)
    with pytest.raises(InvalidRecordError):
        decode_extra((b"L" + struct.pack(">Q", 1)) * 100_000 + b"N")


def test_absent_empty_and_typed_values_differ() -> None:
    values: list[dict[str, Any] | None] = [
        *(None, {}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}, {"a": []}),
        *({"a": {}}, {"a": 0.0}, {"a": -0.0}),
    ]
    assert len({extras_digest(value) for value in values}) == len(values)
    assert extras_digest(None) == ABSENT_EXTRAS_DIGEST
    assert (
        ABSENT_EXTRAS_DIGEST == "a1edc33c107616cf344faf0103daa025cfb125f8e1c784ae5f6a49faf2b768b6"
    )
