"""Renderers for the splice tests: a template with a one-sign-per-token vocabulary."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tokenplane.capture.splice import Message, Tool
from tokenplane.engine_adapter.chat.template_needs import TemplateNeeds, find_needs
from tokenplane.schemas.tokens import Int32Array

FIRST_SPECIAL = 0x110000
"""Ordinary text encodes to code points, special strings to ids from here on."""


class TextRenderer:
    """Any jinja template, over a vocabulary of single signs and the given special strings."""

    def __init__(
        self,
        template: str,
        specials: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
        *,
        names: Mapping[str, str] | None = None,
        clock: Callable[[], datetime.datetime] | None = None,
    ) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.template = template
        self.renders = 0
        self.encoded_signs = 0
        self._compiled: Any = _compile_jinja_template(template)
        self._clock = clock
        self._names = dict(names or {})
        self._ids = {text: FIRST_SPECIAL + n for n, text in enumerate(specials)}
        longest_first = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._texts = {i: text for text, i in self._ids.items()}
        self.needs: TemplateNeeds = find_needs(self._apply)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        self.renders += 1
        fitted = [self.needs.fit(message) for message in messages]
        return self._apply(fitted, tools, add_generation_prompt, template_kwargs)

    def encode(self, text: str) -> Int32Array:
        self.encoded_signs += len(text)
        ids: list[int] = []
        for piece in self._split.split(text):
            ids += [self._ids[piece]] if piece in self._ids else map(ord, piece)
        return np.array(ids, dtype=np.int32)

    def token_text(self, token_id: int) -> str:
        return self._texts.get(token_id) or chr(token_id)

    @property
    def special_token_ids(self) -> Collection[int]:
        return self._texts.keys()

    def special(self, text: str) -> int:
        return self._ids[text]

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        more: dict[str, Any] = {**self._names, **(template_kwargs or {})}
        if self._clock is not None:
            more["strftime_now"] = lambda form: self._clock().strftime(form)
        text = self._compiled.render(
            messages=list(messages),
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **more,
        )
        return str(text)
