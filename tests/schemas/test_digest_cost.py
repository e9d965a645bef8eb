"""What a call's digests cost: little more than SHA-256 of the bytes that the contract hashes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import numpy as np

from tokenplane.schemas.staged_call import build_staged_call
from tokenplane.schemas.tokens import to_log_probs, to_token_ids

PROMPT, GENERATED = 32 * 1024, 256
CONTRACT_BYTES = 32
"""Hashed per token of a root call: 8 each for the whole sequence, the chain and the ids of the
digest, 4 each for its mask and log probabilities."""
MOST = 3.0
"""A ratio, so that neither the machine nor its load matters much; measured: 1.4."""


def once(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def test_a_root_call_with_a_32k_prompt_costs_at_most_three_times_its_sha256() -> None:
    rng = np.random.default_rng(1)
    prompt = to_token_ids(rng.integers(0, 150_000, PROMPT, dtype=np.int32))
    generated = to_token_ids(rng.integers(0, 150_000, GENERATED, dtype=np.int32))
    log_probs = to_log_probs(-rng.random(GENERATED, dtype=np.float32))
    payload = bytes(CONTRACT_BYTES * (PROMPT + GENERATED))

    def build() -> object:
        return build_staged_call(
            rollout_id="r",
            model_call_id="c",
            parent_call_id=None,
            mode="text",
            prev_len=0,
            weight_version=1,
            parent_chain_hash=None,
            prompt_token_ids=prompt,
            generated_token_ids=generated,
            generated_log_probs=log_probs,
            extras=None,
        )

    # Taken in turn and the best of each: what else runs then slows both or neither.
    rounds = [(once(build), once(lambda: hashlib.sha256(payload).digest())) for _ in range(40)]
    ratio = min(work for work, _ in rounds) / min(plain for _, plain in rounds)
    assert ratio <= MOST, f"{ratio:.2f}"
