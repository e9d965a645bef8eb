"""Epoch arithmetic against DESIGN rule 2 token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.schemas.epochs import (
    INT64_MAX,
    Boundaries,
    admission_version,
    generation_versions,
    kv_versions,
    spans_epochs,
    staleness,
    to_boundaries,
)
from tokenplane.schemas.errors import InvalidRecordError


def last_epoch(boundaries: Boundaries, index: int) -> int:
    """The epoch of the last boundary at or before an input index."""
    found = -1
    for start, epoch in boundaries:
        if start <= index:
            found = epoch
    return found


@st.composite
def boundary_lists(draw: st.DrawFn) -> Boundaries:
    """As the engine records them: from 0, indices never falling, several at one index possible."""
    starts = [0, *sorted(draw(st.lists(st.integers(0, 40), max_size=6)))]
    epochs = st.one_of(st.integers(0, 5), st.just(INT64_MAX))
    return tuple((start, draw(epochs)) for start in starts)


@given(boundary_lists(), st.integers(1, 30), st.integers(0, 30))
def test_a_generated_token_has_the_last_boundary_before_it(
    policy: Boundaries, prompt_len: int, generated: int
) -> None:
    total = prompt_len + generated
    versions = generation_versions(policy, prompt_len, total)
    assert versions.dtype == np.int64
    assert versions.tolist() == [last_epoch(policy, i - 1) for i in range(prompt_len, total)]


@given(boundary_lists(), st.integers(0, 40))
def test_a_kv_entry_has_the_last_boundary_at_or_before_it(kv: Boundaries, length: int) -> None:
    assert kv_versions(kv, length).tolist() == [last_epoch(kv, j) for j in range(length)]


@given(boundary_lists())
def test_the_call_s_version_and_whether_it_spans(policy: Boundaries) -> None:
    assert admission_version(policy) == policy[0][1]
    assert spans_epochs(policy) == any(epoch != policy[0][1] for _, epoch in policy)
    assert to_boundaries(policy) == policy
    assert to_boundaries([list(pair) for pair in policy]) == policy


def test_the_token_at_a_boundary() -> None:
    # Four prompt tokens; the weights changed when five tokens were known, so at input index 4.
    # Token 4 came from input 3 (old weights), token 5 from input 4 (new weights).
    policy = ((0, 7), (4, 8))
    assert generation_versions(policy, 4, 7).tolist() == [7, 8, 8]
    assert kv_versions(policy, 6).tolist() == [7, 7, 7, 7, 8, 8]


def test_a_change_before_the_first_sampled_token() -> None:
    assert generation_versions(((0, 1), (3, 2)), 4, 6).tolist() == [2, 2]


def test_of_two_changes_at_one_index_the_later_counts() -> None:
    assert generation_versions(((0, 1), (4, 2), (4, 3)), 4, 6).tolist() == [1, 3]
    assert generation_versions(((0, 1), (0, 2)), 1, 2).tolist() == [2]


def test_a_change_after_the_last_token_shows_in_no_token() -> None:
    policy = ((0, 1), (9, 2))
    assert generation_versions(policy, 2, 5).tolist() == [1, 1, 1]
    assert spans_epochs(policy)


def test_nothing_generated_and_nothing_known() -> None:
    assert generation_versions(((0, 1),), 3, 3).tolist() == []
    assert kv_versions((), 3).tolist() == [-1, -1, -1]
    assert kv_versions(((0, 1),), 0).tolist() == []
    assert to_boundaries(None) == to_boundaries([]) == ()
    assert not spans_epochs(())


@pytest.mark.parametrize("call", [admission_version, lambda b: generation_versions(b, 1, 2)])
def test_no_epoch_has_its_own_code(call: Any) -> None:
    with pytest.raises(InvalidRecordError) as caught:
        call(())
    assert caught.value.code == "no_policy_epoch"


@pytest.mark.parametrize(("prompt_len", "total"), [(0, 3), (-1, 3), (4, 3)])
def test_a_call_has_a_prompt(prompt_len: int, total: int) -> None:
    with pytest.raises(InvalidRecordError):
        generation_versions(((0, 1),), prompt_len, total)


@pytest.mark.parametrize(
    "pairs",
    [
        *([[1, 5]], [[0, 1], [4, 2], [3, 3]], [[0, -1]], [[-1, 0]], [[0]], [[0, 1, 2]], [[]]),
        *([[0, True]], [[False, 1]], [[0, 1.0]], [[0, "1"]], [[0, None]], [[0, float("nan")]]),
        *([[0, float("inf")]], [[0, INT64_MAX + 1]], [[0, 2**70]], [[0, np.True_]], [None], [5]),
        *(["ab"], "ab", 5, {0: 1}, [{0, 1}], {(0, 1)}),
    ],
    ids=repr,
)
def test_other_boundaries_are_refused(pairs: Any) -> None:
    with pytest.raises(InvalidRecordError, match="kv_cache_epochs"):
        to_boundaries(pairs, name="kv_cache_epochs")


def test_numpy_integers_are_integers() -> None:
    (pair,) = to_boundaries([(np.int32(0), np.int64(3))])  # type: ignore[list-item]
    assert pair == (0, 3)
    assert [type(x) for x in pair] == [int, int]


def test_staleness_counts_versions_and_keeps_the_unknown() -> None:
    versions = np.array([-1, 3, 5, 0])
    assert staleness(versions, 5).tolist() == [-1, 2, 0, 5]
