"""``TokenizerChatRenderer``: the chat template and vocabulary of a transformers tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenplane.engine_adapter.chat.template_needs import TemplateNeeds, find_needs
from tokenplane.schemas.errors import ConfigError
from tokenplane.schemas.tokens import Int32Array, frozen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerChatRenderer:
    """Renders and encodes exactly as ``apply_chat_template`` does. Thread-safe.

    Before rendering, messages are brought into the form that this template reads (see
    ``TemplateNeeds``); callers pass the OpenAI form.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, terminator_ids: Iterable[int] | None = None
    ) -> None:
        """``terminator_ids`` defaults to what the tokenizer alone names.

        Raises: ConfigError if the tokenizer is not a fast one, has no chat template, or if there
            is no terminator.
        """
        self._tokenizer: Any = tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError("the tokenizer has no fast backend", got=type(tokenizer).__name__)
        if not self._tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template")
        self._backend: Any = self._tokenizer.backend_tokenizer
        given = read_terminator_ids(tokenizer) if terminator_ids is None else terminator_ids
        self.terminator_ids: frozenset[int] = frozenset(given)
        """The ids on which the model stops."""
        if not self.terminator_ids:
            raise ConfigError("neither the tokenizer nor the caller names a terminator")
        added = self._tokenizer.added_tokens_decoder
        self._texts: dict[int, str] = {int(i): str(token) for i, token in added.items()}
        """By id: of the added tokens, and of every other one that was asked for."""
        self._special = frozenset(int(i) for i, token in added.items() if token.special)
        self.needs: TemplateNeeds = find_needs(self._apply)
        """What this template asks of its messages."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """Ids that no ordinary text encodes to."""
        return self._special

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The text of the conversation; leaves its arguments as they are."""
        fitted = [self.needs.fit(message) for message in messages]
        return self._apply(fitted, tools, add_generation_prompt, template_kwargs)

    def encode(self, text: str) -> Int32Array:
        """int32[T], read-only: special-token strings become their ids, none is added."""
        # Straight to the backend: a tokenizer's own call sets its truncation each time, which two
        # threads cannot do at once.
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return frozen(np.array(ids, dtype=np.int32))

    def token_text(self, token_id: int) -> str:
        """The text of one id; bytes that are no text by themselves as U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = str(self._backend.decode([token_id], skip_special_tokens=False))
            self._texts[token_id] = text
        return text

    @cached_property
    def template_fingerprint(self) -> str:
        """Hex SHA-256 of the chat template's text (of its JSON where there are several)."""
        template = self._tokenizer.chat_template
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Hex SHA-256 of the backend's own serialization (vocabulary, merges, added tokens)."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **(template_kwargs or {}),
        )
        return str(text)


def open_renderer(directory: str | Path, terminators: Sequence[str] = ()) -> TokenizerChatRenderer:
    """The renderer of a tokenizer directory, with its ``generation_config.json`` where it has one.

    ``terminators`` names further terminator strings.

    Raises: ConfigError if the directory holds no usable tokenizer or lacks a named string.
    """
    from transformers import AutoTokenizer

    path = Path(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError("no tokenizer could be loaded", key=str(path)) from error
    config_file = path / "generation_config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else None
    ids = set(read_terminator_ids(tokenizer, config))
    for string in terminators:
        token_id = tokenizer.get_vocab().get(string)
        if token_id is None:
            raise ConfigError("the tokenizer has no such token", got=repr(string))
        ids.add(int(token_id))
    return TokenizerChatRenderer(tokenizer, ids)


def read_terminator_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: Mapping[str, Any] | None = None
) -> frozenset[int]:
    """The ids on which the model stops: the tokenizer's, and those of generation_config.json.

    A tokenizer names one only, and for several models not the one that ends a turn.
    """
    named = [tokenizer.eos_token_id, (generation_config or {}).get("eos_token_id")]
    flat = [i for entry in named for i in (entry if isinstance(entry, list | tuple) else [entry])]
    return frozenset(i for i in flat if isinstance(i, int) and not isinstance(i, bool))
