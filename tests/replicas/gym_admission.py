"""An admission as NeMo-Gym's model server sends it; imports no model."""

from __future__ import annotations

from typing import Any


def admission(call: str, parent: dict[str, Any] | None = None) -> dict[str, Any]:
    """What NeMo-Gym's model server sends (CONTRACT section 5)."""
    values = {
        "schema_version": 2,
        "rollout_id": "g1",
        "model_call_id": call,
        "parent_call_id": None,
        "prev_len": 0,
        "mode": "text",
        "required_prefix_token_ids": [],
        "staging_chain": [],
        "parent_chain_hash": None,
    }
    if parent is not None:
        values |= {
            "mode": "token_in",
            "parent_call_id": parent["model_call_id"],
            "prev_len": parent["cum_len"],
            "staging_chain": [parent["staging_key"]],
            "parent_chain_hash": parent["chain_hash"],
        }
    return values
