"""Every parser: well-formed calls come out as written, everything else stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.engine_adapter.chat.tool_calls import (
    PARSERS,
    ParsedMessage,
    detect_parser,
    mint_call_id,
    open_parser,
    split_reasoning,
)
from tokenplane.schemas.errors import ConfigError


def calls_of(parsed: ParsedMessage) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parsed.tool_calls]


HERMES = [
    ('<tool_call>{"name": "f", "arguments": {"x":  1}}</tool_call>', None, [("f", '{"x":  1}')]),
    (
        'Well\n<tool_call>\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n</tool_call>',
        "Well",
        [("f", '{"x": 1}')],
    ),
    ('<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call> and so on',
        "and so on",
        [("f", '{"s": "</tool_call>"}')],
    ),
    (
        '<tool_call>oops</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "<tool_call>oops</tool_call>",
        [("g", "{}")],
    ),
    (
        '<think><tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "g"}</tool_call>',
        '<think><tool_call>{"name": "f"}</tool_call></think>',
        [("g", "{}")],
    ),
]
LLAMA = [
    ('{"name": "f", "parameters": {"a": [1, 2]}}', None, [("f", '{"a": [1, 2]}')]),
    (
        '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"b": null}}',
        None,
        [("f", "{}"), ("g", '{"b": null}')],
    ),
    ('Sure.<|python_tag|>{"name": "f", "parameters": {}}', "Sure.", [("f", "{}")]),
]
MISTRAL = [
    (
        'Ok[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "Ok",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
]
PYTHONIC = [
    (
        '[a.f(x=1, y="é", z=[True, None]), g()]',
        None,
        [("a.f", '{"x": 1, "y": "é", "z": [true, null]}'), ("g", "{}")],
    ),
    ("<|python_tag|>[f(d={'k': 1.5})]", None, [("f", '{"d": {"k": 1.5}}')]),
]
CASES = [
    (name, *case)
    for name, cases in (
        ("hermes", HERMES),
        ("llama3_json", LLAMA),
        ("mistral", MISTRAL),
        ("pythonic", PYTHONIC),
    )
    for case in cases
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    parsed = open_parser(name).parse(text)
    assert calls_of(parsed) == calls
    assert parsed.content == content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "no json"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"} trailing</tool_call>'),
        ("hermes", '<think>maybe <tool_call>{"name": "f"}</tool_call>'),
        ("hermes", "<tool_call>" + '{"a":' * 3000),
        ("llama3_json", '{"city": "Rome"}'),
        ("llama3_json", '{"name": "f", "parameters": {}} and more'),
        ("llama3_json", '{"name": "f", "parameters": {}, "arguments": {}}'),
        ("llama3_json", ""),
        ("mistral", "no calls"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(x=y)]"),
        ("pythonic", "[f(x={1, 2})]"),
        ("pythonic", "[f(x=1), 2]"),
        ("pythonic", "f(x=1)"),
        ("pythonic", "[]"),
        ("pythonic", "[f(**{})]"),
        ("none", '<tool_call>{"name": "f"}</tool_call>'),
    ],
)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert open_parser(name).parse(text) == ParsedMessage(text)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS] [{]",
        "[TOOL_CALLS]",
        '[TOOL_CALLS] [{"name": "f"}] more',
        "[TOOL_CALLS] []",
        '[TOOL_CALLS]f{"a": 1} more',
    ],
)
def test_a_broken_mistral_call_loses_only_its_sign(text: str) -> None:
    parsed = open_parser("mistral").parse(text)
    assert parsed == ParsedMessage(text.replace("[TOOL_CALLS]", ""))


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(names, st.dictionaries(names, values, max_size=3), st.booleans())
def test_arguments_come_out_character_by_character(
    name: str, arguments: dict[str, object], ascii_only: bool
) -> None:
    raw = json.dumps(arguments, ensure_ascii=ascii_only, indent=1)
    written = f'{{"name": {json.dumps(name)}, "arguments": {raw}}}'
    hermes = open_parser("hermes").parse(f"<tool_call>{written}</tool_call>")
    assert calls_of(hermes) == [(name, raw)]
    llama = open_parser("llama3_json").parse(written.replace('"arguments"', '"parameters"', 1))
    if '"arguments"' not in json.dumps(name):
        assert calls_of(llama) == [(name, raw)]
    mistral = open_parser("mistral").parse(f"[TOOL_CALLS][{written}]")
    if "[TOOL_CALLS]" not in written:
        assert calls_of(mistral) == [(name, raw)]


@given(st.text(max_size=60))
def test_no_parser_raises_or_loses_plain_text(text: str) -> None:
    for name in PARSERS:
        parsed = open_parser(name).parse(text)
        if not parsed.tool_calls and "[TOOL_CALLS]" not in text:
            assert parsed.content == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('{"name": x, "parameters": y}', "llama3_json"),
        ("<tool_call><function=f>", "none"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_detection(template: str, name: str) -> None:
    assert detect_parser(template) == name
    assert open_parser("auto", template).name == name


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such tool parser"):
        open_parser("xml")


def test_call_ids_are_stable_unique_and_fit_the_family() -> None:
    minted = {mint_call_id(f"r{i}", j) for i in range(20) for j in range(20)}
    assert len(minted) == 400
    assert mint_call_id("r", 0) == mint_call_id("r", 0)
    short = mint_call_id("r", 0, open_parser("mistral").id_length)
    assert len(short) == 9
    assert short.isalnum()


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>\na\n</think>\n\nb", "a", "b"),
        ("a</think>b", "a", "b"),
        ("<think>cut", "cut", ""),
        ("plain", None, "plain"),
        ("<think>\n\n</think>\n\nb", None, "b"),
        ("mentions <think> later", None, "mentions <think> later"),
    ],
)
def test_reasoning(text: str, reasoning: str | None, rest: str) -> None:
    assert split_reasoning(text) == (reasoning, rest)
