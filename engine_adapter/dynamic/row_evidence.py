"""What the engine knows of a finished request that a row records beside its tokens and epochs."""

from __future__ import annotations

import json

from tokenplane.capture.hook_types import CallContext
from tokenplane.engine_adapter.dynamic.request import DynamicRequest
from tokenplane.engine_adapter.engine import EngineInfo
from tokenplane.schemas.staged_row import CallEvidence, Sampling


def call_context(request: DynamicRequest, info: EngineInfo) -> CallContext:
    """For the stager of a request that came through Megatron's hooks, where no server of ours says
    how it was asked for. The stager adds the epochs."""
    used = request.sampling
    stop = request.stop
    evidence = CallEvidence(
        policy_epochs=(),
        sampling=Sampling(
            temperature=used.temperature,
            top_k=used.top_k,
            top_p=used.top_p,
            max_tokens=used.max_tokens,
            seed=used.seed,
            stop_token_ids=used.stop_token_ids,
            stop_strings=used.stop_strings,
            ignore_eos=used.ignore_eos,
        ),
        logprobs_mode=used.logprobs_mode,
        finish_reason="length" if stop is None else "stop",
        stop_reason=None if stop is None else json.dumps(stop.reason),
        model=info.name,
        model_fingerprint=info.model_fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        engine=info.engine,
    )
    return CallContext(evidence)
