"""What a message says and which shape it has, apart from what it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenplane.capture.splice.renderer import Message, Tool
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.fingerprints import canonical_json

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_SHAPED_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", *REASONING_FIELDS})


@dataclass(frozen=True)
class Conversation:
    """A request as the splice sees it: ``history``, the last ``assistant`` turn, ``new``."""

    history: Sequence[Message]
    assistant: Message
    new: Sequence[Message]
    tools: Sequence[Tool] | None = None
    template_kwargs: Mapping[str, Any] | None = field(default=None)

    @cached_property
    def new_texts(self) -> list[str]:
        """The texts of ``new`` in order, empty ones left out."""
        return [text for message in self.new for text in texts(message)]

    @cached_property
    def local_ids(self) -> list[str]:
        """The tool-call ids of ``assistant`` and ``new``, each once, in order."""
        return list(dict.fromkeys(i for m in (self.assistant, *self.new) for i in call_ids(m)))

    @property
    def first_assistant(self) -> int:
        """Index of the first assistant turn; ``len(history)`` where it is the last one."""
        roles = [message.get("role") for message in self.history]
        return roles.index("assistant") if "assistant" in roles else len(roles)

    @cached_property
    def shape(self) -> str:
        """Digest of what the tail's skeleton is remembered by.

        Says nothing of texts, of tool-call ids, or of how long the history is: a growing
        conversation keeps it. A skeleton that does not fit is noticed by the real render, so a
        coarse key costs renders, never a wrong suffix.
        """
        roles = [message.get("role") for message in self.history]
        return digest(
            self.tools,
            self.template_kwargs,
            [roles[:1], roles[-1:], "assistant" in roles, "tool" in roles],
            [_shape(message, self.local_ids) for message in (self.assistant, *self.new)],
        )


def digest(*values: Any) -> str:
    """Hex SHA-256 of values that JSON can express (others by their ``repr``)."""
    try:
        text = canonical_json(values)
    except InvalidRecordError:  # a lone surrogate, or a type that JSON does not have
        text = json.dumps(values, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def texts(message: Message) -> list[str]:
    """The non-empty texts of a message's content, in order: one, or one per text block."""
    content = message.get("content")
    if isinstance(content, str):
        return [content] if content else []
    if isinstance(content, Sequence):
        return [b["text"] for b in content if _is_text_block(b)]
    return []


def has_media(message: Message) -> bool:
    """Whether the content has a block that is not text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return False
    return any(not (isinstance(block, Mapping) and "text" in block) for block in content)


def with_texts(content: Any, replace: Callable[[str], str]) -> Any:
    """``content`` with each non-empty text replaced, its type and its blocks kept."""
    if isinstance(content, str):
        return replace(content) if content else content
    if isinstance(content, Sequence):
        return [{**b, "text": replace(b["text"])} if _is_text_block(b) else b for b in content]
    return content


def with_end(content: Any, mark: str) -> Any:
    """``content`` with ``mark`` appended to its last text; the mark alone where it has none."""
    if isinstance(content, str):
        return content + mark
    if isinstance(content, Sequence):
        blocks = list(content)
        for at in range(len(blocks) - 1, -1, -1):
            if isinstance(blocks[at], Mapping) and isinstance(blocks[at].get("text"), str):
                blocks[at] = {**blocks[at], "text": blocks[at]["text"] + mark}
                return blocks
        return [*blocks, {"type": "text", "text": mark}]
    return mark


def calls(message: Message) -> list[Mapping[str, Any]]:
    """The tool calls of a message, possibly none."""
    return list(message.get("tool_calls") or ())


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a tool call that has ``name`` and ``arguments``."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def call_ids(message: Message) -> list[str]:
    """Every tool-call id in a message, those of its own calls and the one that it answers."""
    ids = [call.get("id") for call in calls(message)]
    ids.append(message.get("tool_call_id"))
    return [i for i in ids if isinstance(i, str) and i]


def _is_text_block(block: Any) -> bool:
    return isinstance(block, Mapping) and isinstance(block.get("text"), str) and bool(block["text"])


def _shape(message: Message, ids: Sequence[str]) -> list[Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        kind: Any = [type(content).__name__, bool(content), THINK_CLOSE in (content or "")]
    else:
        kind = [
            [b.get("type"), bool(b.get("text"))] if _is_text_block(b) or "text" in b else b
            for b in content
        ]
    called = [
        [
            function_of(call).get("name"),
            type(function_of(call).get("arguments")).__name__,
            {k: v for k, v in call.items() if k not in ("id", "function", "name", "arguments")},
            sorted(call),
        ]
        for call in calls(message)
    ]
    return [
        message.get("role"),
        kind,
        called,
        message.get("tool_calls") is None,
        [ids.index(i) for i in call_ids(message)],
        [name for name in REASONING_FIELDS if message.get(name)],
        {name: value for name, value in message.items() if name not in _SHAPED_FIELDS},
    ]
