"""Probes: a conversation whose texts are unique marks, and where a render shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.capture.splice.messages import (
    REASONING_FIELDS,
    THINK_CLOSE,
    THINK_OPEN,
    Conversation,
    call_ids,
    calls,
    function_of,
    with_end,
    with_texts,
)
from tokenplane.capture.splice.renderer import ChatTemplateRenderer, Message, Tool

NONCES = ("zqv", "jxk", "wvz")
"""Letters only, so that a mark survives trimming, JSON and HTML escaping. Three, because a
conversation may hold one (for instance, when it talks about this file)."""

END = "end"
"""Kind of the marks that end the last assistant turn."""
ARGUMENTS = 1
"""Index of the end mark in the arguments of the last tool call; 0 is the one in the content."""

type Kind = Literal["old", "ast", "own", "new", "tool", "id", "end"]


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark in a render: ``text[start:end]``."""

    kind: str
    index: int
    start: int
    end: int


@dataclass
class Probes:
    """A probed conversation: what to render, and what each mark stands for."""

    nonce: str
    history: list[Message] = field(default_factory=list)
    assistant: dict[str, Any] = field(default_factory=dict)
    new: list[Message] = field(default_factory=list)
    tools: list[Tool] | None = None
    owners: list[int] = field(default_factory=list)
    """Message index (in the history) of each "old" and "ast" mark, by the mark's index."""
    originals: list[str] = field(default_factory=list)
    """The text that each "old" and "ast" mark stands for."""

    def find(self, text: str) -> list[Mark]:
        """Every mark in ``text``, in order."""
        return find_marks(text, self.nonce)


def find_marks(text: str, nonce: str) -> list[Mark]:
    """Every mark of ``nonce`` in ``text``, in order."""
    pattern = rf"{nonce}([a-z]+?)(\d{{5}}){nonce}|{nonce.upper()}(\d{{6}})"
    return [
        Mark(m[1] or "id", int(m[2] or m[3]), m.start(), m.end())
        for m in re.finditer(pattern, text)
    ]


def mark(nonce: str, kind: Kind, index: int) -> str:
    """The text of a mark. Tool-call ids get nine characters, which some templates insist on."""
    if kind == "id":
        return f"{nonce.upper()}{index:06d}"
    return f"{nonce}{kind}{index:05d}{nonce}"


def probe(conversation: Conversation, nonce: str, *, force_content: bool = False) -> Probes:
    """Replace every text of ``conversation`` by a mark.

    Kept as they are: roles, names, emptiness, block types, whether reasoning is inside the content,
    and argument types. ``force_content`` puts the end mark into an empty content beside calls too.
    """
    probes = Probes(nonce)
    ids = {real: mark(nonce, "id", n) for n, real in enumerate(conversation.local_ids)}
    for index, message in enumerate(conversation.history):
        for real in call_ids(message):
            ids.setdefault(real, mark(nonce, "id", 100_000 + len(ids)))
        probes.history.append(_probe_old(probes, index, message, ids))
    new_count = 0

    def new_mark(_: str) -> str:
        nonlocal new_count
        new_count += 1
        return mark(nonce, "new", new_count - 1)

    for message in conversation.new:
        probed = _with_ids(message, ids)
        probed["content"] = with_texts(message.get("content"), new_mark)
        probes.new.append(_same_keys(message, probed))
    probes.assistant = _probe_last(conversation.assistant, nonce, ids, force_content)
    probes.tools = _probe_tools(conversation.tools, nonce)
    return probes


def with_end_marks(assistant: Message, nonce: str, *, force_content: bool) -> dict[str, Any]:
    """The last turn as it is, with end marks behind its content and in its last arguments."""
    marked = dict(assistant)
    called = calls(assistant)
    if force_content or not called or assistant.get("content"):
        marked["content"] = with_end(assistant.get("content"), mark(nonce, "end", 0))
    if called:
        marked["tool_calls"] = _with_arguments(called, mark(nonce, "end", ARGUMENTS))
    return marked


