"""The skeleton of a tail: what a template prints after the last turn, whatever is said."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.capture.splice.messages import Conversation, calls
from tokenplane.capture.splice.parts import Part, TextSlot, split_parts
from tokenplane.capture.splice.probes import END, Mark, Probes, end_of_turn, probe, render
from tokenplane.capture.splice.renderer import ChatTemplateRenderer
from tokenplane.schemas.errors import SpliceError


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Holds for every conversation of one shape; the real render decides whether it does."""

    parts: tuple[Part, ...]
    """The tail from the end mark on; the first part is a literal that holds the terminator."""
    closers: str
    """What the template prints between the turn's content or arguments and its terminator."""
    terminator: str
    """The string of the terminator that the template prints."""
    terminator_id: int
    ends_in_header: bool | None
    """Whether the terminator is the header of the next message; None where that is unknown."""
    call_printed: bool
    """The last tool call's arguments are printed; True without calls."""
    force_content: bool
    """The template prints no tool calls, so the end mark had to go into the empty content."""
    prompt_text: str
    """What only the generation prompt adds at the end; ``""`` with ``open_end``."""
    open_end: bool
    """The generation prompt cannot be told from the end of the last message."""


@dataclass(frozen=True, slots=True)
class ProbedRender:
    """A skeleton with the render that it came from, which shows the history's marks."""

    skeleton: Skeleton
    probes: Probes
    text: str
    marks: Sequence[Mark]


def read_skeleton(
    renderer: ChatTemplateRenderer,
    conversation: Conversation,
    nonce: str,
    terminator_ids: Collection[int],
) -> ProbedRender:
    """Render ``conversation`` with probes (three or four renders) and read its tail.

    Raises: SpliceError.
    """
    last = conversation.assistant
    probes = probe(conversation, nonce)
    text = _render(renderer, probes, conversation)
    found = end_of_turn(text, nonce)
    force = found is None and bool(calls(last)) and not last.get("content")
    if force:
        probes = probe(conversation, nonce, force_content=True)
        text = _render(renderer, probes, conversation)
        found = end_of_turn(text, nonce)
    if found is None:
        raise splice_error(SpliceCode.SENTINEL_MISSING)
    cut, arguments_shown = found
    marks = probes.find(text)
    _check_places(marks, cut, len(conversation.new_texts))
    parts = split_parts(text, marks, start=cut, end=len(text))
    glue = parts[0] if parts and isinstance(parts[0], str) else ""
    closers, terminator, terminator_id = _find_terminator(
        renderer, glue, text, marks, terminator_ids
    )
    if closers.strip():
        if not calls(last):
            raise splice_error(SpliceCode.TEXT_BEFORE_TERMINATOR, got=repr(closers[:80]))
        if not arguments_shown:
            raise splice_error(SpliceCode.CALL_NOT_RENDERED, got=repr(closers[:80]))
    prompt_text = _generation_prompt(renderer, probes, conversation, text, parts)
    skeleton = Skeleton(
        parts=tuple(parts),
        closers=closers,
        terminator=terminator,
        terminator_id=terminator_id,
        ends_in_header=_ends_in_header(renderer, probes, conversation, terminator, terminator_ids),
        call_printed=arguments_shown or not calls(last),
        force_content=force,
        prompt_text=prompt_text or "",
        open_end=prompt_text is None,
    )
    return ProbedRender(skeleton, probes, text, marks)


def first_of(text: str, strings: Collection[str]) -> tuple[int, str] | None:
    """(Index, string) of the first of ``strings`` in ``text``; the longer of two at one index."""
    hits = [(text.find(s), -len(s), s) for s in strings if s and s in text]
    if not hits:
        return None
    at, _, string = min(hits)
    return at, string


def _render(renderer: ChatTemplateRenderer, probes: Probes, conversation: Conversation) -> str:
    messages = [*probes.history, probes.assistant, *probes.new]
    return render(renderer, messages, probes.tools, conversation.template_kwargs)


