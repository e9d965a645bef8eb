"""The collector: rollouts to training rows, one verified row (or one masked placeholder) each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tokenplane.capture.core import code_of
from tokenplane.capture.linearize import LinearizedRollout, terminal_chain, verify_and_linearize
from tokenplane.capture.receipt import Strictness, build_receipt
from tokenplane.schemas.epochs import generation_versions
from tokenplane.schemas.errors import (
    InvalidRecordError,
    ReceiptVerificationError,
    StoreError,
    TokenplaneError,
)
from tokenplane.schemas.manifest import RolloutManifest, RolloutReceipt
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.schemas.tokens import frozen, to_log_probs, to_mask, to_token_ids
from tokenplane.schemas.training_row import TRAINING_PARTITION, CallSpan, TrainingRow
from tokenplane.staging.store import StagingStore

logger = logging.getLogger("tokenplane.capture")


class StagedRowSource(Protocol):
    """Reads whole staged rows: one per key, in order, or a ``StoreError``."""

    def fetch_rows(self, keys: Sequence[str]) -> Sequence[StagedRow]: ...


class ManifestProvider(Protocol):
    """Anything that knows a rollout's calls: a ``Ledger``, or a client of Gym's control route."""

    def manifest(self, rollout_id: str) -> RolloutManifest: ...


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """What the environment says about a finished rollout."""

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


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What ``publish`` did."""

    published: int
    already_there: int
    cleaned_rows: int
    clean_error: str | None
    """Set where clean-up failed; the published rows stay."""


class Collector:
    """Verifies and linearizes rollouts, and publishes their rows.

    Never raises for a bad rollout: it becomes a placeholder row (one carried token, mask 0,
    ``sample_mask`` 0) with the reason, so that a group always has its size.

    Args:
        source: reads staged rows (``staging.TokenSource``).
        manifests: a ``Ledger``, a ``RolloutManifest``, or a mapping of them by rollout.
        strictness: see ``receipt.Strictness``. With ``chain`` only the terminal chain is read and
            verified, so that a lost dead branch rejects nothing; ``gym`` needs every row.
    """

    def __init__(
        self,
        source: StagedRowSource,
        manifests: ManifestProvider | RolloutManifest | Mapping[str, RolloutManifest],
        *,
        strictness: Strictness = "chain",
    ) -> None:
        self._source = source
        self._manifest_of = _manifest_function(manifests)
        self._strictness: Strictness = strictness

    def finalize(self, rollout: str | RolloutOutcome) -> list[TrainingRow]:
        """The rollout's training rows: exactly one here, a placeholder if it cannot be trusted."""
        outcome = RolloutOutcome(rollout) if isinstance(rollout, str) else rollout
        try:
            return [self._row(outcome)]
        except (TokenplaneError, ValueError) as exc:
            code = code_of(exc, "invalid_manifest")
            if isinstance(exc, ReceiptVerificationError) and code == "rollout_failed":
                code = exc.message
            logger.warning("rollout %s gives a placeholder: %s", outcome.rollout_id, exc)
            return [placeholder(outcome, code)]

    def finalize_group(self, rollouts: Sequence[str | RolloutOutcome]) -> list[TrainingRow]:
        """The rows of a group, in order; one per rollout, so exactly ``len(rollouts)``."""
        return [row for rollout in rollouts for row in self.finalize(rollout)]

    def receipt(self, outcome: RolloutOutcome) -> RolloutReceipt:
        """The receipt that ``finalize`` verifies.

        Raises:
            StoreError: the manifest cannot be read.
        """
        receipt = build_receipt(
            self._manifest_of(outcome.rollout_id),
            reward=outcome.reward,
            explicit=outcome.explicit,
            declared=outcome.declared,
            response_id=outcome.response_id,
            scored=outcome.scored,
            strictness=self._strictness,
        )
        if self._strictness == "chain" and receipt.failure_reason is None:
            chain = terminal_chain(receipt.manifest, receipt.terminal_model_call_id)
            receipt = receipt.model_copy(update={"manifest": chain})
        return receipt

    def _row(self, outcome: RolloutOutcome) -> TrainingRow:
        receipt = self.receipt(outcome)
        rows: Sequence[StagedRow] = ()
        if receipt.failure_reason is None:
            rows = self._source.fetch_rows([record.staging_key for record in receipt.manifest])
        linear = verify_and_linearize(receipt, [row.call for row in rows])
        return to_training_row(outcome, receipt, linear, rows)

    def publish(
        self,
        rows: Sequence[TrainingRow],
        store: StagingStore,
        *,
        partition: str = TRAINING_PARTITION,
        clean_partition: str | None = None,
    ) -> PublishReport:
        """Publish rows durably, each once; then, and only then, remove their staged rows.

        Publishing the same rows again adds nothing. ``clean_partition`` None keeps staged rows.

        Raises:
            KeyConflictError: another row is published under a row id.
            StoreError: the store refuses a row; rows before it are published.
        """
        fresh = sum(store.put(partition, row.row_id, row.to_batch()) for row in rows)
        cleaned, error = 0, None
        if clean_partition is not None:
            keys = [span.staging_key for row in rows for span in row.call_spans]
            try:
                cleaned = store.discard(clean_partition, keys) if keys else 0
            except StoreError as exc:
                error = f"{exc.code}: {exc}"
                logger.warning("published, but the staged rows were not removed: %s", error)
        return PublishReport(fresh, len(rows) - fresh, cleaned, error)


def to_training_row(
    outcome: RolloutOutcome,
    receipt: RolloutReceipt,
    linear: LinearizedRollout,
    rows: Sequence[StagedRow],
) -> TrainingRow:
    """The training row of a verified chain, with the version that made each sampled token.

    Raises:
        InvalidRecordError: a row's epochs are missing or malformed.
    """
    by_call = {row.call.model_call_id: row for row in rows}
    chain = [by_call[ident] for ident in linear.model_call_ids]
    versions = np.full(len(linear.token_ids), -1, np.int64)
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
        versions[span.start + link.carry_len : span.end] = sampled
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
        row_id=outcome.rollout_id,
        rollout_id=outcome.rollout_id,
        token_ids=linear.token_ids,
        token_mask=linear.token_mask,
        log_probs=linear.logprobs,
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


def _manifest_function(
    manifests: ManifestProvider | RolloutManifest | Mapping[str, RolloutManifest],
) -> Callable[[str], RolloutManifest]:
    if isinstance(manifests, RolloutManifest):
        only = manifests
        return lambda rollout_id: (
            only if only.rollout_id == rollout_id else RolloutManifest(rollout_id=rollout_id)
        )
    if isinstance(manifests, Mapping):
        by_id = manifests
        return lambda rollout_id: by_id.get(rollout_id, RolloutManifest(rollout_id=rollout_id))
    return manifests.manifest
