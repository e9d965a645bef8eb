"""The seam to a chat template and its tokenizer, and the shapes of what passes through it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from tokenplane.schemas.tokens import Int32Array

type Message = Mapping[str, Any]
"""One chat message in the OpenAI form: ``role``, ``content``, ``chat.tool_calls``, ..."""
type Tool = Mapping[str, Any]
"""One tool in the OpenAI form: ``{"type": "function", "function": {...}}``."""


class ChatTemplateRenderer(Protocol):
    """A chat template with its tokenizer.

    One object stands for one fixed template and vocabulary; it may be called from several threads.
    """

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The text of the conversation. Does not change its arguments.

        Raises: any exception, where the template rejects the conversation.
        """

    def encode(self, text: str) -> Int32Array:
        """int32[T]: the ids of ``text``; special-token strings become their ids, none is added."""

    def token_text(self, token_id: int) -> str:
        """The text of one id, a special token as its string; bytes that are no text as U+FFFD."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """The ids of special tokens: those that no ordinary text encodes to."""
