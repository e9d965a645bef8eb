"""Tool calls as Hermes and Qwen write them: a JSON object between ``<tool_call>`` signs."""

from __future__ import annotations

from tokenplane.engine_adapter.chat.tool_call_parts import (
    ParsedMessage,
    ToolCall,
    read_call,
    skip_space,
    with_calls,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT_OPEN, _THOUGHT_CLOSE = "<think>", "</think>"


class HermesParser:
    """Reads every closed ``<tool_call>`` behind the model's thoughts."""

    name = "hermes"
    markers = frozenset({_OPEN, _CLOSE})
    id_length: int | None = None

    def parse(self, text: str) -> ParsedMessage:
        """See ``ToolCallParser``. A call that is not closed was cut off: it stays text."""
        parts, calls = [], []
        kept, at = 0, _after_thoughts(text)
        while (opened := text.find(_OPEN, at)) >= 0:
            try:
                call, at = self._call(text, opened + len(_OPEN))
            except ValueError:
                at = opened + len(_OPEN)
                continue
            parts.append(text[kept:opened])
            calls.append(call)
            kept = at
        return with_calls([*parts, text[kept:]], calls, text)

    def _call(self, text: str, at: int) -> tuple[ToolCall, int]:
        call, end = read_call(text, skip_space(text, at), "arguments", "parameters")
        end = skip_space(text, end)
        if not text.startswith(_CLOSE, end):
            raise ValueError("the call is not closed")
        return call, end + len(_CLOSE)


def _after_thoughts(text: str) -> int:
    """Where the answer proper starts: a call that the model only thinks about is none."""
    closed = text.rfind(_THOUGHT_CLOSE)
    if closed >= 0:
        return closed + len(_THOUGHT_CLOSE)
    return len(text) if text.lstrip().startswith(_THOUGHT_OPEN) else 0
