"""Our answers to the contract's questions, in the form of Gym's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from tokenplane.schemas import digests, fingerprints, manifest, routes, wire
from tokenplane.schemas.errors import TokenplaneError


def _model(name: str, data: Any) -> Any:
    kind = getattr(wire, name, None) or getattr(manifest, name)
    return kind.model_validate_json(json.dumps(data)).model_dump()


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "extras_digest": digests.extras_digest,
    "cumulative_hash": digests.cumulative_hash,
    "chain_hash": digests.chain_hash,
    "staging_digest": lambda call: digests.staging_digest(**call),
    "assistant_fingerprint": fingerprints.assistant_fingerprint,
    "conversation_digest": fingerprints.conversation_digest,
    "encode_routes": routes.encode_routes,
    "decode_routes": lambda envelope: routes.decode_routes(envelope).tolist(),
    "route_span": routes.classify_route_span,
    "model": _model,
}


def answer(operation: str, arguments: list[Any]) -> dict[str, Any]:
    """``{"value": ...}``, or ``{"rejected": code or None}`` for input that we refuse."""
    try:
        return {"value": _OPERATIONS[operation](*arguments)}
    except TokenplaneError as error:
        return {"rejected": error.code}
    except ValidationError:
        return {"rejected": None}