def _check_places(marks: Sequence[Mark], cut: int, new_count: int) -> None:
    """Every new text once and in order behind ``cut``, nothing else there, none of it before."""
    tail = [m for m in marks if m.start >= cut]
    refusals = {
        "old": SpliceCode.OLD_TEXT_IN_TAIL,
        "ast": SpliceCode.OLD_TEXT_IN_TAIL,
        "own": SpliceCode.OWN_TEXT_IN_TAIL,
        "tool": SpliceCode.TOOLS_IN_TAIL,
    }
    for m in tail:
        if m.kind in refusals:
            raise splice_error(refusals[m.kind])
    if any(m.kind == "new" and m.start < cut for m in marks):
        raise splice_error(SpliceCode.NEW_TEXT_IN_HEAD)
    got = [m.index for m in tail if m.kind == "new"]
    if got != list(range(new_count)):
        raise splice_error(
            SpliceCode.NEW_TEXT_LOST_OR_MOVED, expected=list(range(new_count)), got=got
        )
    if any(m.kind == "id" and m.index >= 100_000 for m in tail):
        raise splice_error(SpliceCode.OLD_TEXT_IN_TAIL, got="the id of an earlier tool call")


def _find_terminator(
    renderer: ChatTemplateRenderer,
    glue: str,
    text: str,
    marks: Sequence[Mark],
    terminator_ids: Collection[int],
) -> tuple[str, str, int]:
    """(Closers, terminator, its id). Only the first literal is searched: texts may hold one.

    Where no terminator of the model is printed, a special token serves that also closes other
    messages (harmony's history closes turns with a token on which the model does not stop).
    """
    names = {renderer.token_text(i): i for i in terminator_ids}
    hit = first_of(glue, names)
    if hit is not None:
        return glue[: hit[0]], hit[1], names[hit[1]]
    lead = len(glue) - len(glue.lstrip())
    others = [m.end for m in marks if m.kind in ("old", "new")]
    for token_id in renderer.special_token_ids:
        string = renderer.token_text(token_id)
        if string and glue.startswith(string, lead):
            closes_others = (text.startswith(string, _after_space(text, at)) for at in others)
            if any(closes_others):
                return glue[:lead], string, token_id
    raise splice_error(SpliceCode.NO_TERMINATOR, expected=sorted(names), got=repr(glue[:80]))


def _after_space(text: str, at: int) -> int:
    match = re.compile(r"\s*").match(text, at)
    return match.end() if match else at


def _ends_in_header(
    renderer: ChatTemplateRenderer,
    probes: Probes,
    conversation: Conversation,
    terminator: str,
    terminator_ids: Collection[int],
) -> bool | None:
    try:
        alone = render(
            renderer,
            [*probes.history, probes.assistant],
            probes.tools,
            conversation.template_kwargs,
            add_generation_prompt=False,
        )
    except SpliceError:
        return None
    ends = [m.end for m in probes.find(alone) if m.kind == END]
    if not ends:
        return None
    rest = alone[ends[-1] :]
    return first_of(rest, {terminator, *map(renderer.token_text, terminator_ids)}) is None


def _generation_prompt(
    renderer: ChatTemplateRenderer,
    probes: Probes,
    conversation: Conversation,
    text: str,
    parts: Sequence[Part],
) -> str | None:
    """What the generation prompt adds; None where the renders do not show it."""
    try:
        without = render(
            renderer,
            [*probes.history, probes.assistant, *probes.new],
            probes.tools,
            conversation.template_kwargs,
            add_generation_prompt=False,
        )
    except SpliceError:
        return None
    last = parts[-1] if parts and not isinstance(parts[-1], TextSlot) else ""
    added = text[len(without) :]
    if not text.startswith(without) or not isinstance(last, str) or len(added) > len(last):
        return None
    return added
