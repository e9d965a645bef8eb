"""The terminal choice against the real NeMo-Gym: every witness, and the walk without one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.gym_contract import GymContract, ask_both
from tokenplane.schemas.fingerprints import assistant_fingerprint

WORDS: list[dict[str, Any]] = [{"role": "assistant", "content": text} for text in "xyz"]
CALL_ITEM = {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "t", "output": "1"}
REASONING = {"type": "reasoning", "summary": []}
PRINTS = st.sampled_from(
    [
        *(None, *(assistant_fingerprint([word]) for word in WORDS)),
        *(assistant_fingerprint(WORDS[:2]), assistant_fingerprint([CALL_ITEM, WORDS[0]])),
    ]
)
HASHES = st.sampled_from(["11" * 32, "22" * 32])


@st.composite
def ledgers(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows with few distinct sequences, ids and times, so that they collide."""
    rows: list[dict[str, Any]] = []
    names = draw(st.permutations("abcdef"))
    for at in range(draw(st.integers(0, 5))):
        parent = draw(st.sampled_from([None, *rows])) if rows else None
        prev_len = 0 if parent is None else parent["cum_len"]
        orphan = draw(st.integers(0, 9)) == 0
        rows.append(
            {
                "model_call_id": names[at],
                "parent_call_id": None
                if parent is None
                else ("gone" if orphan else parent["model_call_id"]),
                "mode": "text" if parent is None else "token_in",
                "prev_len": prev_len,
                "delta_len": 2,
                "cum_len": prev_len + 2,
                "weight_version": 7,
                "digest": "00" * 32,
                "extras_digest": "00" * 32,
                "staging_key": f"k{at}",
                "chain_hash": draw(HASHES),
                "cumulative_hash": draw(HASHES),
                "response_id": draw(st.sampled_from(["r1", "r2", "r3"])),
                "admitted_at": draw(st.sampled_from([None, 0.0, 1.5, 2.5, -1.0])),
                "output_fingerprint": draw(PRINTS),
                "continuation_fingerprint": draw(PRINTS),
                "fingerprint_version": draw(st.sampled_from([2, 2, 2, 0, 1])),
            }
        )
    return rows


OUTPUTS = st.lists(
    st.sampled_from([*WORDS, CALL_ITEM, OUTPUT_ITEM, REASONING, 5, None, "x"]), max_size=4
)
IDENTS = st.sampled_from(["r1", "r2", "r3", "other"])
RESPONSES = st.none() | st.fixed_dictionaries(
    {}, optional={"id": IDENTS, "output": OUTPUTS | st.sampled_from([None, "x"])}
)


@given(
    ledgers(),
    st.sampled_from([None, "a", "b", "c", "zz"]),
    st.sampled_from([None, None, "r1", "r2", "zz"]),
    RESPONSES,
)
def test_terminals(
    gym: GymContract, rows: list[Any], explicit: Any, declared: Any, response: Any
) -> None:
    both = ask_both(
        gym, "terminal", rows=rows, explicit=explicit, declared=declared, response=response
    )
    assert both.agree().accepted


@given(ledgers(), st.integers(0, 4), st.integers(0, 4))
def test_a_call_id_that_comes_twice(gym: GymContract, rows: list[Any], a: int, b: int) -> None:
    """The walk refuses it on both sides. As an explicit witness Gym takes the last such row; we
    abstain where the rows differ, for either may be meant (no ledger writes an id twice)."""
    if a == b or max(a, b) >= len(rows):
        return
    rows[a]["model_call_id"] = ident = rows[b]["model_call_id"]
    both = ask_both(gym, "terminal", rows=rows, explicit=ident, declared=None, response=None)
    assert both.accepted
    assert both.ours["value"][1:] == both.gym["value"][1:] == [None, "duplicate_call_id"]
    identities = ("cumulative_hash", "chain_hash", "cum_len")
    same = all(rows[a][name] == rows[b][name] for name in identities)
    assert both.gym["value"][0] == ident
    assert both.ours["value"][0] == (ident if same else None)


X, Y, Z = WORDS
NO_DECLARATION = {"explicit": None, "declared": None}


