"""Conversation fingerprints: one history has one fingerprint in every dialect, and only one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schemas.stable_ids import stable_repr
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.fingerprints import (
    assistant_fingerprint,
    canonical_arguments,
    canonical_json,
    content_parts,
    conversation_digest,
    request_envelope,
    tool_calls,
    tool_results,
)

Item = dict[str, Any]


def text_block(text: str, kind: str = "text") -> Item:
    return {"type": kind, "text": text}


def chat_call(name: Any, arguments: Any, ident: Any = "t1") -> Item:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


SAME_TEXT: list[Item] = [
    {"role": "assistant", "content": "hi"},
    {"role": "assistant", "content": [text_block("hi")]},
    {"role": "assistant", "content": [text_block("hi", "output_text")]},
    {"role": "assistant", "content": [{"text": "hi"}]},
    {"role": "assistant", "content": ["hi", "", text_block("")]},
    {"role": "assistant", "content": "hi", "type": "message", "id": "m1"},
]
SAME_CALL: list[list[Item]] = [
    [{"role": "assistant", "content": None, "tool_calls": [chat_call("f", '{"b": 1, "a": "é"}')]}],
    [{"role": "assistant", "tool_calls": [chat_call("f", {"a": "é", "b": 1})]}],
    [{"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"a":"é","b":1}'}],
    [{"type": "function_call", "id": "t1", "name": "f", "arguments": '{"a":"\\u00e9","b":1}'}],
    [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"b": 1, "a": "é"}}],
        }
    ],
]


def test_a_text_has_one_fingerprint() -> None:
    assert len({assistant_fingerprint([item]) for item in SAME_TEXT}) == 1


def test_a_tool_call_has_one_fingerprint() -> None:
    assert len({assistant_fingerprint(items) for items in SAME_CALL}) == 1


def test_the_layout_is_the_contract_s() -> None:
    def field(tag: int, value: str) -> bytes:
        return bytes([tag]) + len(value.encode()).to_bytes(8, "big") + value.encode()

    items: list[Item] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "é", "tool_calls": [chat_call("f", "{ }")]},
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
    ]
    spoken = [field(0, "text"), field(1, "é"), field(2, "t1"), field(3, "f"), field(4, "{}")]
    whole = [
        *(field(0, "user"), field(1, "text"), field(2, "q")),
        *(field(0, "assistant"), field(1, "text"), field(2, "é")),
        *(field(3, "t1"), field(4, "f"), field(5, "{}")),
        *(field(0, "tool"), field(1, "text"), field(2, "42"), field(6, "t1"), field(7, "42")),
    ]
    for tag, fields, got in (
        (b"nemo-gym-lineage", spoken, assistant_fingerprint(items)),
        (b"nemo-gym-lineage-context", whole, conversation_digest(items)),
    ):
        assert hashlib.sha256(tag + b"".join(fields)).hexdigest() == got


def test_only_what_the_model_wrote_counts_for_the_assistant_fingerprint() -> None:
    spoken: list[Item] = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    between: list[Item] = [
        *({"role": "user", "content": "x"}, {"type": "reasoning", "summary": [text_block("why")]}),
        *({"type": "function_call_output", "call_id": "t", "output": "1"}, {"role": "system"}),
    ]
    for item in between:
        mixed: list[Item] = [spoken[0], item, spoken[1]]
        assert assistant_fingerprint(mixed) == assistant_fingerprint(spoken)
        assert conversation_digest(mixed) != conversation_digest(spoken)
    assert assistant_fingerprint(between) == assistant_fingerprint([]) == ""
    assert conversation_digest([]) != ""


@pytest.mark.parametrize(
    "other",
    [
        [{"role": "assistant", "content": "hi "}],
        [{"role": "assistant", "content": ["h", "i"]}],
        [{"role": "assistant", "content": [text_block("hi", "refusal")]}],
        [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "hi"}}]}],
        [{"role": "assistant", "content": "hi", "tool_calls": [chat_call("hi", "")]}],
        [{"role": "assistant", "content": "hi"}] * 2,
        [{"role": "assistant", "content": None}],
    ],
    ids=stable_repr,
)
def test_another_answer_has_another_fingerprint(other: list[Item]) -> None:
    assert assistant_fingerprint(other) != assistant_fingerprint([SAME_TEXT[0]])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (chat_call(None, None, None), ("", "None", "")),
        ({}, ("", "", "")),
        (None, ("", "", "")),
        ({"id": 7, "function": {"name": 5, "arguments": 1.0}}, ("7", "5", "1.0")),
        (chat_call("f", " not json "), ("t1", "f", "not json")),
        (chat_call("f", "NaN"), ("t1", "f", "null")),
        (chat_call("f", '"s"'), ("t1", "f", '"s"')),
    ],
    ids=stable_repr,
)
def test_odd_tool_calls_read_as_the_other_side_reads_them(call: Any, expected: object) -> None:
    assert tool_calls({"role": "assistant", "tool_calls": [call]}) == [expected]


NULL_NAMES: list[Item] = [
    {"type": "function_call", "call_id": "t", "name": None},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": None}]},
    {"role": "assistant", "tool_calls": [chat_call(None, None, "t")]},
]


@pytest.mark.parametrize("item", NULL_NAMES, ids=["responses", "anthropic", "chat"])
def test_a_null_name_reads_as_none_and_an_absent_one_as_empty(item: Item) -> None:
    assert tool_calls(item) == [("t", "None", "")]
    absent = {key: value for key, value in item.items() if key != "name"}
    if "content" in absent:
        absent["content"] = [{"type": "tool_use", "id": "t"}]
    if "tool_calls" in absent:
        absent["tool_calls"] = [{"id": "t", "function": {"arguments": None}}]
    assert tool_calls(absent) == [("t", "", "")]


def test_a_namespace_is_part_of_the_name() -> None:
    item = {"type": "function_call", "call_id": "t", "name": "f", "namespace": "ns"}
    assert tool_calls(item) == [("t", "ns__f", "")]


def test_tool_results_of_every_dialect() -> None:
    output = {"type": "function_call_output", "call_id": "t1", "output": {"b": 1, "a": 2}}
    assert tool_results(output) == [("t1", '{"a":2,"b":1}')]
    assert tool_results({"role": "tool", "tool_call_id": "t1", "content": "42"}) == [("t1", "42")]
    assert tool_results({"role": "tool", "content": None}) == [("", "null")]
    block = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
    assert tool_results({"role": "user", "content": [block]}) == [("t1", "42")]
    # An output item counts once, whatever role it also names.
    assert tool_results({**output, "role": "tool", "content": "x"}) == [("t1", '{"a":2,"b":1}')]


def test_content_parts_keep_what_shapes_the_prompt() -> None:
    image = {"type": "image_url", "image_url": {"url": "x", "detail": "low"}}
    blocks = [text_block("a", "input_text"), image, {"type": "tool_use", "text": "no"}, "b"]
    assert content_parts({"content": blocks}) == [
        ("text", "a"),
        ("image_url", '{"image_url":{"detail":"low","url":"x"},"type":"image_url"}'),
        ("text", "b"),
    ]
    assert content_parts({"content": [{"type": 5}]}) == [("5", '{"type":5}')]


@pytest.mark.parametrize(
    "item",
    [
        *({"content": 5}, {"content": {"type": "text"}}, {"content": [5]}, {"content": [None]}),
        *({"content": [{}]}, {"content": [{"image": 1}]}, {"content": [["text"]]}),
        *(
            {"content": "\ud800"},
            {"tool_calls": [{"id": "\ud800"}]},
            {"content": [{"type": "x", "v": 2**64}]},
        ),
        *({"tool_calls": 5}, {"tool_calls": "ab"}, {"tool_calls": [5]}, {"tool_calls": {"a": 1}}),
        *({"tool_calls": [{"function": "f"}]}, {"tool_calls": [chat_call("f", {"a": 2**64})]}),
        *(
            {"tool_calls": [chat_call("f", str(2**64))]},
            {"tool_calls": [chat_call("f", "[" * 9**6)]},
        ),
        *("text", None, 5, ["role"]),
    ],
    ids=lambda item: repr(item)[:60],
)
def test_what_has_no_fingerprint_is_a_coded_error(item: Any) -> None:
    spoken = {"role": "assistant", **item} if isinstance(item, dict) else item
    for call in (assistant_fingerprint, conversation_digest):
        with pytest.raises(InvalidRecordError):
            call([spoken])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["assistant", "tool", "text", "function_call", "tool_use", "tool_result"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "type", "content", "text", "tool_calls", "function", "name", "arguments"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(st.lists(JSON, max_size=3))
def test_any_json_has_a_fingerprint_or_a_coded_error(items: list[Any]) -> None:
    for call in (assistant_fingerprint, conversation_digest):
        try:
            digest = call(items)
        except InvalidRecordError:
            continue
        assert len(digest) in (0, 64)


@given(st.dictionaries(st.text(max_size=4), st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_canonical_json_ignores_order_and_space(value: dict[str, int]) -> None:
    backwards = dict(reversed(list(value.items())))
    assert canonical_json(backwards) == canonical_json(value)
    assert canonical_arguments(json.dumps(backwards, indent=2)) == canonical_json(value)
    assert json.loads(canonical_json(value)) == value


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, 2**64, "\ud800"], ids=stable_repr)
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRecordError):
        canonical_json(value)


def test_the_request_envelope() -> None:
    assert request_envelope(instructions=None, tools=[]) == []
    (item,) = request_envelope(tools=[{"b": 1, "a": "é"}], instructions="")
    assert item == {
        "role": "_ng_request_envelope",
        "content": '{"instructions": "", "tools": [{"a": "\\u00e9", "b": 1}]}',
    }
    assert conversation_digest([item]) != conversation_digest([])
    assert assistant_fingerprint([item]) == ""
