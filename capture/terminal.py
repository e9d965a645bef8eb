"""Which call is a rollout's terminal: witnesses, then the heuristic (CONTRACT section 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.fingerprints import (
    FINGERPRINT_VERSION,
    assistant_fingerprint,
    is_assistant,
)
from tokenplane.schemas.manifest import CallRecord, TerminalSelection


@dataclass(frozen=True, slots=True)
class TerminalChoice:
    """The chosen call, or why there is none."""

    model_call_id: str | None
    selection: TerminalSelection | None
    reason: str
    """``selected``, or the stable reason."""


def resolve_terminal(
    records: Sequence[CallRecord],
    *,
    explicit: str | None = None,
    declared: str | None = None,
    response_id: str | None = None,
    scored: Mapping[str, Any] | None = None,
) -> TerminalChoice:
    """The call that every witness names.

    Args:
        explicit: a call id; one that is not in the manifest abstains.
        declared: a response id; one that matches no row (or rows with different sequences) ends the
            search without an attribution.
        response_id: id of the scored response.
        scored: the scored, Responses-shaped object (``output`` list): the content witness.

    Witnesses must agree up to identical sequences (smallest call id wins); otherwise nothing is
    attributed. Without any witness the choice is empty with reason ``no_witness``.
    """
    votes: dict[str, list[CallRecord]] = {}
    if explicit is not None:
        votes["explicit"] = [r for r in records if r.model_call_id == explicit]
    if declared is not None:
        named = [r for r in records if r.response_id == declared]
        if len({_sequence(r) for r in named}) != 1:
            return TerminalChoice(None, None, "declared_terminal_unmatched")
        votes["declared"] = named
    if response_id is not None:
        votes["response_id"] = [r for r in records if r.response_id == response_id]
    if scored is not None:
        votes["content"] = _content_votes(records, scored)
    votes = {name: rows for name, rows in votes.items() if rows}
    if not votes:
        return TerminalChoice(None, None, "no_witness")
    agreed = set.intersection(*({_sequence(r) for r in rows} for rows in votes.values()))
    if len(agreed) != 1:
        return TerminalChoice(None, None, f"witness_disagreement[{','.join(votes)}]")
    same = [r for rows in votes.values() for r in rows if _sequence(r) in agreed]
    winner = min(r.model_call_id for r in same)
    return TerminalChoice(winner, _SELECTION[next(iter(votes))], "selected")


_SELECTION: dict[str, TerminalSelection] = {
    "explicit": "declared",  # the receipt has no literal for an explicit call id
    "declared": "declared",
    "response_id": "response_id",
    "content": "content",
}


def _sequence(record: CallRecord) -> tuple[str, str, int]:
    return record.cumulative_hash, record.chain_hash, record.cum_len


def _content_votes(records: Sequence[CallRecord], scored: Mapping[str, Any]) -> list[CallRecord]:
    output = scored.get("output")
    if not isinstance(output, list) or not all(isinstance(x, Mapping) for x in output):
        return []
    current = [r for r in records if r.fingerprint_version == FINGERPRINT_VERSION]
    try:
        whole = assistant_fingerprint(output)
        block = _trailing_block(output)
        trailing = assistant_fingerprint(block) if len(block) < len(output) else ""
    except InvalidRecordError:
        return []
    return [
        r
        for r in current
        if (whole and whole in (r.continuation_fingerprint, r.output_fingerprint))
        or (trailing and trailing == r.output_fingerprint)
    ]


def _trailing_block(output: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The model-authored items at the end (reasoning counts as authored, it never hashes)."""
    at = len(output)
    while at and (is_assistant(output[at - 1]) or output[at - 1].get("type") == "reasoning"):
        at -= 1
    return output[at:]


def select_terminal_call(records: Sequence[CallRecord]) -> TerminalChoice:
    """The heuristic walk for a rollout where nothing is declared.

    Roots with children beat roots without; then the earliest admitted (unstamped last), then
    manifest order. Descending, children with children beat leaves; if more than one remains the
    terminal is ambiguous.
    """
    if not records:
        return TerminalChoice(None, None, "no_records")
    by_id = {record.model_call_id: record for record in records}
    if len(by_id) != len(records):
        return TerminalChoice(None, None, "duplicate_call_id")
    children: dict[str, list[CallRecord]] = {ident: [] for ident in by_id}
    roots = []
    for record in records:
        if record.parent_call_id is None:
            roots.append(record)
        elif record.parent_call_id not in by_id:
            return TerminalChoice(None, None, "orphaned_row")
        else:
            children[record.parent_call_id].append(record)
    if not roots:
        return TerminalChoice(None, None, "no_root")
    extended = [r for r in roots if children[r.model_call_id]] or roots
    at = min(extended, key=lambda r: float("inf") if r.admitted_at is None else r.admitted_at)
    while children[at.model_call_id]:
        below = children[at.model_call_id]
        survivors = [r for r in below if children[r.model_call_id]] or below
        if len(survivors) > 1:
            return TerminalChoice(None, None, "ambiguous_terminal")
        at = survivors[0]
    return TerminalChoice(at.model_call_id, "heuristic", "selected")
