"""Wire models of a rollout: ledger rows, manifest and receipt (CONTRACT section 5)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tokenplane.schemas.wire import DigestedModel, HexDigest, Id, Mode, UInt, WireModel

TerminalSelection = Literal["declared", "response_id", "content", "heuristic"]


class CallRecord(DigestedModel):
    """One acknowledged call as the manifest lists it; token-free and without a rollout id."""

    model_call_id: Id
    parent_call_id: Id | None = None
    prev_len: UInt
    delta_len: UInt
    cum_len: UInt
    weight_version: UInt
    digest: HexDigest
    extras_digest: HexDigest
    staging_key: Id
    mode: Mode = "token_in"
    chain_hash: HexDigest
    cumulative_hash: HexDigest
    response_id: Id
    admitted_at: Annotated[float, Field(strict=True)] | None = None
    output_fingerprint: HexDigest | None = None
    continuation_fingerprint: HexDigest | None = None
    fingerprint_version: UInt = 0

    @model_validator(mode="after")
    def _check_lineage(self) -> Self:
        if self.delta_len == 0 or self.cum_len != self.prev_len + self.delta_len:
            raise ValueError("delta_len > 0 and cum_len = prev_len + delta_len must hold")
        root = self.parent_call_id is None
        if root != (self.prev_len == 0) or root != (self.mode == "text"):
            raise ValueError("no parent, prev_len 0 and mode text go together")
        return self


class CaptureLedgerCommit(WireModel):
    """What a ledger is asked to record once the served body exists."""

    rollout_id: Id
    record: CallRecord
    staging_chain: tuple[Id, ...] = ()
    request_items: list[dict[str, Any]]
    response_items: list[dict[str, Any]]


class ManifestFailure(WireModel):
    """A call of the rollout that has no verified row, and why."""

    model_call_id: Id
    reason: Id


class RolloutManifest(WireModel):
    """Every acknowledged call and every failure of one rollout, in ledger order."""

    rollout_id: Id
    records: list[CallRecord] = Field(default_factory=list)
    failures: list[ManifestFailure] = Field(default_factory=list)


class RolloutReceipt(DigestedModel):
    """What a framework decides from a manifest: the terminal call, or why there is none."""

    rollout_id: Id
    reward: float | None = None
    terminal_model_call_id: Id | None = None
    manifest: list[CallRecord] = Field(default_factory=list)
    capture_poisoned: bool = False
    failure_reason: str | None = None
    terminal_selection: TerminalSelection | None = None
    terminal_attribution_reason: str | None = None

    @model_validator(mode="after")
    def _check_terminal(self) -> Self:
        ids = [record.model_call_id for record in self.manifest]
        if len(set(ids)) != len(ids):
            raise ValueError("manifest repeats a model_call_id")
        if self.terminal_model_call_id is not None and self.terminal_model_call_id not in ids:
            raise ValueError("the terminal call is not in the manifest")
        if not self.capture_poisoned:
            if self.failure_reason is not None:
                raise ValueError("a receipt with a failure_reason must be poisoned")
            if self.terminal_model_call_id is None or self.terminal_selection is None:
                raise ValueError(
                    "a receipt that is not poisoned needs a terminal and its selection"
                )
        if self.terminal_selection is None and (
            self.terminal_model_call_id is not None or self.failure_reason is None
        ):
            raise ValueError("without a selection: no terminal, and a failure_reason")
        return self
