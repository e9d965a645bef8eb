"""The real tail: one render of the request, read with a skeleton that may be remembered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tokenplane.capture.splice.cache import SpliceCache
from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.capture.splice.messages import REASONING_FIELDS, Conversation, texts
from tokenplane.capture.splice.parts import match_whole
from tokenplane.capture.splice.probes import (
    NONCES,
    end_of_turn,
    render,
    with_end_marks,
)
from tokenplane.capture.splice.renderer import ChatTemplateRenderer
from tokenplane.capture.splice.skeleton import ProbedRender, Skeleton, read_skeleton
from tokenplane.schemas.errors import SpliceError


@dataclass(frozen=True, slots=True)
class RealTail:
    """What the template prints of the real conversation, cut at the end of the last turn."""

    head: str
    """Everything up to the end mark of the last assistant turn, the mark included."""
    text: str
    """From the turn's terminator on."""
    stable: str
    """``text`` without the terminator and the generation prompt: it stays when the conversation
    goes on."""
    skeleton: Skeleton
    nonce: str
    notes: frozenset[str]
    probed: ProbedRender | None
    """The probed render, where one was made for this call."""

    def probed_or_read(
        self,
        renderer: ChatTemplateRenderer,
        conversation: Conversation,
        terminator_ids: Collection[int],
    ) -> ProbedRender | None:
        """The probed render of this very conversation; None where no assistant turn is in its
        history, which then has nothing for probes to tell."""
        if conversation.first_assistant == len(conversation.history) or self.probed is not None:
            return self.probed
        return read_skeleton(renderer, conversation, self.nonce, terminator_ids)


def read_tail(
    renderer: ChatTemplateRenderer,
    conversation: Conversation,
    terminator_ids: Collection[int],
    cache: SpliceCache,
) -> RealTail:
    """Render the real conversation and read its tail.

    A remembered skeleton that does not fit is read anew from this conversation, once: the shape
    that it is remembered by does not tell everything that a template may look at.

    Raises: SpliceError.
    """
    shape = conversation.shape
    nonce = free_nonce(conversation)
    remembered = cache.skeleton(shape)
    if remembered is not None:
        try:
            return _read(renderer, conversation, remembered, nonce, None)
        except SpliceError as error:
            if error.code == SpliceCode.TEMPLATE_RAISES:
                raise
    probed = read_skeleton(renderer, conversation, nonce, terminator_ids)
    tail = _read(renderer, conversation, probed.skeleton, nonce, probed)
    cache.put_skeleton(shape, probed.skeleton)
    return tail


def _read(
    renderer: ChatTemplateRenderer,
    conversation: Conversation,
    skeleton: Skeleton,
    nonce: str,
    probed: ProbedRender | None,
) -> RealTail:
    last = with_end_marks(conversation.assistant, nonce, force_content=skeleton.force_content)
    text = render(
        renderer,
        [*conversation.history, last, *conversation.new],
        conversation.tools,
        conversation.template_kwargs,
    )
    found = end_of_turn(text, nonce)
    if found is None:
        raise splice_error(SpliceCode.SENTINEL_MISSING)
    cut, _ = found
    forms = match_whole(
        text, skeleton.parts, conversation.new_texts, conversation.local_ids, start=cut
    )
    if forms is None:
        raise splice_error(SpliceCode.TAIL_DEPENDS_ON_TEXT, got=repr(text[cut : cut + 120]))
    notes = set(forms)
    if not skeleton.call_printed:
        notes.add("call_not_printed")
    if skeleton.ends_in_header:
        notes.add("terminator_is_header")
    begin = cut + len(skeleton.closers)
    end = len(text) - len(skeleton.prompt_text)
    if skeleton.open_end:
        last_part = skeleton.parts[-1]
        end = len(text) - (len(last_part) if isinstance(last_part, str) else 0)
    begin_stable = begin + len(skeleton.terminator)
    return RealTail(
        head=text[:cut],
        text=text[begin:],
        stable=text[begin_stable : max(begin_stable, end)],
        skeleton=skeleton,
        nonce=nonce,
        notes=frozenset(notes),
        probed=probed,
    )


def free_nonce(conversation: Conversation) -> str:
    """The first nonce that no text of the conversation holds.

    Raises: SpliceError ``marker_collision`` where each is in use.
    """
    held = [
        text
        for message in (*conversation.history, conversation.assistant, *conversation.new)
        for text in (*texts(message), *(str(message.get(name)) for name in REASONING_FIELDS))
    ]
    for nonce in NONCES:
        if not any(nonce in text for text in held):
            return nonce
    raise splice_error(SpliceCode.MARKER_COLLISION)
