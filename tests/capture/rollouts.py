"""Rollouts made through the real stager: admissions by hand, tokens by a seeded generator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenplane.capture.hook_types import (
    ADMISSION_KEY,
    CONTEXT_KEY,
    PREFIX_KEY,
    CallContext,
    FinishedRequestRecord,
    OffloadedRequestPayload,
    PreparedPrefix,
)
from tokenplane.capture.prefix_resolver import ResolvedPrefix
from tokenplane.capture.token_stager import StageOutcome, TQMegatronTokenStager
from tokenplane.schemas.staged_row import CallEvidence, LedgerEntry
from tokenplane.schemas.tokens import to_token_ids
from tokenplane.schemas.wire import CaptureAdmission, CommitCoords


@dataclass
class Call:
    """One staged call as a test knows it."""

    coords: CommitCoords
    prompt: np.ndarray
    generated: np.ndarray
    log_probs: np.ndarray
    chain: list[str]

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.generated])

    @property
    def key(self) -> str:
        assert self.coords.staging_key is not None
        return self.coords.staging_key


@dataclass
class RolloutMaker:
    """Stages calls of one rollout."""

    stager: TQMegatronTokenStager
    rollout_id: str = "roll-1"
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    calls: int = 0

    def admission(self, parent: Call | None, call_id: str | None = None) -> CaptureAdmission:
        self.calls += 1
        ident = call_id or f"call-{self.calls}"
        if parent is None:
            return CaptureAdmission(rollout_id=self.rollout_id, model_call_id=ident, mode="text")
        return CaptureAdmission(
            rollout_id=self.rollout_id,
            model_call_id=ident,
            parent_call_id=parent.coords.model_call_id,
            prev_len=parent.coords.cum_len,
            mode="token_in",
            staging_chain=parent.chain,
            parent_chain_hash=parent.coords.chain_hash,
        )

    def stage(
        self,
        parent: Call | None = None,
        *,
        call_id: str | None = None,
        carry: int = 5,
        generate: int = 4,
        epochs: list[tuple[int, int]] | None = None,
        ledger: LedgerEntry | None = None,
        params: dict[str, Any] | None = None,
    ) -> tuple[StageOutcome, Call]:
        admission = self.admission(parent, call_id)
        before = np.empty(0, np.int32) if parent is None else parent.tokens
        prompt = np.concatenate([before, self._ids(carry)])
        generated = self._ids(generate)
        log_probs = -self.rng.random(generate, dtype=np.float32)
        outcome = self.stager.stage_admitted(
            "uid",
            OffloadedRequestPayload(prompt, generated, log_probs),
            finished_metadata=FinishedRequestRecord(
                policy_epoch=[(0, 3)] if epochs is None else epochs, kv_cache_epoch=[(0, 3)]
            ),
            offload_params={
                ADMISSION_KEY: admission.model_dump(),
                CONTEXT_KEY: CallContext(CallEvidence((), logprobs_mode="raw"), ledger),
                PREFIX_KEY: PreparedPrefix(
                    ResolvedPrefix(
                        to_token_ids(before),
                        "root" if parent is None else "store",
                        0 if parent is None else len(parent.generated),
                    )
                ),
                **(params or {}),
            },
        )
        assert outcome.coords is not None
        chain = [] if parent is None else parent.chain
        key = outcome.coords.staging_key
        call = Call(
            outcome.coords, prompt, generated, log_probs, [*chain, key] if key else [*chain]
        )
        return outcome, call

    def _ids(self, n: int) -> np.ndarray:
        return self.rng.integers(0, 1000, n).astype(np.int32)
