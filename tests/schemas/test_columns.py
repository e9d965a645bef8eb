"""One-row batches: what a column takes, what it refuses, and views without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tokenplane.schemas.columns import Column, int_list, list_value, one_row, render_schema, struct
from tokenplane.schemas.errors import SchemaMismatchError

PAIR = struct(token_index=pa.int64(), epoch=pa.int64())
SCHEMA = render_schema(
    "x",
    1,
    (
        Column("ids", int_list(pa.int32()), "ids"),
        Column("name", pa.string(), "name"),
        Column("maybe", pa.binary(4), "maybe", nullable=True),
        Column("pairs", int_list(PAIR), "pairs", nullable=True),
        Column("logs", int_list(pa.float32()), "logs", nullable=True),
        Column("mask", int_list(pa.uint8()), "mask", nullable=True),
        Column("version", pa.uint64(), "version", nullable=True),
    ),
)
GOOD: dict[str, Any] = {"ids": np.array([1, 2], np.int32), "name": "é"}


@pytest.mark.parametrize("length", [2, 2**18, 2**18 + 1])
def test_arrays_come_back_and_big_ones_are_not_copied(length: int) -> None:
    given = np.arange(length, dtype=np.int32)
    batch = one_row(SCHEMA, {**GOOD, "ids": given, "logs": np.array([], np.float32)})
    ids = list_value(batch, "ids")
    assert np.array_equal(ids, given)
    assert ids.dtype == np.int32
    assert not ids.flags.writeable
    assert np.shares_memory(ids, given) == (given.nbytes > 2**20)
    empty = list_value(batch, "logs")
    assert (empty.dtype, empty.shape, empty.flags.writeable) == (np.float32, (0,), False)
    batch.validate(full=True)


def test_a_row_of_a_longer_or_sliced_batch() -> None:
    rows = [one_row(SCHEMA, {**GOOD, "ids": np.arange(n, dtype=np.int32)}) for n in range(4)]
    (batch,) = pa.Table.from_batches(rows).combine_chunks().to_batches()
    for at in range(4):
        assert list_value(batch, "ids", at).tolist() == list(range(at))
        assert list_value(batch.slice(at), "ids").tolist() == list(range(at))


def test_lists_and_nulls() -> None:
    pairs = [{"token_index": 0, "epoch": 7}]
    values = {**GOOD, "ids": [], "pairs": pairs, "version": 2**64 - 1, "maybe": None}
    (row,) = one_row(SCHEMA, values).to_pylist()
    assert row == {**values, "logs": None, "mask": None}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"name": None}, "name"),
        ({"ids": None}, "ids"),
        ({"nothing": 1}, None),
        ({"name": 5}, None),
        ({"name": "\ud800"}, None),
        ({"ids": np.array([2**40])}, None),
        ({"ids": np.array([1.5])}, None),
        ({"ids": np.array([[1]], np.int32)}, None),
        ({"ids": [1, None]}, None),
        ({"ids": ["1"]}, None),
        ({"ids": 5}, None),
        ({"name": np.array([1])}, None),
        ({"mask": np.array([256])}, None),
        ({"mask": np.array([-1])}, None),
        ({"mask": np.array([0.5])}, None),
        ({"maybe": b"12345"}, None),
        ({"version": 2**64}, None),
        ({"version": -1}, None),
        ({"pairs": [{"token_index": 0}]}, None),
        ({"pairs": [{"token_index": 0, "epoch": 2**63}]}, None),
    ],
    ids=repr,
)
def test_what_a_column_refuses(change: dict[str, Any], key: str | None) -> None:
    one_row(SCHEMA, GOOD)
    with pytest.raises(SchemaMismatchError) as caught:
        one_row(SCHEMA, {**GOOD, **change})
    assert key is None or caught.value.key == key
