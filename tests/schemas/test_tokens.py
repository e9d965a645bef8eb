"""The way into token arrays: types, ranges, bit patterns, and who owns the memory."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schemas.stable_ids import stable_repr
from tests.schemas.strategies import FLOAT32_MAX, LOG_PROBS, TOKEN_IDS
from tokenplane.schemas.errors import InvalidRecordError, TokenIdRangeError
from tokenplane.schemas.tokens import (
    INT32_MAX,
    first_difference,
    join,
    to_log_probs,
    to_mask,
    to_token_ids,
)


def handed_over(array: np.ndarray, dtype: type) -> bool:
    return array.dtype == dtype and not array.flags.writeable and array.flags.c_contiguous


@given(st.lists(TOKEN_IDS, max_size=30), st.sampled_from(["<i4", ">i4", "<i8", ">u8", "<u4"]))
def test_lists_and_arrays_of_any_integer_type_give_the_same_ids(ids: list[int], kind: str) -> None:
    for given_ids in (ids, tuple(ids), np.array(ids, kind), np.array(ids * 2, kind)[: len(ids)]):
        result = to_token_ids(given_ids)
        assert handed_over(result, np.int32)
        assert result.tolist() == ids


def test_a_read_only_array_is_taken_and_a_writable_one_is_copied() -> None:
    mine = np.array([1, 2, 3], np.int32)
    copied = to_token_ids(mine)
    mine[0] = 9
    assert copied.tolist() == [1, 2, 3]
    assert np.shares_memory(to_token_ids(copied), copied)
    strided = copied[::2]
    assert not np.shares_memory(to_token_ids(strided), copied)
    assert to_token_ids(strided).tolist() == [1, 3]
    logs = np.array([-1.0, -2.0], np.float32)
    kept = to_log_probs(logs)
    logs[0] = 0
    assert kept.tolist() == [-1.0, -2.0]
    assert np.shares_memory(to_log_probs(kept), kept)
    ones = np.array([0, 1], np.uint8)
    mask = to_mask(ones)
    ones[0] = 1
    assert mask.tolist() == [0, 1]
    assert np.shares_memory(to_mask(mask), mask)


@pytest.mark.parametrize(
    "ids",
    [
        *([True], [1.0], ["1"], [None], [np.int32(1)], [[1]], "12", b"12", {1}, 5, None),
        *(np.array([True]), np.array([1.0]), np.array([[1]]), np.array(["1"]), iter([1])),
    ],
    ids=stable_repr,
)
def test_what_is_no_true_integer_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidRecordError):
        to_token_ids(ids)


@pytest.mark.parametrize("bad", [-1, INT32_MAX + 1, 2**32, 2**63, 2**64 - 1, 2**70])
def test_an_id_out_of_range_has_its_own_code(bad: int) -> None:
    with pytest.raises(TokenIdRangeError, match=str(bad)) as caught:
        to_token_ids([0, bad, 1])
    assert caught.value.code == "token_id_out_of_range"
    for kind in (np.int32, np.int64, np.uint64):
        limits = np.iinfo(kind)
        if limits.min <= bad <= limits.max:
            with pytest.raises(TokenIdRangeError, match=str(bad)):
                to_token_ids(np.array([0, bad, 1], kind))


@given(st.lists(LOG_PROBS, max_size=20))
def test_log_probs_round_like_binary32_and_keep_the_sign_of_zero(values: list[float]) -> None:
    expected = b"".join(struct.pack("<f", value) for value in values)
    for given_values in (values, np.array(values, np.float64), np.array(values, ">f8")):
        result = to_log_probs(given_values)
        assert handed_over(result, np.float32)
        assert result.astype("<f4").tobytes() == expected


JUST_TOO_BIG = (FLOAT32_MAX + 2.0**128) / 2
"""Half a step above the largest binary32: rounds to even, which is infinity."""


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e39, JUST_TOO_BIG, -JUST_TOO_BIG], ids=stable_repr
)
def test_what_is_not_finite_in_binary32_is_refused(value: float) -> None:
    for values in ([0.0, value], np.array([0.0, value])):
        with pytest.raises(InvalidRecordError, match="finite"):
            to_log_probs(values)
    assert to_log_probs([math.nextafter(JUST_TOO_BIG, 0)]).tolist() == [FLOAT32_MAX]


@pytest.mark.parametrize(
    "values",
    [
        *([0], [True], ["0.5"], [None], [np.float32(1)], "0.5", 0.5, None),
        *(np.array([1]), np.array([[0.5]]), np.array([True]), np.array(["0.5"])),
    ],
    ids=stable_repr,
)
def test_what_is_no_float_is_refused(values: Any) -> None:
    with pytest.raises(InvalidRecordError):
        to_log_probs(values)


@pytest.mark.parametrize(
    "values",
    [[0, 1], [0.0, 1.0], [False, True], [-0.0, 1.0], np.array([0, 1], ">i8"), np.array([0.0, 1.0])],
    ids=stable_repr,
)
def test_masks(values: Any) -> None:
    mask = to_mask(values)
    assert handed_over(mask, np.uint8)
    assert mask.tolist() == [0, 1]
    assert handed_over(to_mask([]), np.uint8)


@pytest.mark.parametrize(
    "values",
    [
        *([2], [0.5], [math.nan], [-1], ["1"], [None], [[0, 1]], [[1], [0, 1]], [2**70], 1, "01"),
        np.array([0, 2], np.uint8),
    ],
    ids=stable_repr,
)
def test_a_mask_is_0_or_1(values: Any) -> None:
    with pytest.raises(InvalidRecordError):
        to_mask(values)


def test_a_read_only_byte_mask_is_checked_too() -> None:
    mask = np.array([0, 3], np.uint8)
    mask.setflags(write=False)
    with pytest.raises(InvalidRecordError, match="0 or 1"):
        to_mask(mask)


@given(st.lists(st.lists(TOKEN_IDS, max_size=4), max_size=4))
def test_join_is_concatenation(parts: list[list[int]]) -> None:
    joined = join([to_token_ids(part) for part in parts], np.int32)
    assert handed_over(joined, np.int32)
    assert joined.tolist() == [token for part in parts for token in part]


def test_join_copies_nothing_for_one_part_and_never_wraps() -> None:
    part = to_token_ids([1, 2])
    assert join([part], np.int32) is part
    writable = np.array([1, 2], np.int32)
    assert not np.shares_memory(join([writable], np.int32), writable)
    wide: Any = np.array([2**40])
    with pytest.raises(TypeError):
        join([part, wide], np.int32)


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=5))
def test_first_difference_is_the_naive_one(left: list[int], right: list[int]) -> None:
    naive = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if naive is None and len(left) != len(right):
        naive = min(len(left), len(right))
    assert first_difference(to_token_ids(left), to_token_ids(right)) == naive
