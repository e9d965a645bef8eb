"""Staged rows of a given size for benchmarks, made without a model."""

from __future__ import annotations

import time

import numpy as np

from tokenplane.schemas.staged_call import build_staged_call
from tokenplane.schemas.staged_row import CallEvidence, StagedRow
from tokenplane.schemas.tokens import frozen, to_token_ids


def make_chain(rollout: str, calls: int, tokens: int, *, seed: int = 0) -> list[StagedRow]:
    """``calls`` rows of one rollout, each with ``tokens`` new tokens, a quarter of them sampled."""
    generator = np.random.default_rng(seed)
    rows: list[StagedRow] = []
    sequence = np.zeros(0, np.int32)
    for number in range(calls):
        parent = rows[-1] if rows else None
        sampled = max(1, tokens // 4)
        fresh = generator.integers(0, 150_000, tokens - sampled, dtype=np.int32)
        generated = generator.integers(0, 150_000, sampled, dtype=np.int32)
        prompt = np.concatenate([sequence, fresh])
        call = build_staged_call(
            rollout_id=rollout,
            model_call_id=f"call-{number}",
            parent_call_id=None if parent is None else parent.call.model_call_id,
            mode="text" if parent is None else "token_in",
            prev_len=len(sequence),
            weight_version=1,
            parent_chain_hash=None if parent is None else parent.call.chain_hash,
            prompt_token_ids=to_token_ids(prompt),
            generated_token_ids=to_token_ids(generated),
            generated_log_probs=frozen(-generator.random(sampled, np.float32)),
            extras=None,
        )
        key = f"{rollout}/call-{number}/1"
        rows.append(StagedRow(key, call, CallEvidence(((0, 1),)), time.time()))
        sequence = np.concatenate([prompt, generated])
    return rows
