"""Conversation fingerprints against the real NeMo-Gym."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.gym_contract import GymContract, ask_both

TEXTS = st.sampled_from(
    ["", "a", "b", "é🙂", " a ", "None", '{"b": 1, "a": [1.0, "é"]}', "{}", "NaN"]
)
ODD: st.SearchStrategy[Any] = st.one_of(
    TEXTS,
    st.sampled_from(
        [
            *(None, True, False, 0, 5, 1.5, -0.0, float("nan"), 2**63, 2**64, 10**30, "\ud800"),
            *([], {}, [1], [None], {"a": 1}, {"b": 2, "a": [1.5, None]}, "[" * 3, str(2**64)),
            *('"\\ud800"', "1e400", "-0", "[1, 2.50]", "  {}\n"),
        ]
    ),
)
ARGUMENTS = TEXTS | ODD
BLOCK_TYPES = st.sampled_from(
    [
        *("text", "input_text", "output_text", "", "refusal", "image_url", "thinking"),
        *("tool_use", "tool_result", None, 5),
    ]
)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with any of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


BLOCKS = some(
    type=BLOCK_TYPES,
    text=TEXTS | ODD,
    id=ODD,
    name=ODD,
    input=ARGUMENTS,
    tool_use_id=ODD,
    content=ODD,
)
CALLS = some(id=ODD, function=some(name=ODD, arguments=ARGUMENTS) | ODD)
ITEMS = some(
    role=st.sampled_from(["assistant", "user", "system", "tool", None, "", 5]),
    type=st.sampled_from(
        ["message", "function_call", "function_call_output", "reasoning", None, "", 5]
    ),
    content=TEXTS | ODD | st.lists(BLOCKS | TEXTS | ODD, max_size=3),
    tool_calls=ODD | st.lists(CALLS | ODD, max_size=2),
    tool_call_id=ODD,
    call_id=ODD,
    id=ODD,
    name=ODD,
    namespace=ODD,
    arguments=ARGUMENTS,
    output=ODD,
)


def plain(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """Items as clients really send them."""
    words = st.sampled_from(["a", "b", "é🙂"])
    return {
        "chat": st.builds(lambda text: {"role": "assistant", "content": text}, words),
        "blocks": st.builds(
            lambda text: {"role": "assistant", "content": [{"type": "text", "text": text}]}, words
        ),
        "call": st.builds(
            lambda n, a: {"type": "function_call", "call_id": "t", "name": n, "arguments": a},
            words,
            st.sampled_from(["{}", '{"b":1,"a":2}']),
        ),
        "tool": st.builds(
            lambda text: {"role": "tool", "tool_call_id": "t", "content": text}, words
        ),
        "user": st.builds(lambda text: {"role": "user", "content": text}, words),
    }[kind]


PLAIN = st.one_of(*map(plain, ("chat", "blocks", "call", "tool", "user")))


@given(st.lists(PLAIN, max_size=5))
def test_conversations(gym: GymContract, items: list[Any]) -> None:
    assert ask_both(gym, "fingerprints", items=items).agree().accepted


@given(st.lists(ITEMS, max_size=2))
def test_conversations_of_anything(gym: GymContract, items: list[Any]) -> None:
    ask_both(gym, "fingerprints", items=items).agree()


NAMES: list[Any] = [None, "", "f", 0, 5, 1.5, False, [], {"a": None}]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_odd_names_of_every_dialect(gym: GymContract, name: Any) -> None:
    for named in ({"name": name}, {}):
        for item in (
            {"type": "function_call", "call_id": "t", **named},
            {"type": "function_call", "call_id": "t", "namespace": name, **named},
            {"role": "assistant", "content": [{"type": "tool_use", "id": name, **named}]},
            {"role": "assistant", "tool_calls": [{"id": name, "function": named}]},
        ):
            assert ask_both(gym, "fingerprints", items=[item]).agree().accepted


@given(ODD)
def test_items_that_are_no_objects(gym: GymContract, item: Any) -> None:
    ask_both(gym, "fingerprints", items=[{"role": "user", "content": "x"}, item]).agree()
