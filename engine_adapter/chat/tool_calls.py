"""The seam between a model's text and OpenAI tool calls, and which parser a model needs.

A parser's output is for the agent only. It never touches a token: the next turn is conditioned on
the staged ids, however the text was taken apart (CASES of retokenized tool calls end here).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, Protocol

from tokenplane.engine_adapter.chat.tool_call_hermes import HermesParser
from tokenplane.engine_adapter.chat.tool_call_llama import LlamaJsonParser, PythonicParser
from tokenplane.engine_adapter.chat.tool_call_mistral import MistralParser
from tokenplane.engine_adapter.chat.tool_call_parts import ParsedMessage, ToolCall, plain
from tokenplane.schemas.errors import ConfigError

__all__ = [
    "PARSERS",
    "ParsedMessage",
    "ParserName",
    "ToolCall",
    "ToolCallParser",
    "detect_parser",
    "mint_call_id",
    "open_parser",
    "split_reasoning",
]

ParserName = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "none"]


class ToolCallParser(Protocol):
    """Takes an answer's text apart. Stateless and thread-safe."""

    name: str
    markers: frozenset[str]
    """Special tokens that it must see in the text."""
    id_length: int | None
    """Length of the call ids that the family's template accepts; None for OpenAI's form."""

    def parse(self, text: str) -> ParsedMessage:
        """Content and calls. Never raises; what is not a well-formed call stays in the content."""
        ...


class NoParser:
    """Leaves every text as it is."""

    name = "none"
    markers: frozenset[str] = frozenset()
    id_length: int | None = None

    def parse(self, text: str) -> ParsedMessage:
        """The text as content."""
        return plain(text)


PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "none": NoParser,
}


def open_parser(name: str, chat_template: str = "") -> ToolCallParser:
    """The parser of that name; ``auto`` looks at the template.

    Raises:
        ConfigError: no such parser.
    """
    chosen = detect_parser(chat_template) if name == "auto" else name
    if chosen not in PARSERS:
        raise ConfigError("no such tool parser", expected=" or ".join(PARSERS), got=name)
    return PARSERS[chosen]()


def detect_parser(chat_template: str) -> str:
    """The family whose signs the template prints.

    A template that prints no calls says nothing about what its model writes; the hermes form is
    taken then, since it never mistakes ordinary text for a call.
    """
    if "<function=" in chat_template:
        return "none"  # calls as XML parameters: no parser here reads them, and a guess would harm
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<tool_call>" in chat_template:
        return "hermes"
    if "<|python_tag|>" in chat_template or '"parameters": ' in chat_template:
        return "llama3_json"
    return "hermes"


def mint_call_id(response_id: str, index: int, length: int | None = None) -> str:
    """An id that is the same whenever the same answer is built again, and unique otherwise.

    ``call_`` and 24 hex digits; with ``length``, that many hex digits.
    """
    digest = hashlib.sha256(f"{response_id}/{index}".encode()).hexdigest()
    return digest[:length] if length is not None else f"call_{digest[:24]}"


def split_reasoning(text: str) -> tuple[str | None, str]:
    """(reasoning, the rest) of a text that thinks between ``<think>`` and ``</think>``.

    The opening sign may stand in the prompt already. A text that was cut off while thinking is
    all reasoning.
    """
    opened = text.lstrip().startswith("<think>")
    before, closed, after = text.partition("</think>")
    if not opened and not closed:
        return None, text
    thought = before.lstrip().removeprefix("<think>").strip()
    return thought or None, after.lstrip("\n")
