"""No Python per token where a call is staged or resolved.

Counted in lines of Python, so that it does not depend on how busy the machine is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tokenplane.capture.core import RolloutTokenCapture
from tokenplane.capture.prefix_resolver import PrefixResolver
from tokenplane.schemas.staged_row import CallEvidence
from tokenplane.schemas.wire import CaptureAdmission, CommitCoords
from tokenplane.staging import TokenSink, TokenSource, open_store

EVIDENCE = CallEvidence(policy_epochs=((0, 3),), kv_cache_epochs=((0, 3),))


def events_in(work: Callable[[], Any]) -> int:
    """Lines and calls of Python that ``work`` runs in this thread."""
    count = 0

    def tally(*_: Any) -> Any:
        nonlocal count
        count += 1
        return tally

    before = sys.gettrace()
    sys.settrace(tally)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def stage(
    capture: RolloutTokenCapture,
    call: str,
    tokens: int,
    parent: CommitCoords | None,
    chain: list[str],
    prefix: np.ndarray,
) -> tuple[CommitCoords, np.ndarray]:
    new = np.arange(tokens, dtype=np.int32)
    prompt = np.concatenate([prefix, new])
    sampled = np.arange(tokens, dtype=np.int32)
    values: dict[str, Any] = {"rollout_id": "r", "model_call_id": call, "mode": "text"}
    if parent is not None:
        values |= {
            "mode": "token_in",
            "parent_call_id": parent.model_call_id,
            "prev_len": parent.cum_len,
            "staging_chain": chain,
            "parent_chain_hash": parent.chain_hash,
        }
    active = capture.begin_call(
        CaptureAdmission(**values), prefix_token_ids=None if parent is None else prefix
    )
    coords = capture.complete_call(
        active,
        prompt_token_ids=prompt,
        generated_token_ids=sampled,
        generated_logprobs=np.full(tokens, -0.5, np.float32),
        evidence=EVIDENCE,
    )
    assert coords.disposition == "staged"
    return coords, np.concatenate([prompt, sampled])


def capture_of(store: Any) -> RolloutTokenCapture:
    return RolloutTokenCapture(sink=TokenSink(store), weight_version_fn=lambda: 3)


def test_staging_32k_tokens_runs_as_much_python_as_staging_few() -> None:
    with open_store("memory:") as store:
        capture = capture_of(store)
        none = np.empty(0, np.int32)
        stage(capture, "warm", 16, None, [], none)
        few = events_in(lambda: stage(capture, "few", 16, None, [], none))
        many = events_in(lambda: stage(capture, "many", 16_384, None, [], none))
        assert abs(many - few) < 50
        assert few < 5000


def test_resolving_50_rows_costs_per_row_and_not_per_token() -> None:
    counts = {}
    for tokens in (4, 400):
        with open_store("memory:") as store:
            capture = capture_of(store)
            coords, whole, chain = None, np.empty(0, np.int32), list[str]()
            for turn in range(50):
                coords, whole = stage(capture, f"c{turn}", tokens, coords, chain, whole)
                assert coords.staging_key is not None
                chain = [*chain, coords.staging_key]
            assert coords is not None
            admission = CaptureAdmission(
                rollout_id="r",
                model_call_id="next",
                mode="token_in",
                parent_call_id=coords.model_call_id,
                prev_len=coords.cum_len,
                staging_chain=chain,
                parent_chain_hash=coords.chain_hash,
            )
            PrefixResolver(TokenSource(store)).resolve(admission)
            resolver = PrefixResolver(TokenSource(store))
            counts[tokens] = events_in(lambda: resolver.resolve(admission))  # noqa: B023
            found = resolver.resolve(admission)
            assert found.source == "cache"
            assert np.array_equal(found.token_ids, whole)
    assert abs(counts[400] - counts[4]) < 100
    assert counts[4] < 50 * 600
