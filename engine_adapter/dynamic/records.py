"""What crosses into Megatron's request and record types, and back."""

from __future__ import annotations

from typing import Any

from tokenplane.engine_adapter.models.megatron_process import quiet_imports

with quiet_imports():
    from megatron.core.inference.sampling_params import SamplingParams as MegatronSampling

__all__ = [
    "EVIDENCE",
    "FAILURE",
    "WIRE",
    "MegatronSampling",
    "megatron_sampling",
    "record_lists",
]

WIRE = "tokenplane"
"""Attribute of Megatron's sampling parameters that carries our request to the engine."""
EVIDENCE = "tokenplane_evidence"
"""Attribute of the reply's sampling parameters that carries our evidence back."""
FAILURE = "tokenplane_failure"
"""Likewise: ``[code, message]`` of a request that failed."""


def megatron_sampling(wire: dict[str, Any]) -> Any:
    """Megatron's sampling parameters that carry our request; the engine fills in the rest."""
    params = MegatronSampling(num_tokens_to_generate=wire["max_tokens"], termination_id=-1)
    params.add_attributes({WIRE: wire})
    return params


def record_lists(record: Any) -> tuple[list[int], list[float], Any]:
    """Generated ids, their log-probabilities and the routes of a record and its checkpoints."""
    tokens = [token for inner in record.requests for token in inner.generated_tokens]
    log_probs = [value for inner in record.requests for value in inner.generated_log_probs]
    return tokens, log_probs, record.requests[0].routing_indices
