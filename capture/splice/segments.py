"""The parts of a history outside assistant turns, read from two probed renders of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.capture.splice.messages import Conversation
from tokenplane.capture.splice.parts import Part, TextSlot, match_parts
from tokenplane.capture.splice.probes import Mark, probe, render
from tokenplane.capture.splice.renderer import ChatTemplateRenderer
from tokenplane.capture.splice.skeleton import ProbedRender, first_of


@dataclass(frozen=True, slots=True)
class _Place:
    """One mark of an earlier message with what is printed up to the neighbouring marks."""

    mark: Mark
    previous_kind: str
    before: str
    after: str
    next_kind: str


def read_segments(
    renderer: ChatTemplateRenderer,
    conversation: Conversation,
    probed: ProbedRender,
    head: str,
    *,
    start: int,
) -> list[str]:
    """The segments of the real ``head`` behind the opening, one per message text, in order.

    ``probed`` is the whole conversation; one more render gives the history alone, as it was when
    the last turn was sampled. What the two print alike around each text must stand in ``head``
    around the real text.

    Raises: SpliceError ``history_reordered`` or ``history_changed`` where they differ.
    """
    probes = probe(conversation, probed.probes.nonce)
    alone = render(renderer, probes.history, probes.tools, conversation.template_kwargs)
    specials = {renderer.token_text(i) for i in renderer.special_token_ids}
    segments = _common_segments(
        conversation,
        probes.owners,
        _places(probed.text, probed.marks),
        _places(alone, probes.find(alone)),
        specials,
    )
    found: list[str] = []
    at = start
    for segment in segments:
        begin, at = _locate(head, segment, probes.originals, at)
        found.append(head[begin:at])
    return found


def _places(text: str, marks: Sequence[Mark]) -> list[_Place]:
    places = []
    for number, m in enumerate(marks):
        if m.kind != "old":
            continue
        previous = marks[number - 1].end if number else 0
        previous_kind = marks[number - 1].kind if number else ""
        following = marks[number + 1].start if number + 1 < len(marks) else len(text)
        kind = marks[number + 1].kind if number + 1 < len(marks) else ""
        places.append(
            _Place(m, previous_kind, text[previous : m.start], text[m.end : following], kind)
        )
    return places


def _common_segments(
    conversation: Conversation,
    owners: Sequence[int],
    now: Sequence[_Place],
    then: Sequence[_Place],
    specials: Collection[str],
) -> list[list[Part]]:
    if [p.mark.index for p in now] != [p.mark.index for p in then]:
        raise splice_error(SpliceCode.HISTORY_REORDERED)
    turns = [i for i, m in enumerate(conversation.history) if m.get("role") == "assistant"]
    segments: list[list[Part]] = []
    joined = False
    for number, (a, b) in enumerate(zip(now, then, strict=True)):
        owner = owners[a.mark.index]
        last = number + 1 == len(now)
        following = owner if last else owners[now[number + 1].mark.index]
        turn_follows = last or any(owner < turn < following for turn in turns)
        if owner > conversation.first_assistant:
            segment: list[Part] = [TextSlot(a.mark.index)]
            lead = "" if joined else _own_lead(a, b, specials)
            if turn_follows:
                trail = _up_to_special(_common_start(a.after, b.after), specials)
            else:
                trail = a.after
                if trail != b.after:
                    raise splice_error(
                        SpliceCode.HISTORY_CHANGED, expected=repr(b.after), got=repr(trail)
                    )
            segments.append([*filter(None, [lead]), *segment, *filter(None, [trail])])
        joined = not turn_follows and a.next_kind == "old"
    return segments


def _own_lead(a: _Place, b: _Place, specials: Collection[str]) -> str:
    """What is printed before a message and belongs to it, not to the assistant turn before it.

    Without what closes that turn: the model may have closed it with another token. Where the turn
    shows no mark (a call that is not printed), only the last special token is a safe edge.
    """
    shared = _common_start(a.before[::-1], b.before[::-1])[::-1]
    if a.previous_kind == "ast":
        hit = first_of(shared, specials)
        return shared if hit is None else shared[hit[0] + len(hit[1]) :]
    return shared[
        max((shared.rfind(s) + len(s) for s in specials if s and s in shared), default=0) :
    ]


def _common_start(a: str, b: str) -> str:
    pairs = enumerate(zip(a, b, strict=False))
    return a[: next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))]


def _up_to_special(trail: str, specials: Collection[str]) -> str:
    """Only what closes the message: the next turn's header may depend on its reasoning."""
    hit = first_of(trail, specials)
    return trail if hit is None else trail[: hit[0] + len(hit[1])]


def _locate(
    head: str, segment: Sequence[Part], originals: Sequence[str], start: int
) -> tuple[int, int]:
    """(Begin, end) of the first place at or after ``start`` where ``segment`` stands."""
    anchor = segment[0] if isinstance(segment[0], str) else ""
    at = head.find(anchor, start)
    while 0 <= at < len(head):
        match = match_parts(head, segment, originals, (), start=at)
        if match is not None:
            return at, match[0]
        at = head.find(anchor, at + 1)
    raise splice_error(SpliceCode.HISTORY_CHANGED, expected=repr(segment)[:160])
