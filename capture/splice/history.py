"""Proof that, outside assistant turns, the prompt is still what the staged prefix holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenplane.capture.splice.cache import ProvenHistory
from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.capture.splice.messages import Conversation, has_media
from tokenplane.capture.splice.probes import render
from tokenplane.capture.splice.renderer import ChatTemplateRenderer, Message
from tokenplane.capture.splice.segments import read_segments
from tokenplane.capture.splice.skeleton import ProbedRender
from tokenplane.schemas.errors import SpliceError
from tokenplane.schemas.tokens import Int32Array


def prove_again(head: str, proven: ProvenHistory) -> None:
    """Check that the real ``head`` still holds every proven segment in order, the opening first.

    Raises: SpliceError ``opening_changed`` or ``history_changed``.
    """
    opening, *rest = proven.segments()
    _expect_opening(head, opening)
    _expect_in_order(head, rest, start=len(opening))


def prove_history(
    renderer: ChatTemplateRenderer,
    conversation: Conversation,
    probed: ProbedRender | None,
    head: str,
    prefix_token_ids: Int32Array,
) -> ProvenHistory:
    """Prove the history from nothing: two to five renders, and its texts encoded.

    ``head`` is the real render up to the last turn's end mark. ``probed`` must be given where the
    history has an assistant turn. Media blocks are expanded by processors, so beside them texts are
    compared and ids are not.

    Raises: SpliceError.
    """
    opening = _opening(renderer, conversation)
    _expect_opening(head, opening)
    opaque = any(map(has_media, conversation.history))
    if not opaque:
        _expect_opening_ids(renderer, opening, prefix_token_ids)
    proven = ProvenHistory(opening, None)
    if conversation.first_assistant == len(conversation.history) or probed is None:
        return proven
    found = read_segments(renderer, conversation, probed, head, start=len(opening))
    before = _render_real(renderer, conversation, conversation.history, prompt=True)
    _expect_in_order(before, found, start=0)
    specials = frozenset(renderer.special_token_ids)
    at = 0
    for segment in found:
        if not opaque:
            at = _expect_ids(renderer, segment, specials, prefix_token_ids, at)
        proven = ProvenHistory(segment, proven)
    return proven


def _opening(renderer: ChatTemplateRenderer, conversation: Conversation) -> str:
    """What the template prints for the messages before the first assistant turn."""
    messages = conversation.history[: conversation.first_assistant]
    if not messages:
        return ""
    opening = _render_real(renderer, conversation, messages, prompt=True)
    try:
        stable = _render_real(renderer, conversation, messages, prompt=False)
    except SpliceError:
        stable = ""
    if stable and opening.startswith(stable):
        return stable
    # The generation prompt is not simply appended: everything up to the last special token stays.
    specials = [renderer.token_text(i) for i in renderer.special_token_ids]
    ends = [opening.rfind(s) + len(s) for s in specials if s and s in opening]
    return opening[: max(ends)] if ends else opening


def _render_real(
    renderer: ChatTemplateRenderer,
    conversation: Conversation,
    messages: Sequence[Message],
    *,
    prompt: bool,
) -> str:
    return render(
        renderer,
        messages,
        conversation.tools,
        conversation.template_kwargs,
        add_generation_prompt=prompt,
    )


def _expect_opening(head: str, opening: str) -> None:
    if not head.startswith(opening):
        at = next((i for i, (a, b) in enumerate(zip(head, opening, strict=False)) if a != b), 0)
        raise splice_error(
            SpliceCode.OPENING_CHANGED,
            expected=repr(opening[max(0, at - 20) : at + 40]),
            got=repr(head[max(0, at - 20) : at + 40]),
        )


def _expect_in_order(text: str, segments: Sequence[str], *, start: int) -> None:
    at = start
    for segment in segments:
        found = text.find(segment, at)
        if found < 0:
            raise splice_error(SpliceCode.HISTORY_CHANGED, expected=repr(segment[:120]))
        at = found + len(segment)


def _expect_opening_ids(
    renderer: ChatTemplateRenderer, opening: str, prefix_token_ids: Int32Array
) -> None:
    if not opening:
        return
    ids = _up_to_last_special(renderer.encode(opening), frozenset(renderer.special_token_ids))
    if not np.array_equal(prefix_token_ids[: len(ids)], ids):
        shared = min(len(ids), len(prefix_token_ids))
        differs = np.flatnonzero(prefix_token_ids[:shared] != ids[:shared])
        at = int(differs[0]) if len(differs) else shared
        raise splice_error(SpliceCode.PREFIX_OPENING_DIFFERS, got=f"first difference at token {at}")


def _up_to_last_special(ids: Int32Array, specials: frozenset[int]) -> Int32Array:
    """Without the ids at the end that could merge with whatever text follows."""
    for at in range(len(ids) - 1, 0, -1):
        if int(ids[at]) in specials:
            return ids[: at + 1]
    return ids[:-1]


def _expect_ids(
    renderer: ChatTemplateRenderer,
    segment: str,
    specials: frozenset[int],
    prefix_token_ids: Int32Array,
    start: int,
) -> int:
    """Index behind the segment's ids in the prefix; they must stand at or after ``start``."""
    # The first id may merge with what precedes it, as the last ones may: only specials never do.
    ids = renderer.encode(segment)
    inner = [at for at, i in enumerate(ids.tolist()) if i in specials]
    needle = ids[inner[0] : inner[-1] + 1] if len(inner) > 1 else ids[1:-1]
    at = find_ids(prefix_token_ids, needle, start)
    if at < 0:
        raise splice_error(SpliceCode.HISTORY_NOT_IN_PREFIX, expected=repr(segment[:120]))
    return at + len(needle)


def find_ids(haystack: Int32Array, needle: Int32Array, start: int) -> int:
    """Index of the first occurrence of ``needle`` at or after ``start``; -1 without any."""
    data, wanted, width = haystack.tobytes(), needle.tobytes(), haystack.itemsize
    at = data.find(wanted, start * width)
    while at % width and at >= 0:
        at = data.find(wanted, at + 1)
    return at // width if at >= 0 else -1
