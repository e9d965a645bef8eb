"""The collector: rollouts to training rows, one verified row (or one masked placeholder) each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, Protocol

from tokenplane.capture.active_call import code_of
from tokenplane.capture.collect.linearize import terminal_chain, verify_and_linearize
from tokenplane.capture.collect.published import standing_rows
from tokenplane.capture.collect.receipt import Strictness, build_receipt
from tokenplane.capture.collect.terminal import select_terminal_call
from tokenplane.capture.collect.training_rows import RolloutOutcome, placeholder, to_training_row
from tokenplane.schemas.errors import (
    ConfigError,
    RebuildError,
    ReceiptVerificationError,
    StoreError,
    TokenplaneError,
)
from tokenplane.schemas.manifest import CallRecord, RolloutManifest, RolloutReceipt
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.schemas.training_row import TRAINING_PARTITION, TrainingRow
from tokenplane.staging.rollout_hold import RolloutHold
from tokenplane.staging.store import StagingStore
from tokenplane.staging.token_source import TokenSource

logger = logging.getLogger("tokenplane.capture")


class StagedRowSource(Protocol):
    """Reads whole staged rows: one per key, in order, or a ``StoreError``."""

    def fetch_rows(self, keys: Sequence[str]) -> Sequence[StagedRow]: ...


class ManifestProvider(Protocol):
    """Anything that knows a rollout's calls: a ``Ledger``, or a client of Gym's control route."""

    def manifest(self, rollout_id: str) -> RolloutManifest: ...


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What ``publish`` did."""

    published: int
    already_there: int
    cleaned_rows: int
    clean_error: str | None
    """Set where clean-up failed; the published rows stay."""


Segments = Literal["terminal", "roots", "all"]
"""Which chains of a rollout become rows. terminal: the one that ends in its terminal call. roots:
also the main chain of every other root (sub-agents, compacted histories). all: every chain to a
leaf, abandoned branches too."""


