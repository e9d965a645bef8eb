"""What a chat template asks of its messages, found by rendering small conversations with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

type Render = Callable[
    [
        Sequence[Mapping[str, Any]],
        Sequence[Mapping[str, Any]] | None,
        bool,
        Mapping[str, Any] | None,
    ],
    str,
]

_WORD = "qzvkprobe"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"k": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """How OpenAI messages are changed before a template sees them; texts stay what they are."""

    arguments: Literal["mapping", "either", "string"]
    """The form of tool-call arguments that it prints as JSON. OpenAI's is a string. With "either"
    a mapping is passed, as transformers documents it; a string that is no JSON object stays."""
    text_blocks: bool
    """Whether it reads content given as a list of text blocks; otherwise they are joined."""
    none_content: bool
    """Whether it reads a content of None beside tool calls; otherwise it gets ``""``."""

    def fit(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """``message`` as the template reads it; the same object where nothing changes."""
        changed: dict[str, Any] = {}
        content = message.get("content")
        if isinstance(content, list | tuple) and not self.text_blocks:
            if all(isinstance(b, Mapping) and isinstance(b.get("text"), str) for b in content):
                changed["content"] = "".join(block["text"] for block in content)
        elif content is None and "content" in message and not self.none_content:
            changed["content"] = ""
        called = message.get("tool_calls")
        if called:
            fitted = [self._fit_call(call) for call in called]
            if any(new is not old for new, old in zip(fitted, called, strict=True)):
                changed["tool_calls"] = fitted
        return {**message, **changed} if changed else message

    def _fit_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        fitted = self._fit_arguments(arguments)
        if fitted is arguments:
            return call
        function = {**function, "arguments": fitted}
        return {**call, "function": function} if "function" in call else function

    def _fit_arguments(self, arguments: Any) -> Any:
        if self.arguments == "string":
            if isinstance(arguments, Mapping):
                return json.dumps(arguments, ensure_ascii=False)
            return arguments
        if not isinstance(arguments, str):
            return arguments
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return parsed
        # A model may write what is no object. It only matters where the template cannot print it.
        return {} if self.arguments == "mapping" else arguments


def find_needs(render: Render) -> TemplateNeeds:
    """Try each form on ``render`` and keep the first that prints what it was given."""
    as_text = json.dumps({"k": _WORD})
    mapping = _printed(render, _called({"k": _WORD}, content=""), tools=_TOOLS)
    string = _printed(render, _called(as_text, content=""), tools=_TOOLS)
    string_works = string is not None and '\\"' not in _around(string)
    mapping_works = mapping is not None
    arguments: Literal["mapping", "either", "string"] = "either"
    if string_works and not mapping_works:
        arguments = "string"
    elif mapping_works and not string_works:
        arguments = "mapping"
    blocks = [{"role": "user", "content": [{"type": "text", "text": f"{_WORD}'"}]}]
    printed_blocks = _printed(render, blocks)
    none = _try(render, _called({"k": _WORD}, content=None), _TOOLS)
    if none is None:
        none = _try(render, _called(as_text, content=None), _TOOLS)
    return TemplateNeeds(
        arguments=arguments,
        text_blocks=printed_blocks is not None and "'type'" not in printed_blocks,
        none_content=none is not None and "None" not in none,
    )


def _called(arguments: Any, *, content: str | None) -> list[dict[str, Any]]:
    call = {
        "id": "abcdef123",
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "Seen.", "tool_call_id": "abcdef123", "name": "look"},
    ]


def _try(
    render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str | None:
    try:
        return render(messages, tools, False, None)
    except Exception:  # noqa: BLE001 - templates raise whatever they like; that is the answer
        return None


def _printed(
    render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> str | None:
    """The render, if it shows the word."""
    text = _try(render, messages, tools)
    return text if text is not None and _WORD in text else None


def _around(text: str) -> str:
    at = text.index(_WORD)
    return text[max(0, at - 12) : at + len(_WORD) + 4]