def end_of_turn(text: str, nonce: str) -> tuple[int, bool] | None:
    """(Index behind the last end mark, whether the arguments' mark shows); None without any.

    Raises: SpliceError ``sentinel_repeated`` if an end mark shows twice.
    """
    ends = [m for m in find_marks(text, nonce) if m.kind == END]
    if not ends:
        return None
    indices = [m.index for m in ends]
    if len(set(indices)) < len(indices):
        raise splice_error(SpliceCode.SENTINEL_REPEATED, got=f"{len(ends)} marks")
    return ends[-1].end, ARGUMENTS in indices


def render(
    renderer: ChatTemplateRenderer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    template_kwargs: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """``renderer.render`` with every failure as SpliceError ``template_raises``."""
    try:
        return renderer.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )
    except Exception as error:
        got = f"{type(error).__name__}: {str(error)[:200]}"
        raise splice_error(SpliceCode.TEMPLATE_RAISES, got=got) from error


def _probe_old(
    probes: Probes, index: int, message: Message, ids: Mapping[str, str]
) -> dict[str, Any]:
    kind: Kind = "ast" if message.get("role") == "assistant" else "old"

    def next_mark(original: str) -> str:
        probes.owners.append(index)
        probes.originals.append(original)
        return mark(probes.nonce, kind, len(probes.owners) - 1)

    def replace(text: str) -> str:
        if kind == "ast" and THINK_CLOSE in text:
            reasoning = next_mark("")
            return f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{next_mark('')}"
        return next_mark(text)

    probed = _with_ids(message, ids)
    probed["content"] = with_texts(message.get("content"), replace)
    for name in REASONING_FIELDS:
        if isinstance(message.get(name), str) and message[name]:
            probed[name] = next_mark(message[name])
    if calls(message):
        probed["tool_calls"] = _with_arguments(probed["tool_calls"], next_mark(""))
    return _same_keys(message, probed)


def _probe_last(
    message: Message, nonce: str, ids: Mapping[str, str], force_content: bool
) -> dict[str, Any]:
    own = 0

    def next_mark() -> str:
        nonlocal own
        own += 1
        return mark(nonce, "own", own - 1)

    def replace(text: str) -> str:
        # Replaced, so that nothing of the real text can be taken for the template's own.
        return f"{THINK_OPEN}\n{next_mark()}\n{THINK_CLOSE}\n\n" if THINK_CLOSE in text else ""

    probed = _with_ids(message, ids)
    content = message.get("content")
    had_text = bool(content)
    probed["content"] = with_texts(content, replace)
    for name in REASONING_FIELDS:
        if isinstance(message.get(name), str) and message[name]:
            probed[name] = next_mark()
    force = force_content or had_text
    return _same_keys(message, with_end_marks(probed, nonce, force_content=force))


def _with_arguments(called: Sequence[Mapping[str, Any]], value: str) -> list[Mapping[str, Any]]:
    """The calls, the last one with ``value`` as its only argument; as text where it was text."""
    function = dict(function_of(called[-1]))
    as_text = isinstance(function.get("arguments"), str)
    function["arguments"] = json.dumps({"k": value}) if as_text else {"k": value}
    last = {**called[-1], "function": function} if "function" in called[-1] else function
    return [*called[:-1], last]


def _with_ids(message: Message, ids: Mapping[str, str]) -> dict[str, Any]:
    probed = dict(message)
    answered = message.get("tool_call_id")
    if isinstance(answered, str) and answered:
        probed["tool_call_id"] = ids[answered]
    called = calls(message)
    if called:
        probed["tool_calls"] = [
            {**call, "id": ids[call["id"]]} if call.get("id") in ids else call for call in called
        ]
    return probed


def _same_keys(message: Message, probed: dict[str, Any]) -> dict[str, Any]:
    """Without a ``content`` of None that the message did not have: templates test for the key."""
    if "content" not in message and probed.get("content") is None:
        probed.pop("content", None)
    return probed


def _probe_tools(tools: Sequence[Tool] | None, nonce: str) -> list[Tool] | None:
    if tools is None:
        return None
    probed: list[Tool] = []
    for index, tool in enumerate(tools):
        function = {**function_of(tool), "description": mark(nonce, "tool", index)}
        probed.append({**tool, "function": function} if "function" in tool else function)
    return probed
