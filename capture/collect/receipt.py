"""From a manifest to a receipt: the terminal, and whether the capture is poisoned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tokenplane.capture.collect.terminal import (
    TerminalChoice,
    resolve_terminal,
    select_terminal_call,
)
from tokenplane.schemas.manifest import RolloutManifest, RolloutReceipt

Strictness = Literal["gym", "chain"]
"""gym: any failure row poisons the rollout. chain: failures poison only where no witness named the
terminal, because an unstaged call may then have been the real end; a chain that was named and
verifies is complete by itself."""


LEFT_BY_THE_CLIENT = frozenset({"client_disconnected"})
"""Failures of calls whose answer the agent never saw, so that none can be the rollout's end: it
timed out and asked again, or went away (D18)."""


def build_receipt(
    manifest: RolloutManifest,
    *,
    reward: float | None = None,
    explicit: str | None = None,
    declared: str | None = None,
    response_id: str | None = None,
    scored: Mapping[str, Any] | None = None,
    strictness: Strictness = "chain",
) -> RolloutReceipt:
    """The receipt of one rollout; poisoned with a stable reason where it cannot be trusted.

    Arguments beside ``manifest``: see ``terminal.resolve_terminal``. A declared response that
    matches no row poisons; nothing falls back to the heuristic then.
    """
    choice = resolve_terminal(
        manifest.records,
        explicit=explicit,
        declared=declared,
        response_id=response_id,
        scored=scored,
    )
    witnessed = choice.model_call_id is not None
    if not choice.settled:
        choice = select_terminal_call(manifest.records)
    reason = None if choice.model_call_id is not None else choice.reason
    failures = [
        failure
        for failure in manifest.failures
        if strictness == "gym" or (not witnessed and failure.reason not in LEFT_BY_THE_CLIENT)
    ]
    if failures:
        reason = failures[0].reason
    return _receipt(manifest, choice, reward, reason)


def _receipt(
    manifest: RolloutManifest, choice: TerminalChoice, reward: float | None, reason: str | None
) -> RolloutReceipt:
    return RolloutReceipt(
        rollout_id=manifest.rollout_id,
        reward=reward,
        terminal_model_call_id=choice.model_call_id,
        manifest=manifest.records,
        capture_poisoned=reason is not None,
        failure_reason=reason,
        terminal_selection=choice.selection,
        terminal_attribution_reason=choice.reason,
    )
