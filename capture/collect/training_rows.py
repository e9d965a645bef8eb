"""Training rows: from a verified chain, with one loss owner per sampled token; or a placeholder."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from tokenplane.capture.collect.linearized import LinearizedRollout
from tokenplane.schemas.epochs import generation_versions
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.manifest import RolloutReceipt
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.schemas.tokens import frozen, to_log_probs, to_mask, to_token_ids
from tokenplane.schemas.training_row import CallSpan, TrainingRow


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """What the environment says about a finished rollout.

    Raises:
        InvalidRecordError: a reward that is no finite number.
    """

    rollout_id: str
    reward: float | None = None
    group_id: str | None = None
    explicit: str | None = None
    """Terminal call id, if the harness knows it."""
    declared: str | None = None
    """Terminal response id, if the harness declares it."""
    response_id: str | None = None
    """Id of the response that was scored."""
    scored: Mapping[str, Any] | None = field(default=None, repr=False)
    """The scored, Responses-shaped object."""

    def __post_init__(self) -> None:
        if self.reward is not None and not _is_finite(self.reward):
            raise InvalidRecordError(
                "reward", expected="a finite number or none", got=repr(self.reward)[:60]
            )


def to_training_row(
    outcome: RolloutOutcome,
    receipt: RolloutReceipt,
    linear: LinearizedRollout,
    rows: Sequence[StagedRow],
    *,
    segment: int = 0,
    owned: Collection[str] | None = None,
    reason: str | None = None,
) -> TrainingRow:
    """The training row of a verified chain, with the version that made each sampled token.

    Args:
        segment: position of the row among those of its rollout.
        owned: ids of the calls whose sampled tokens carry this row's loss; the sampled tokens of
            other calls become context (mask 0), because another row owns them. None: all.
        reason: set for the verified part of a damaged rollout, which makes the row ``salvaged``.

    Raises:
        InvalidRecordError: a row's epochs are missing or malformed.
    """
    by_call = {row.call.model_call_id: row for row in rows}
    chain = [by_call[ident] for ident in linear.model_call_ids]
    versions = np.full(len(linear.token_ids), -1, np.int64)
    mask, log_probs = linear.token_mask, linear.logprobs
    if owned is not None:
        mask, log_probs = mask.copy(), log_probs.copy()
    spans = []
    for row, span, link in zip(chain, linear.weight_version_spans, linear.link_spans, strict=True):
        call = row.call
        sampled = generation_versions(
            row.evidence.policy_epochs, call.cum_len - link.generation_len, call.cum_len
        )
        if int(row.evidence.policy_epochs[0][1]) != call.weight_version:
            raise InvalidRecordError(
                "the first policy boundary is not the call's weight version",
                code="wrong_policy_epoch",
                expected=call.weight_version,
                got=row.evidence.policy_epochs[0],
                key=row.staging_key,
            )
        generation = slice(span.start + link.carry_len, span.end)
        if owned is None or call.model_call_id in owned:
            versions[generation] = sampled
        else:
            mask[generation], log_probs[generation] = 0, 0
        spans.append(
            CallSpan(
                model_call_id=call.model_call_id,
                staging_key=row.staging_key,
                start=span.start,
                carry_len=link.carry_len,
                generation_len=link.generation_len,
                weight_version=call.weight_version,
                extras_digest=call.extras_digest,
            )
        )
    modes = {row.evidence.logprobs_mode for row in chain}
    return TrainingRow(
        row_id=row_id(outcome.rollout_id, segment, salvaged=reason is not None),
        rollout_id=outcome.rollout_id,
        segment=segment,
        reason=reason,
        salvaged=reason is not None,
        token_ids=linear.token_ids,
        token_mask=frozen(mask),
        log_probs=frozen(log_probs),
        weight_versions=frozen(versions),
        prompt_len=linear.prompt_len,
        call_spans=tuple(spans),
        created_at=max(row.created_at for row in chain),
        group_id=outcome.group_id,
        reward=outcome.reward,
        terminal_model_call_id=receipt.terminal_model_call_id,
        terminal_selection=receipt.terminal_selection,
        logprobs_mode=modes.pop() if len(modes) == 1 else "mixed",
        model_fingerprint=chain[0].evidence.model_fingerprint,
        tokenizer_fingerprint=chain[0].evidence.tokenizer_fingerprint,
        cumulative_hash=chain[-1].call.cumulative_hash,
    )


def row_id(rollout_id: str, segment: int, *, salvaged: bool) -> str:
    """``rollout``, ``rollout#2`` or ``rollout~salvaged``: a salvaged row never takes the place of
    the strict one.
    """
    return f"{rollout_id}{f'#{segment}' if segment else ''}{'~salvaged' if salvaged else ''}"


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


PLACEHOLDER_TOKEN = 0


def placeholder(outcome: RolloutOutcome, reason: str) -> TrainingRow:
    """A row that holds a rollout's place in its group and trains on nothing.

    One carried token (id 0), mask 0, ``sample_mask`` 0; the reward is kept.
    """
    return TrainingRow(
        row_id=outcome.rollout_id,
        rollout_id=outcome.rollout_id,
        token_ids=to_token_ids([PLACEHOLDER_TOKEN]),
        token_mask=to_mask([0]),
        log_probs=to_log_probs([0.0]),
        weight_versions=frozen(np.full(1, -1, np.int64)),
        prompt_len=1,
        call_spans=(),
        created_at=None,
        group_id=outcome.group_id,
        reward=outcome.reward,
        sample_mask=0,
        reason=reason,
    )
