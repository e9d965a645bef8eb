"""Rows that are laid out by hand are, byte for byte, the rows that pyarrow makes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schemas.rows import LEDGER_ROWS, STAGED_ROWS, training_rows
from tokenplane.schemas.columns import convert_row, int_list, one_row, struct
from tokenplane.schemas.errors import SchemaMismatchError
from tokenplane.schemas.row_layout import lay_out_row
from tokenplane.schemas.row_message import encode_message
from tokenplane.schemas.schema_memo import MAX_SCHEMAS, SchemaMemo


@given(row=STAGED_ROWS | training_rows() | LEDGER_ROWS)
def test_no_value_of_our_own_rows_needs_pyarrow(row: Any) -> None:
    taken: list[tuple[Any, Any]] = []

    def both(schema: pa.Schema, values: Mapping[str, Any]) -> pa.RecordBatch:
        taken.append((lay_out_row(schema, values), convert_row(schema, values)))
        return taken[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(row).__module__], "one_row", both)
        row.to_batch()
    ((laid_out, converted),) = taken
    laid_out.validate(full=True)
    assert laid_out.equals(converted, check_metadata=True)
    assert encode_message(laid_out) == encode_message(converted)


NESTED = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("seed", pa.int64()),
        pa.field("stops", int_list(pa.string()), nullable=False),
        pa.field("flag", pa.bool_()),
        pa.field("inner", struct(sha=pa.binary(3), half=pa.float32())),
    ]
)
TYPES = [
    *(pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32(), pa.float64(), pa.bool_()),
    *(pa.string(), pa.binary(), pa.binary(3), pa.binary(8)),
    *(int_list(pa.int32()), int_list(pa.uint8()), pa.list_(pa.string()), pa.list_(pa.bool_())),
    *(NESTED, int_list(NESTED), pa.list_(NESTED), int_list(int_list(pa.float64()))),
    *(pa.int16(), pa.large_string(), pa.list_(pa.date32())),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 255, 256, 2**31, 2**63, 2**64 - 1, 2**64, 1e300, -0.0, "\ud800"]),
    st.integers(),
    st.floats(),
    st.text(max_size=9),
    st.binary(max_size=9),
    st.sampled_from([bytes(3), bytes(8), np.int32(3), np.float64(1.5), np.str_("x")]),
)
MEMBERS = st.sampled_from(["name", "seed", "stops", "flag", "inner", "sha", "half", "other"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(MEMBERS, inner, max_size=6),
    ),
    max_leaves=10,
)
ARRAYS = st.sampled_from(
    [
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.int32)[::2],
        np.array([1, 2, 3], ">i4"),
        np.array([1, 255], np.uint8),
        np.array([2**40]),
        np.array([[1]], np.int32),
        np.array(5, np.int32),
        np.array([], np.float64),
        np.array([True]),
        np.array(["a"]),
        np.array(["a", None], object),
    ]
)


def fitting(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, nulls in any place; some do not fit, as nulls may not stand everywhere."""
    if pa.types.is_list(kind):
        return st.none() | st.lists(fitting(kind.value_type), max_size=3)
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries({f.name: fitting(f.type) for f in kind})
    if pa.types.is_fixed_size_binary(kind):
        return st.none() | st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    by_type = {pa.string(): st.text(max_size=9), pa.binary(): st.binary(max_size=9)}
    small = {pa.bool_(): st.booleans(), pa.uint8(): st.integers(0, 255)}
    floats = {pa.float32(): st.floats(width=32), pa.float64(): st.floats()}
    known = by_type | small | floats
    return st.none() | known.get(kind, st.integers(0, 2**31 - 1))


@settings(max_examples=300)
@given(data=st.data())
def test_any_value_gives_the_same_row_or_is_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(TYPES))
    schema = pa.schema(
        [pa.field("a", pa.string()), pa.field("b", kind), pa.field("c", pa.int64(), nullable=False)]
    )
    value = data.draw(fitting(kind) | VALUES | ARRAYS)
    made, converted = (_outcome(make, schema, value) for make in (one_row, convert_row))
    assert made == converted


def _outcome(make: Any, schema: pa.Schema, value: Any) -> bytes | str:
    try:
        batch = make(schema, {"b": value, "c": 7})
    except SchemaMismatchError as exc:
        return str(exc)
    batch.validate(full=True)
    return encode_message(batch)


def test_an_array_may_change_after_its_row_was_made() -> None:
    ids = np.array([1, 2], np.int32)
    row = one_row(pa.schema([pa.field("ids", int_list(pa.int32()))]), {"ids": ids})
    ids[0] = 9
    assert row.to_pylist() == [{"ids": [1, 2]}]


def test_what_is_remembered_is_bounded_and_is_of_this_very_schema() -> None:
    computed = []

    def names(schema: pa.Schema) -> list[str]:
        computed.append(schema)
        return list(schema.names)

    memo = SchemaMemo(names)
    kinds = [
        pa.schema([pa.field("x", pa.int32())]),
        pa.schema([pa.field("x", pa.int64())]),
        pa.schema([pa.field("x", pa.int32(), nullable=False)]),
        pa.schema([pa.field("x", pa.int32())], metadata={"a": "b"}),
        pa.schema([pa.field("x", pa.int32(), metadata={"a": "b"})]),
    ]
    for _ in range(2):
        assert [memo(kind) for kind in kinds] == [["x"]] * len(kinds)
        assert computed == kinds
    for number in range(MAX_SCHEMAS + 9):
        assert memo(pa.schema([pa.field(f"y{number}", pa.int32())])) == [f"y{number}"]
    assert sum(map(len, memo._known.values())) <= MAX_SCHEMAS
