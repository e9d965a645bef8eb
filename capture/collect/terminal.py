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
    """``selected``; otherwise the stable reasons, separated by commas."""
    settled: bool = True
    """False where no witness said anything: the heuristic may still choose."""


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
        response_id: id of the scored response; abstains if it matches no sequence, or several.
        scored: the scored, Responses-shaped object (``output`` list): the content witness.

    Witnesses must agree up to identical sequences; otherwise nothing is attributed.
    """
    trail: list[str] = []
    witnesses: list[tuple[str, CallRecord]] = []
    if explicit is not None:
        named = [r for r in records if r.model_call_id == explicit]
        _vote(witnesses, trail, "explicit", named, missing="explicit_terminal_not_captured")
    if declared is not None:
        named = [r for r in records if r.response_id == declared]
        _vote(witnesses, trail, "declared", named, missing="declared_terminal_not_captured")
        if not witnesses or witnesses[-1][0] != "declared":
            return TerminalChoice(None, None, ",".join(trail))
    if response_id is not None:
        named = [r for r in records if r.response_id == response_id]
        _vote(witnesses, trail, "response_id", named, missing="response_id_no_match")
    if scored is not None:
        named = _content_matches(records, scored)
        _vote(witnesses, trail, "content", named, missing="no_content_match")
    if not witnesses:
        return TerminalChoice(None, None, ",".join(trail) or "no_witness", settled=False)
    if _one_sequence([record for _, record in witnesses]) is None:
        detail = ";".join(f"{name}={record.model_call_id}" for name, record in witnesses)
        return TerminalChoice(None, None, ",".join([*trail, f"witness_disagreement[{detail}]"]))
    name, record = witnesses[0]
    return TerminalChoice(record.model_call_id, _SELECTION[name], "selected")


_SELECTION: dict[str, TerminalSelection] = {
    "explicit": "declared",  # the receipt has no literal for an explicit call id
    "declared": "declared",
    "response_id": "response_id",
    "content": "content",
}


def _vote(
    witnesses: list[tuple[str, CallRecord]],
    trail: list[str],
    name: str,
    named: list[CallRecord],
    *,
    missing: str,
) -> None:
    winner = _one_sequence(named)
    if winner is not None:
        witnesses.append((name, winner))
    else:
        trail.append(f"{name}_ambiguous" if named else missing)


def _one_sequence(records: Sequence[CallRecord]) -> CallRecord | None:
    """The row with the smallest call id, if all rows are one and the same sequence."""
    if len({(r.cumulative_hash, r.chain_hash, r.cum_len) for r in records}) != 1:
        return None
    return min(records, key=lambda r: r.model_call_id)


def _content_matches(records: Sequence[CallRecord], scored: Mapping[str, Any]) -> list[CallRecord]:
    output = scored.get("output")
    if not isinstance(output, list):
        return []
    items = [item for item in output if isinstance(item, Mapping)]
    block = items[len(items) :]
    for at in range(len(items), 0, -1):
        if not is_assistant(items[at - 1]):
            break
        block = items[at - 1 :]
    try:
        whole = assistant_fingerprint(items)
        trailing = assistant_fingerprint(block) if 0 < len(block) < len(items) else ""
    except InvalidRecordError:
        return []
    if not whole:
        return []
    return [
        r
        for r in records
        if r.fingerprint_version == FINGERPRINT_VERSION
        and (
            whole in (r.continuation_fingerprint, r.output_fingerprint)
            or (trailing and trailing == r.output_fingerprint)
        )
    ]


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