def ledger_of(*outputs: list[dict[str, Any]], **change: Any) -> list[dict[str, Any]]:
    """Roots ``c0``, ``c1``, ... that answered ``outputs``, each a sequence of its own."""
    return [
        {
            "model_call_id": f"c{at}",
            "mode": "text",
            "prev_len": 0,
            "delta_len": 2,
            "cum_len": 2,
            "weight_version": 7,
            "digest": "00" * 32,
            "response_id": f"r{at}",
            "extras_digest": "00" * 32,
            "staging_key": f"k{at}",
            "fingerprint_version": 2,
            "chain_hash": f"{at}{at}" * 32,
            "cumulative_hash": f"{at}{at}" * 32,
            "output_fingerprint": assistant_fingerprint(output),
            **change,
        }
        for at, output in enumerate(outputs)
    ]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_each_witness_can_name_a_terminal(gym: GymContract, at: int) -> None:
    for witness in (
        {"explicit": f"c{at}", "declared": None, "response": None},
        {"explicit": None, "declared": f"r{at}", "response": None},
        {**NO_DECLARATION, "response": {"id": f"r{at}"}},
        {**NO_DECLARATION, "response": {"output": [WORDS[at]]}},
    ):
        both = ask_both(gym, "terminal", rows=ledger_of([X], [Y], [Z]), **witness).agree()
        assert both.ours["value"][0] == f"c{at}"


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ([X, OUTPUT_ITEM, Y], "c1"),
        ([X, OUTPUT_ITEM, CALL_ITEM, Y], "c2"),
        ([X, OUTPUT_ITEM, CALL_ITEM, REASONING, Y], "c1"),  # reasoning ends the trailing block
        ([X, OUTPUT_ITEM, REASONING, CALL_ITEM, Y], "c2"),
        ([REASONING, Y], "c1"),
        ([X, Y, OUTPUT_ITEM], None),
        ([X, Y], None),
        ([Y, Z], None),
        ([REASONING], None),
        ([], None),
        ([X, 5, "x", None, OUTPUT_ITEM, Y], "c1"),
    ],
    ids=str,
)
def test_the_content_witness(gym: GymContract, output: list[Any], named: str | None) -> None:
    rows = ledger_of([Z], [Y], [CALL_ITEM, Y])
    response = {"output": output}
    both = ask_both(gym, "terminal", rows=rows, **NO_DECLARATION, response=response).agree()
    assert both.ours["value"][0] == named


@pytest.mark.parametrize(("version", "named"), [(2, "c0"), (0, None), (1, None), (3, None)])
def test_a_fingerprint_of_another_version_says_nothing(
    gym: GymContract, version: int, named: str | None
) -> None:
    rows = ledger_of([X], [Y], fingerprint_version=version)
    response = {"output": [X]}
    both = ask_both(gym, "terminal", rows=rows, **NO_DECLARATION, response=response).agree()
    assert both.ours["value"][0] == named


def test_a_whole_transcript_names_the_row_that_continued_it(gym: GymContract) -> None:
    rows = ledger_of([Z], [Y], continuation_fingerprint=None)
    rows[1]["continuation_fingerprint"] = assistant_fingerprint([X, Z])
    response = {"output": [X, Z]}
    both = ask_both(gym, "terminal", rows=rows, **NO_DECLARATION, response=response).agree()
    assert both.ours["value"][0] == "c1"


@pytest.mark.parametrize(
    ("same", "named"), [(True, "c0"), (False, None)], ids=["one sequence", "two sequences"]
)
def test_witnesses_that_name_two_rows(gym: GymContract, same: bool, named: str | None) -> None:
    rows = ledger_of([X], [Y])
    if same:
        rows[1] |= {name: rows[0][name] for name in ("chain_hash", "cumulative_hash")}
    for witness in (
        {"explicit": "c0", "declared": None, "response": {"output": [Y]}},
        {"explicit": None, "declared": "r0", "response": {"id": "r1"}},
        {**NO_DECLARATION, "response": {"id": "r0", "output": [Y]}},
    ):
        both = ask_both(gym, "terminal", rows=rows, **witness).agree()
        assert both.ours["value"][0] == named


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_of_identical_sequences_the_smallest_id_is_named(
    gym: GymContract, order: tuple[str, str]
) -> None:
    rows = ledger_of([X], [X])
    for row, ident in zip(rows, order, strict=True):
        row |= {"model_call_id": ident, "response_id": "r"}
        row |= {name: rows[0][name] for name in ("chain_hash", "cumulative_hash")}
    for witness in (
        {"explicit": None, "declared": "r", "response": None},
        {**NO_DECLARATION, "response": {"id": "r"}},
        {**NO_DECLARATION, "response": {"output": [X]}},
    ):
        both = ask_both(gym, "terminal", rows=rows, **witness).agree()
        assert both.ours["value"][0] == "a"