class Collector:
    """Verifies and linearizes rollouts, and publishes their rows.

    Never raises for a bad rollout: that becomes a placeholder row (one carried token, mask 0,
    ``sample_mask`` 0) with the reason, so that a group always has its size.

    Args:
        source: reads staged rows (``staging.TokenSource``, whose rows are held while they are read:
            no retention removes them meanwhile).
        manifests: a ``Ledger``, a ``RolloutManifest``, or a mapping of them by rollout.
        strictness: see ``receipt.Strictness``. With ``chain`` only the chains that become rows are
            read and verified, so that a lost dead branch rejects nothing; ``gym`` needs every row.
        segments: see ``Segments``. Each sampled token has exactly one row that owns its loss.
        salvage: offer the verified part of a damaged rollout (``salvaged``, with the reason) in
            place of the placeholder.
    """

    def __init__(
        self,
        source: StagedRowSource,
        manifests: ManifestProvider | RolloutManifest | Mapping[str, RolloutManifest],
        *,
        strictness: Strictness = "chain",
        segments: Segments = "terminal",
        salvage: bool = False,
    ) -> None:
        self._source = source
        self._manifest_of = _manifest_function(manifests)
        self._strictness: Strictness = strictness
        self._segments: Segments = segments
        self._salvage = salvage

    def finalize(self, rollout: str | RolloutOutcome) -> list[TrainingRow]:
        """The rollout's training rows, the terminal's first; a placeholder if it is not proven.

        Raises:
            TokenplaneError: nothing is said about the rollout: a store or a manifest cannot be read
                now (retryable), or a setting is wrong (``ConfigError``).
        """
        return self.finalize_group([rollout])

    def finalize_group(self, rollouts: Sequence[str | RolloutOutcome]) -> list[TrainingRow]:
        """The rows of a group, in order; exactly one per rollout unless ``segments`` asks for
        more. No member's rows can be removed until all are read.

        Raises:
            TokenplaneError: see ``finalize``.
        """
        outcomes = [RolloutOutcome(r) if isinstance(r, str) else r for r in rollouts]
        with ExitStack() as stack:
            hold = None
            if isinstance(self._source, TokenSource):
                names = [outcome.rollout_id for outcome in outcomes]
                hold = RolloutHold(self._source.store, self._source.partition, names)
                stack.enter_context(hold)
            return [row for outcome in outcomes for row in self._finalize(outcome, hold)]

    def _finalize(self, outcome: RolloutOutcome, hold: RolloutHold | None) -> list[TrainingRow]:
        try:
            return self._rows(outcome, hold)
        except (TokenplaneError, ValueError) as exc:
            _pass_on(exc)
            code = code_of(exc, "invalid_manifest")
            if isinstance(exc, ReceiptVerificationError) and code == "rollout_failed":
                code = exc.message
            logger.warning("rollout %s is not proven: %s", outcome.rollout_id, exc)
            salvaged = self._salvaged(outcome, code, hold) if self._salvage else None
            return [placeholder(outcome, code) if salvaged is None else salvaged]

    def receipt(self, outcome: RolloutOutcome) -> RolloutReceipt:
        """The receipt of the rollout as its manifest has it.

        Raises:
            StoreError: the manifest cannot be read.
        """
        return build_receipt(
            self._manifest_of(outcome.rollout_id),
            reward=outcome.reward,
            explicit=outcome.explicit,
            declared=outcome.declared,
            response_id=outcome.response_id,
            scored=outcome.scored,
            strictness=self._strictness,
        )

    def _rows(self, outcome: RolloutOutcome, hold: RolloutHold | None) -> list[TrainingRow]:
        receipt = self.receipt(outcome)
        if receipt.failure_reason is not None:
            raise ReceiptVerificationError(receipt.failure_reason, code="rollout_failed")
        chains = chains_of(receipt, self._segments)
        rows: dict[str, StagedRow] = {}
        if self._strictness == "gym":
            rows = self._fetch(receipt.manifest, rows, hold)
            verify_and_linearize(receipt, [rows[r.staging_key].call for r in receipt.manifest])
        owners: set[str] = set()
        result = []
        for segment, chain in enumerate(chains):
            rows = self._fetch(chain, rows, hold)
            owned = {record.model_call_id for record in chain} - owners
            owners |= owned
            staged = [rows[record.staging_key] for record in chain]
            part = _chain_receipt(receipt, chain)
            linear = verify_and_linearize(part, [row.call for row in staged])
            result.append(
                to_training_row(outcome, part, linear, staged, segment=segment, owned=owned)
            )
        return result

    def _fetch(
        self,
        records: Sequence[CallRecord],
        known: dict[str, StagedRow],
        hold: RolloutHold | None,
    ) -> dict[str, StagedRow]:
        if hold is not None:
            hold.renew()
        keys = [r.staging_key for r in records if r.staging_key not in known]
        return {**known, **dict(zip(keys, self._source.fetch_rows(keys), strict=True))}

    def _salvaged(
        self, outcome: RolloutOutcome, reason: str, hold: RolloutHold | None
    ) -> TrainingRow | None:
        """The row of the longest part of the terminal chain that verifies, from the root on."""
        try:
            manifest = self._manifest_of(outcome.rollout_id)
            complete = manifest.model_copy(update={"failures": []})
            receipt = build_receipt(
                complete,
                reward=outcome.reward,
                explicit=outcome.explicit,
                declared=outcome.declared,
                response_id=outcome.response_id,
                scored=outcome.scored,
            )
            if receipt.terminal_model_call_id is None:
                receipt = build_receipt(complete, reward=outcome.reward)
            if receipt.failure_reason is not None:
                return None
            chain = terminal_chain(receipt.manifest, receipt.terminal_model_call_id)
        except (TokenplaneError, ValueError) as exc:
            _pass_on(exc)
            logger.info("nothing to salvage of %s", outcome.rollout_id, exc_info=True)
            return None
        for length in range(len(chain), 0, -1):
            part = _chain_receipt(receipt, chain[:length])
            try:
                staged = list(self._fetch(chain[:length], {}, hold).values())
                linear = verify_and_linearize(part, [row.call for row in staged])
                return to_training_row(outcome, part, linear, staged, reason=reason)
            except (TokenplaneError, ValueError) as exc:
                _pass_on(exc)
                logger.info("%s: %d calls do not verify", outcome.rollout_id, length)
        return None

    def publish(
        self,
        rows: Sequence[TrainingRow],
        store: StagingStore,
        *,
        partition: str = TRAINING_PARTITION,
        clean_partition: str | None = None,
    ) -> PublishReport:
        """Publish rows durably, each once; then, and only then, remove their staged rows.

        Publishing the same rows again adds nothing. Nor does a placeholder of a rollout that was
        collected again after its staged rows were removed: the published rows stand, and it counts
        as already there (see ``published.standing_rows``). ``clean_partition`` None keeps staged
        rows.

        Raises:
            KeyConflictError: another row is published under a row id, or with another reward or
                group.
            StoreError: the store refuses a row; rows before it are published.
        """
        fresh = 0
        standing: list[TrainingRow] = []
        for row in rows:
            stands = standing_rows(row, store, partition=partition)
            standing += stands or [row]
            fresh += not stands and store.put(partition, row.row_id, row.to_batch())
        cleaned, error = 0, None
        if clean_partition is not None:
            keys = [span.staging_key for row in standing for span in row.call_spans]
            try:
                cleaned = store.discard(clean_partition, keys) if keys else 0
            except StoreError as exc:
                error = f"{exc.code}: {exc}"
                logger.warning("published, but the staged rows were not removed: %s", error)
        return PublishReport(fresh, len(rows) - fresh, cleaned, error)


def chains_of(receipt: RolloutReceipt, segments: Segments) -> list[list[CallRecord]]:
    """The chains that become rows, the terminal's first.

    Raises:
        RebuildError: a chain is broken (``missing_parent``, ``lineage_cycle``, …).
    """
    records = receipt.manifest
    terminal = receipt.terminal_model_call_id
    chains = [terminal_chain(records, terminal)]
    if segments == "terminal":
        return chains
    parents = {record.parent_call_id for record in records}
    leaves = [r.model_call_id for r in records if r.model_call_id not in parents]
    if segments == "all":
        chains += [terminal_chain(records, leaf) for leaf in leaves if leaf != terminal]
        return chains
    paths = [terminal_chain(records, leaf) for leaf in leaves]
    for root in (r for r in records if r.parent_call_id is None):
        if root.model_call_id != chains[0][0].model_call_id:
            tree = {r.model_call_id: r for p in paths if p[0] is root for r in p}
            choice = select_terminal_call(list(tree.values()))
            if choice.model_call_id is None:
                raise RebuildError(
                    "the end of a segment is ambiguous", code=choice.reason, key=root.model_call_id
                )
            chains.append(terminal_chain(records, choice.model_call_id))
    return chains


def _pass_on(error: Exception) -> None:
    """Raise what another try may settle: a placeholder for it would stand for ever."""
    if isinstance(error, ConfigError) or getattr(error, "retryable", False):
        raise error


def _chain_receipt(receipt: RolloutReceipt, chain: Sequence[CallRecord]) -> RolloutReceipt:
    """The receipt of one chain of the rollout: its rows, its last call as terminal."""
    return receipt.model_copy(
        update={"manifest": list(chain), "terminal_model_call_id": chain[-1].model_call_id}
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
