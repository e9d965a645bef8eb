"""The token-only splice: renders of ids, without messages, against what counting would do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.capture.splice import splice_by_tokens
from tokenplane.schemas.errors import SpliceError

END, START, NEWLINE, ASSISTANT, USER, OTHER_END = 1, 2, 3, 4, 5, 6
OPEN, CLOSE = 7, 8
ENDS = {END, OTHER_END}

CODES = {
    "boundary_not_proven",
    "turns_differ",
    "nothing_new",
    "header_terminator_mismatch",
}

words = st.lists(st.integers(20, 60), min_size=1, max_size=8)


def user(text: Sequence[int]) -> list[int]:
    return [START, USER, NEWLINE, *text, END, NEWLINE]


def turn(text: Sequence[int]) -> list[int]:
    return [START, ASSISTANT, NEWLINE, *text, END, NEWLINE]


HEADER = [START, ASSISTANT, NEWLINE]


def code_of(*args: Sequence[int] | set[int]) -> str:
    with pytest.raises(SpliceError) as caught:
        splice_by_tokens(*args)  # type: ignore[arg-type]
    return caught.value.code


def test_nothing_staged_leaves_the_render_as_it_is() -> None:
    prompt = splice_by_tokens([9, 8, 7], [], [], ENDS)
    assert prompt.tolist() == [9, 8, 7]
    assert prompt.dtype == np.int32


@given(ask=words, answer=words, sampled=words, more=words, end=st.sampled_from([END, OTHER_END, 0]))
def test_a_render_that_only_grows(
    ask: list[int], answer: list[int], sampled: list[int], more: list[int], end: int
) -> None:
    history = [*user(ask), *turn(answer)]
    rendered = [*history, *user(more), *HEADER]
    staged = [*user(ask), *HEADER, *sampled, *([end] if end else [])]
    prompt = splice_by_tokens(rendered, history, staged, ENDS)
    inserted = [] if end else [END]
    assert prompt.tolist() == [*staged, *inserted, NEWLINE, *user(more), *HEADER]
    assert not prompt.flags.writeable


@given(ask=words, thought=words, answer=words, more=words, ask2=words, thought2=words)
def test_reasoning_that_is_taken_away_later(
    ask: list[int],
    thought: list[int],
    answer: list[int],
    more: list[int],
    ask2: list[int],
    thought2: list[int],
) -> None:
    def thinking(text: list[int]) -> list[int]:
        return turn([OPEN, *text, CLOSE, *answer])

    history = [*user(ask), *thinking(thought), *user(ask2), *thinking(thought2)]
    rendered = [*user(ask), *turn(answer), *user(ask2), *turn(answer), *user(more), *HEADER]
    staged = [*history[:-2], END]
    prompt = splice_by_tokens(rendered, history, staged, ENDS)
    assert prompt.tolist() == [*staged, NEWLINE, *user(more), *HEADER]


def test_a_terminator_inside_reasoning_that_is_taken_away_is_refused() -> None:
    """Counting terminators takes the new user message for the end of the answer and drops it."""
    history = [*user([30]), *turn([OPEN, 40, END, 41, CLOSE, 50])]
    rendered = [*user([30]), *turn([50]), *user([31]), *HEADER]
    assert code_of(rendered, history, [*history[:-1]], ENDS) == "turns_differ"


def test_a_terminator_inside_a_text_that_stays_is_no_obstacle() -> None:
    history = [*user([30, END, 31]), *turn([40, END, 41])]
    rendered = [*history, *user([32, END]), *HEADER]
    prompt = splice_by_tokens(rendered, history, history[:-1], ENDS)
    assert prompt.tolist() == rendered


def test_the_models_own_terminator_is_kept() -> None:
    history = [*user([30]), *turn([40])]
    rendered = [*history, *user([31]), *HEADER]
    staged = [*user([30]), *HEADER, 40, OTHER_END]
    prompt = splice_by_tokens(rendered, history, staged, ENDS)
    assert prompt[: len(staged)].tolist() == staged
    assert prompt[len(staged) :].tolist() == [NEWLINE, *user([31]), *HEADER]


def test_a_terminator_that_is_the_next_header() -> None:
    """GLM's form: counting would start the suffix at the first user message again."""
    user_id, assistant_id, tool_id = 11, 12, 13
    history = [user_id, 30, assistant_id, 40]
    rendered = [*history, user_id, 31, assistant_id]
    ends = {user_id, tool_id}
    prompt = splice_by_tokens(rendered, history, [*history, user_id], ends)
    assert prompt.tolist() == rendered
    assert splice_by_tokens(rendered, history, history, ends).tolist() == rendered
    assert code_of(rendered, history, [*history, tool_id], ends) == "header_terminator_mismatch"


@pytest.mark.parametrize(
    ("rendered", "history", "code"),
    [
        # no terminator in the history, and none behind it
        ([30, 40, 31], [30, 40], "boundary_not_proven"),
        # what follows the last terminator is an answer, not a separator
        ([30, END, 40, 41, 42, 43, 44, 31], [30, END, 40, 41, 42, 43, 44], "boundary_not_proven"),
        ([30, END, 40, 31], [30, END, 40], "boundary_not_proven"),
        # an earlier message is printed differently
        (
            [*user([99]), *turn([40]), *user([31]), *HEADER],
            [*user([30]), *turn([40])],
            "turns_differ",
        ),
        # a turn has gone
        ([*turn([40]), *HEADER], [*user([30]), *turn([40])], "turns_differ"),
        # nothing follows
        ([*user([30]), *turn([40])][:-1], [*user([30]), *turn([40])][:-1], "nothing_new"),
    ],
)
def test_what_ids_cannot_prove_is_refused(
    rendered: list[int], history: list[int], code: str
) -> None:
    assert code_of(rendered, history, [30, END], ENDS) == code


@given(
    st.lists(st.integers(0, 4), max_size=14),
    st.lists(st.integers(0, 4), max_size=10),
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
)
def test_any_ids_give_the_prefix_and_an_end_of_the_render_or_a_code(
    rendered: list[int], history: list[int], staged: list[int]
) -> None:
    ends = {1, 2}
    code, prompt = "", np.empty(0, np.int32)
    try:
        prompt = splice_by_tokens(rendered, history, staged, ends)
    except SpliceError as error:
        code = error.code
    if code:
        assert code in CODES
        return
    assert prompt[: len(staged)].tolist() == staged
    suffix = prompt[len(staged) :].tolist()
    assert suffix
    assert rendered[len(rendered) - len(suffix) :] == suffix
    if staged[-1] not in ends:
        assert suffix[0] in ends
