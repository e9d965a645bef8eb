"""A rollout as the control routes show it: its rows without tokens unless they are asked for, its
manifest, its failures."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenplane.engine_adapter.call_path.call_path import CallPath
from tokenplane.engine_adapter.call_path.call_types import CallTimings
from tokenplane.engine_adapter.server.parts import ServerParts
from tokenplane.schemas.epochs import spans_epochs
from tokenplane.schemas.failure_row import FailureRow
from tokenplane.schemas.manifest import ManifestFailure, RolloutManifest
from tokenplane.schemas.staged_row import STAGED_PARTITION, StagedRow, parse_staged_row
from tokenplane.staging.store import StagingStore


def read_failures(parts: ServerParts, rollout_id: str) -> list[FailureRow]:
    """The rollout's failures in write order; at the end those that the store has not taken yet.

    Raises:
        LedgerError: ``invalid_rollout_id``.
        StoreError: the store cannot be read.
    """
    # First those that wait: one that is saved meanwhile is then named twice, and never not at all.
    waiting = parts.unsaved.waiting(rollout_id)
    return [
        *parts.ledger.failures(rollout_id),
        *(FailureRow(f.rollout_id, f.model_call_id, f.code, f.message, f.at_s) for f in waiting),
    ]


def read_manifest(parts: ServerParts, rollout_id: str) -> RolloutManifest:
    """The rollout's manifest, with the failures that the store has not taken yet.

    Raises: as ``read_failures``.
    """
    waiting = parts.unsaved.waiting(rollout_id)
    manifest = parts.ledger.manifest(rollout_id)
    manifest.failures.extend(
        ManifestFailure(model_call_id=f.model_call_id, reason=f.code) for f in waiting
    )
    return manifest


def read_rows(
    store: StagingStore, path: CallPath, rollout_id: str, *, tokens: bool
) -> list[dict[str, Any]]:
    """The rollout's rows in write order. Reads the store.

    Raises:
        StoreError: the store or a row cannot be read.
    """
    rows = (
        parse_staged_row(batch, key=key)
        for key, batch in store.scan(STAGED_PARTITION, prefix=f"{rollout_id}/")
    )
    return [summarize_row(row, path.timings(row.call.model_call_id), tokens=tokens) for row in rows]


def summarize_row(
    row: StagedRow, timings: CallTimings | None = None, *, tokens: bool = False
) -> dict[str, Any]:
    """One row as JSON values. ``timings`` are known to the process that served the call only."""
    call, evidence, ledger = row.call, row.evidence, row.ledger
    generated = int(call.token_mask_delta.sum())
    summary = {
        "staging_key": row.staging_key,
        "rollout_id": call.rollout_id,
        "model_call_id": call.model_call_id,
        "parent_call_id": call.parent_call_id,
        "response_id": None if ledger is None else ledger.response_id,
        "mode": call.mode,
        "prev_len": call.prev_len,
        "delta_len": call.delta_len,
        "cum_len": call.cum_len,
        "carried": call.delta_len - generated,
        "generated": generated,
        "weight_version": call.weight_version,
        "policy_epochs": [list(boundary) for boundary in evidence.policy_epochs],
        "kv_cache_epochs": [list(boundary) for boundary in evidence.kv_cache_epochs],
        "num_evictions": evidence.num_evictions,
        "spans_epochs": spans_epochs(evidence.policy_epochs),
        "sampling": None if evidence.sampling is None else dataclasses.asdict(evidence.sampling),
        "logprobs_mode": evidence.logprobs_mode,
        "finish_reason": evidence.finish_reason,
        "stop_reason": evidence.stop_reason,
        "prefix_source": evidence.prefix_source,
        "splice_notes": list(evidence.splice_notes),
        "model": evidence.model,
        "model_fingerprint": evidence.model_fingerprint,
        "tokenizer_fingerprint": evidence.tokenizer_fingerprint,
        "template_fingerprint": evidence.template_fingerprint,
        "engine": evidence.engine,
        "admitted_at": evidence.admitted_at,
        "created_at": row.created_at,
        "chain_hash": call.chain_hash,
        "cumulative_hash": call.cumulative_hash,
        "timings": None if timings is None else dataclasses.asdict(timings),
        "stage_ms": None if timings is None else round(timings.stage_s * 1000, 3),
    }
    if tokens:
        summary |= {
            "token_ids_delta": call.token_ids_delta.tolist(),
            "token_mask_delta": call.token_mask_delta.tolist(),
            "generation_log_probs_delta": call.generation_log_probs_delta.tolist(),
        }
    return summary
