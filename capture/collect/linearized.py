"""What linearizing a rollout gives: one sequence, its spans and its commitments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tokenplane.schemas.tokens import Float32Array, Int32Array, UInt8Array


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """A call's whole delta in row coordinates, and the version it was admitted under."""

    model_call_id: str
    start: int
    end: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class LinkSpan:
    """How a call's delta splits into carried and sampled tokens."""

    model_call_id: str
    carry_len: int
    generation_len: int


@dataclass(frozen=True, slots=True)
class ExtrasCommitment:
    """The digest that a call's extras must have."""

    model_call_id: str
    extras_digest_version: int
    extras_digest: str


@dataclass(frozen=True, slots=True, eq=False)
class LinearizedRollout:
    """One sequence, root to terminal. Arrays have one length ``T`` and are read-only."""

    rollout_id: str
    token_ids: Int32Array = field(repr=False)
    token_mask: UInt8Array = field(repr=False)
    """uint8[T]: 1 on sampled tokens."""
    logprobs: Float32Array = field(repr=False)
    """float32[T], natural log; 0 on carried tokens."""
    model_call_ids: tuple[str, ...]
    prompt_len: int
    """Carried tokens of the root call."""
    weight_versions: tuple[int, ...]
    """Per call: the version at admission."""
    weight_version_spans: tuple[WeightVersionSpan, ...]
    link_spans: tuple[LinkSpan, ...]
    extras_commitments: tuple[ExtrasCommitment, ...]

    def to_wire(self) -> dict[str, Any]:
        """Plain lists and objects under the wire's names."""
        return {
            "rollout_id": self.rollout_id,
            "token_ids": self.token_ids.tolist(),
            "token_mask": self.token_mask.astype(np.float64).tolist(),
            "logprobs": self.logprobs.tolist(),
            "model_call_ids": list(self.model_call_ids),
            "prompt_len": self.prompt_len,
            "weight_versions": list(self.weight_versions),
            "weight_version_spans": [asdict(span) for span in self.weight_version_spans],
            "link_spans": [
                [span.model_call_id, span.carry_len, span.generation_len]
                for span in self.link_spans
            ],
            "extras_commitments": [asdict(item) for item in self.extras_commitments],
        }
