"""``splice_by_tokens``: the boundary from rendered ids alone, for callers without messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tokenplane.capture.splice.checks import check_spliced
from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.schemas.tokens import Int32Array, frozen, to_token_ids

_MAX_SEPARATOR = 4
"""How many ids a template may print between a terminator and the next header (ChatML: one)."""


def splice_by_tokens(
    rendered_prompt: Sequence[int] | Int32Array,
    template_prefix: Sequence[int] | Int32Array,
    prefix_token_ids: Sequence[int] | Int32Array,
    terminator_ids: Collection[int],
) -> Int32Array:
    """int32[T], read-only: the staged prefix, then what the render holds after the last turn.

    Args:
        rendered_prompt: the whole conversation with a generation prompt.
        template_prefix: the same render of the history up to and including the last assistant
            turn, without a generation prompt.
        prefix_token_ids: prompt and generation of the parent call as staged. Empty: nothing was
            staged, and the render is the prompt.
        terminator_ids: ids on which the model stops.

    Terminators are not merely counted: a render that extends ``template_prefix`` is cut at its end;
    otherwise every turn must be the same in both or have lost one span (reasoning taken away).
    The model's own terminator is kept; where there is none the template's is inserted.

    Ids do not tell who says what. That the prefix belongs to this conversation is for the caller
    to know (``structural_suffix`` checks it).

    Raises:
        SpliceError: ``boundary_not_proven``, ``turns_differ``, ``nothing_new``,
            ``header_terminator_mismatch``.
    """
    rendered = to_token_ids(rendered_prompt, name="rendered_prompt")
    turns = to_token_ids(template_prefix, name="template_prefix")
    prefix = to_token_ids(prefix_token_ids, name="prefix_token_ids")
    if not len(prefix):
        return rendered
    terminators = np.array(sorted(terminator_ids), dtype=np.int32)
    at, is_header = _boundary(rendered, turns, terminators)
    own = int(prefix[-1]) if np.isin(prefix[-1], terminators) else None
    if at + 1 >= len(rendered):
        raise splice_error(SpliceCode.NOTHING_NEW)
    if own is not None and is_header and own != int(rendered[at]):
        raise splice_error(
            SpliceCode.HEADER_TERMINATOR_MISMATCH, expected=int(rendered[at]), got=own
        )
    after = rendered[at:] if own is None else rendered[at + 1 :]
    prompt = np.concatenate([prefix, after])
    check_spliced(prompt, prefix=prefix, after_boundary=after)
    return frozen(prompt)


def _boundary(rendered: Int32Array, turns: Int32Array, terminators: Int32Array) -> tuple[int, bool]:
    """(Index in ``rendered`` of the terminator that ends the last turn, whether it is a header)."""
    ends = _ends(turns, terminators)
    last = int(ends[-1]) if len(ends) else -1
    separator = turns[last + 1 :]
    if np.array_equal(rendered[: len(turns)], turns):
        follows = rendered[len(turns) : len(turns) + 1]
        if len(separator) and len(follows) and np.isin(follows[0], terminators):
            return len(turns), True  # the next message's header ends the turn
        at = last
    else:
        at = _align(rendered, turns, ends, terminators)
    if at < 0 or not _is_separator(separator, rendered, at, terminators):
        raise splice_error(
            SpliceCode.BOUNDARY_NOT_PROVEN,
            expected="a terminator of the set at the end of the last turn",
            got=f"{len(separator)} ids behind the last of {len(ends)} terminators",
        )
    return at, False


def _align(
    rendered: Int32Array, turns: Int32Array, ends: Int32Array, terminators: Int32Array
) -> int:
    """Index in ``rendered`` of the end of its turn number ``len(ends)``; -1 without turns.

    Each turn before must be the same or have lost one span; a terminator inside what was taken
    away shifts the numbers and is noticed here.
    """
    rendered_ends = _ends(rendered, terminators)
    if len(rendered_ends) < len(ends):
        raise splice_error(SpliceCode.TURNS_DIFFER, got="fewer terminators than in the history")
    begin = other_begin = 0
    for number, (end, other_end) in enumerate(zip(ends, rendered_ends, strict=False)):
        then, now = turns[begin : end + 1], rendered[other_begin : other_end + 1]
        if not _same_or_lost_a_span(then, now):
            raise splice_error(SpliceCode.TURNS_DIFFER, got=f"turn {number}")
        begin, other_begin = int(end) + 1, int(other_end) + 1
    return other_begin - 1


def _same_or_lost_a_span(then: Int32Array, now: Int32Array) -> bool:
    """Whether ``now`` is ``then`` without at most one span, its first and last id kept."""
    shared = min(len(then), len(now))
    if len(now) > len(then):
        return False
    start = _equal_run(then[:shared] == now[:shared])
    end = _equal_run(then[::-1][:shared] == now[::-1][:shared])
    return start >= 1 and end >= 1 and start + end >= len(now)


def _equal_run(equal: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    return len(equal) if equal.all() else int(np.argmin(equal))


def _is_separator(
    separator: Int32Array, rendered: Int32Array, at: int, terminators: Int32Array
) -> bool:
    """Whether these ids only part two turns: few, found behind ``at``, and behind another end."""
    if not len(separator):
        return True
    if len(separator) > _MAX_SEPARATOR:
        return False
    behind = [
        end
        for end in _ends(rendered, terminators).tolist()
        if np.array_equal(rendered[end + 1 : end + 1 + len(separator)], separator)
    ]
    return at in behind and len(behind) > 1


def _ends(ids: Int32Array, terminators: Int32Array) -> Int32Array:
    return np.flatnonzero(np.isin(ids, terminators)).astype(np.int32)
