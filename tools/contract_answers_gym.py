"""NeMo-Gym's answers to the contract's questions; runs in a process of its own.

Stdin: ``[[operation, arguments], ...]`` as JSON. Stdout: ``{"version": ..., "answers": [...]}``,
each ``{"value": ...}`` or ``{"rejected": code or null}``. Gym comes from PYTHONPATH; nothing of
tokenplane is imported, and no other module of tokenplane imports this one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

gym: Any = import_module("nemo_gym.token_id_capture.staging")
records: Any = import_module("nemo_gym.token_id_capture.staging.records")
prints: Any = import_module("nemo_gym.token_id_capture.fingerprint")
package: Any = import_module("nemo_gym")

VERSIONS = {"schema_version": 2, "digest_version": 2, "extras_digest_version": 1}


def route_span(carry: int, generation: int, staged: int) -> str:
    return str(
        gym.classify_route_span(carry_len=carry, generation_len=generation, staged_route_len=staged)
    )


OPERATIONS: dict[str, Callable[..., Any]] = {
    "extras_digest": gym.compute_extras_digest,
    "cumulative_hash": gym.hash_token_ids,
    "chain_hash": gym.compute_chain_hash,
    "staging_digest": lambda call: gym.compute_staging_digest(**{**VERSIONS, **call}),
    "assistant_fingerprint": prints.assistant_fingerprint,
    "conversation_digest": prints.conversation_digest,
    "encode_routes": lambda routes, dtype: gym.encode_routed_experts(routes, dtype=dtype),
    "decode_routes": lambda routes: gym.decode_routed_experts(routes).values,
    "route_span": route_span,
    "model": lambda name, data: (
        getattr(records, name).model_validate_json(json.dumps(data)).model_dump()
    ),
}


def answer(operation: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"value": OPERATIONS[operation](*arguments)}
    except Exception as error:  # noqa: BLE001 - whatever it raises is how Gym rejects the input
        return {"rejected": getattr(error, "code", None)}


if __name__ == "__main__":
    answers = [answer(*question) for question in json.load(sys.stdin)]
    print(json.dumps({"version": package.__version__, "answers": answers}))
