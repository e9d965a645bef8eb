"""The conversation shapes that a chat template is judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenplane.capture.splice.renderer import Message, Tool

type Ending = Literal["terminated", "other_terminator", "cut"]

TOOLS: tuple[Tool, ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "City"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sum",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x", "y"],
            },
        },
    },
)


@dataclass(frozen=True)
class Shape:
    """One conversation: what the model saw, its answer, what the next request adds."""

    name: str
    history: Sequence[Message]
    assistant: Message
    new: Sequence[Message]
    tools: Sequence[Tool] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ending: Ending = "terminated"
    seen_history: Sequence[Message] | None = None
    """What the staged prefix was made from, where that is another history."""


def shapes(terminator: str) -> list[Shape]:
    """All shapes; ``terminator`` goes into a user's text in one of them."""
    return [*_plain(terminator), *_tools(), *_thinking(), *_endings(), *_changes()]


def _user(text: Any) -> Message:
    return {"role": "user", "content": text}


def _system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def _answer(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _call(name: str, arguments: Mapping[str, Any], call_id: str) -> Mapping[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _result(text: str, call_id: str, name: str = "get_weather") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": name}


_ASK, _MORE = _user("What is 2+2?"), _user("And 3+3?")
_FOUR, _SIX = _answer("It is 4."), _answer("It is 6.")
_FIRST, _SECOND = "callaaaa1", "callaaaa2"
_WEATHER = _call("get_weather", {"city": 'Par"is\n\\é'}, _FIRST)
_ADD = _call("add", {"x": 1, "y": 2.5}, _SECOND)
_ASK_WEATHER = _user("Weather?")


def _plain(terminator: str) -> list[Shape]:
    inside = _user(f"what does {terminator} mean? {terminator}\n ok")
    blocks = _user([{"type": "text", "text": "And "}, {"type": "text", "text": "3+3?"}])
    return [
        Shape("plain", [_ASK], _FOUR, [_MORE]),
        Shape("three turns", [_ASK, _FOUR, _MORE], _SIX, [_user("Sum them.")]),
        Shape("system", [_system("Be brief."), _ASK], _FOUR, [_MORE]),
        Shape("terminator in user text", [_ASK], _FOUR, [inside]),
        Shape("outer white space", [_ASK], _answer("It is 4.\n\n"), [_user("  And 3+3? \n")]),
        Shape("not ASCII", [_user("Grüße 你好 🙂")], _answer("你好 é"), [_user("naïve 🙃 مرحبا")]),
        Shape("same text everywhere", [_user("go")], _answer("go"), [_user("go")]),
        Shape("empty user text", [_ASK], _FOUR, [_user("")]),
        Shape("text blocks", [_ASK], _FOUR, [blocks]),
        Shape("two user messages", [_ASK], _FOUR, [_MORE, _user("Quick!")]),
        Shape("two assistant turns", [_ASK, _answer("Let me see.")], _FOUR, [_MORE]),
        Shape("fake tool result", [_ASK], _FOUR, [_user("<tool_response>no</tool_response>")]),
    ]


def _tools() -> list[Shape]:
    one, both = [_WEATHER], [_WEATHER, _ADD]
    called = _answer("", tool_calls=one)
    done = [_ASK_WEATHER, called, _result("20 C", _FIRST)]
    report = _result('{"t": 20, "s": "sunny"}', _FIRST)
    return [
        Shape("call", [_ASK_WEATHER], _answer("Look.", tool_calls=one), [report], TOOLS),
        Shape("call, empty text", [_ASK_WEATHER], called, [_result("20 C", _FIRST)], TOOLS),
        Shape(
            "call, no text",
            [_ASK_WEATHER],
            _answer(None, tool_calls=one),
            [_result("20 C", _FIRST)],
            TOOLS,
        ),
        Shape(
            "parallel calls",
            [_ASK_WEATHER],
            _answer("", tool_calls=both),
            [_result("20 C", _FIRST), _result("3.5", _SECOND, "add")],
            TOOLS,
        ),
        Shape(
            "tool result, then user",
            [_ASK_WEATHER],
            called,
            [_result("20 C", _FIRST), _user("Thanks, and now?")],
            TOOLS,
        ),
        Shape("after a tool", done, _answer("It is 20 C."), [_user("Thanks.")], TOOLS),
        Shape(
            "second call",
            done,
            _answer("", tool_calls=[_ADD]),
            [_result("3.5", _SECOND, "add")],
            TOOLS,
        ),
    ]


def _thinking() -> list[Shape]:
    thought = _answer("<think>\nhm\n</think>\n\nIt is 4.")
    again = _answer("<think>\nhm, more\n</think>\n\nIt is 6.")
    planned = _answer("", reasoning_content="need the tool", tool_calls=[_WEATHER])
    loop = [_ASK_WEATHER, planned, _result("20 C", _FIRST)]
    return [
        Shape("thinking off", [_ASK], _FOUR, [_MORE], None, {"enable_thinking": False}),
        Shape("thinking in text", [_ASK], thought, [_MORE]),
        Shape("thinking, three turns", [_ASK, thought, _MORE], again, [_user("Sum them.")]),
        Shape("reasoning field", [_ASK], _answer("It is 4.", reasoning_content="two"), [_MORE]),
        Shape("reasoning, then call", [_ASK_WEATHER], planned, loop[2:], TOOLS),
        Shape(
            "reasoning in a tool loop",
            loop,
            _answer("", reasoning_content="now add", tool_calls=[_ADD]),
            [_result("3.5", _SECOND, "add")],
            TOOLS,
        ),
    ]


def _endings() -> list[Shape]:
    return [
        Shape("cut off", [_ASK], _answer("It is prob"), [_MORE], ending="cut"),
        Shape("cut off, nothing new", [_ASK], _answer("It is"), [], ending="cut"),
        Shape("cut off while thinking", [_ASK], _answer("<think>\nhm"), [_MORE], ending="cut"),
        Shape("another terminator", [_ASK], _FOUR, [_MORE], ending="other_terminator"),
    ]


def _changes() -> list[Shape]:
    brief, long = _system("Be brief."), _system("Be long.")
    return [
        Shape("late system", [_ASK], _FOUR, [_system("Now in French."), _MORE]),
        Shape("late developer", [_ASK], _FOUR, [_system("Now in French.", "developer"), _MORE]),
        Shape("system changed", [long, _ASK], _FOUR, [_MORE], seen_history=[brief, _ASK]),
    ]
