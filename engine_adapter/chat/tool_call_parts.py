"""What a tool-call parser gives, and how calls are read out of JSON as the model wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made."""

    name: str
    arguments: str
    """JSON of an object, character by character as the model wrote it where it wrote JSON."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """An answer taken apart for the agent."""

    content: str | None
    """None where there are only calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


def plain(text: str) -> ParsedMessage:
    """A message without calls."""
    return ParsedMessage(text)


def with_calls(parts: list[str], calls: list[ToolCall], text: str) -> ParsedMessage:
    """A message with the calls found and the text round them; the whole ``text`` without any."""
    if not calls:
        return plain(text)
    content = "\n".join(part for part in (part.strip() for part in parts) if part)
    return ParsedMessage(content or None, tuple(calls))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = " \t\n\r"


def skip_space(text: str, at: int) -> int:
    """The index of the first character from ``at`` on that is no white space."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def read_value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that starts at ``at``, and where it ends.

    Raises:
        ValueError: no JSON value starts there.
    """
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the JSON object at ``at``, each as (value, its own text), and its end.

    Raises:
        ValueError: no JSON object starts there, or it names a member twice.
    """
    if not text.startswith("{", at):
        raise ValueError("no object")
    members: dict[str, tuple[Any, str]] = {}
    at = skip_space(text, at + 1)
    while not text.startswith("}", at):
        if members:
            if not text.startswith(",", at):
                raise ValueError("expected a comma")
            at = skip_space(text, at + 1)
        key, end = read_value(text, at)
        at = skip_space(text, end)
        if not isinstance(key, str) or key in members or not text.startswith(":", at):
            raise ValueError("expected another member")
        at = skip_space(text, at + 1)
        value, end = read_value(text, at)
        members[key] = (value, text[at:end])
        at = skip_space(text, end)
    return members, at + 1


def read_call(text: str, at: int, *argument_names: str) -> tuple[ToolCall, int]:
    """The call in the JSON object at ``at``: its ``name``, and one of ``argument_names``.

    Arguments may be an object, or a string that holds one; none at all counts as ``{}``.

    Raises:
        ValueError: no such object.
    """
    members, end = read_object(text, at)
    name = members.get("name", (None, ""))[0]
    found = [members[key] for key in argument_names if key in members]
    if not isinstance(name, str) or not name or len(found) > 1:
        raise ValueError("no call")
    value, raw = found[0] if found else ({}, "{}")
    if isinstance(value, str):
        inner, inner_end = read_value(value, skip_space(value, 0))
        if not isinstance(inner, dict) or skip_space(value, inner_end) != len(value):
            raise ValueError("the arguments are no object")
        return ToolCall(name, value), end
    if not isinstance(value, dict):
        raise ValueError("the arguments are no object")
    return ToolCall(name, raw), end
