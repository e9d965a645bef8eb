"""Tool calls as Mistral writes them: ``[TOOL_CALLS]``, then JSON, or a name and its arguments."""

from __future__ import annotations

import re

from tokenplane.engine_adapter.chat.tool_call_parts import (
    ParsedMessage,
    ToolCall,
    plain,
    read_call,
    read_object,
    skip_space,
    with_calls,
)

_MARK, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class MistralParser:
    """Reads ``[TOOL_CALLS][{...}, ...]`` and ``[TOOL_CALLS]name[ARGS]{...}``, at the end of the
    answer."""

    name = "mistral"
    markers = frozenset({_MARK, _ARGS})
    id_length: int | None = 9
    """Mistral's templates refuse call ids of another length."""

    def parse(self, text: str) -> ParsedMessage:
        """See ``ToolCallParser``."""
        content, *segments = text.split(_MARK)
        calls: list[ToolCall] = []
        try:
            for segment in segments:
                calls += _segment(segment.strip())
        except ValueError:
            return plain(text.replace(_MARK, "").replace(_ARGS, ""))
        return with_calls([content], calls, text)


def _segment(text: str) -> list[ToolCall]:
    if not text.startswith("["):
        return [_named(text)]
    calls: list[ToolCall] = []
    at = skip_space(text, 1)
    while not text.startswith("]", at):
        if calls:
            if not text.startswith(",", at):
                raise ValueError("expected a comma")
            at = skip_space(text, at + 1)
        call, end = read_call(text, at, "arguments", "parameters")
        calls.append(call)
        at = skip_space(text, end)
    if at + 1 != len(text) or not calls:
        raise ValueError("text behind the calls")
    return calls


def _named(text: str) -> ToolCall:
    name = _NAME.match(text)
    if name is None:
        raise ValueError("no name")
    at = skip_space(text, name.end())
    if text.startswith(_ARGS, at):
        at = skip_space(text, at + len(_ARGS))
    _members, end = read_object(text, at)
    if end != len(text):
        raise ValueError("text behind the call")
    return ToolCall(name.group(), text[at:end])
