"""NeMo-Gym's own capture library behind JSON lines: run by the Gym environment's interpreter.

One request a line on stdin, ``{"op": name, "args": {...}}``; one answer a line on stdout,
``{"value": ...}`` or ``{"rejected": class name, "code": ...}``. Python's JSON keeps every
float bit, every integer and lone surrogates; what JSON lacks comes as ``{"$tuple": [...]}`` and
``{"$bytes": hex}``. Nothing of tokenplane is imported here.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import nemo_gym.token_id_capture.staging as gym  # type: ignore[import-not-found,unused-ignore]
from nemo_gym.token_id_capture import (  # type: ignore[import-not-found,unused-ignore]
    fingerprint,
)
from nemo_gym.token_id_capture.staging import (  # type: ignore[import-not-found,unused-ignore]
    records,
)


def parse(model: str, data: Any, as_json: bool) -> Any:
    kind = getattr(records, model)
    parsed = kind.model_validate_json(json.dumps(data)) if as_json else kind.model_validate(data)
    return parsed.model_dump()


def extras_digest(extras: Any) -> Any:
    return gym.compute_extras_digest(extras)


def staging_digest(fields: dict[str, Any]) -> Any:
    versions = {"schema_version": 2, "digest_version": 2, "extras_digest_version": 1}
    return gym.compute_staging_digest(**{**versions, **fields})


def token_hashes(ids: Any, parent: Any) -> Any:
    return [gym.hash_token_ids(ids), gym.compute_chain_hash(parent, ids)]


def fingerprints(items: Any) -> Any:
    return [fingerprint.assistant_fingerprint(items), fingerprint.conversation_digest(items)]


def encode_routes(values: Any, dtype: Any) -> Any:
    return gym.encode_routed_experts(values, dtype=dtype)


def decode_routes(payload: Any) -> Any:
    return gym.decode_routed_experts(payload).values


def route_span(lengths: list[Any]) -> Any:
    names = ("carry_len", "generation_len", "staged_route_len")
    return gym.classify_route_span(**dict(zip(names, lengths, strict=True)))


def linearize(receipt: dict[str, Any], snapshots: list[dict[str, Any]]) -> Any:
    """Unvalidated models, as a store or a framework of any quality could hand them over."""
    manifest = [records.CallRecord.model_construct(**record) for record in receipt["manifest"]]
    built = records.RolloutReceipt.model_construct(**{**receipt, "manifest": manifest})
    rows = [records.StagedCallBaseSnapshot.model_construct(**row) for row in snapshots]
    return asdict(gym.verify_and_linearize(built, rows))


def terminal(
    rows: list[dict[str, Any]], explicit: Any, declared: Any, response: Any
) -> list[str | None]:
    parsed = [records.CallRecord.model_validate(row) for row in rows]
    named = gym.resolve_terminal(parsed, response, explicit, declared_response_id=declared)
    walked = gym.select_terminal_call(parsed)
    return [named.model_call_id, walked.terminal_model_call_id, walked.reason]


def call(
    admission: dict[str, Any],
    begin: dict[str, Any],
    provided: Any,
    complete: dict[str, Any],
    sink: str,
) -> Any:
    """One call through the capture core: begin, complete, and a second completion."""
    stored: list[Any] = []

    def store(record: Any, keywords: dict[str, Any]) -> Any:
        if sink == "raises":
            raise RuntimeError("the disk is gone")
        if sink == "refuses":
            return records.StageResult(ok=False, error="full")
        if sink == "says nothing":
            return None
        stored.append([record.model_dump(), keywords])
        return records.StageResult(ok=True, staging_key=f"key of {record.model_call_id}")

    class Sink:
        def stage(self, record: Any, **keywords: Any) -> Any:
            return store(record, keywords)

    class PlainSink:
        def stage(self, record: Any) -> Any:
            return store(record, {})

    capture = gym.RolloutTokenCapture(
        sink=PlainSink() if sink == "plain" else Sink(), weight_version_fn=lambda: provided
    )
    active = capture.begin_call(records.CaptureAdmission.model_validate(admission), **begin)
    coords = capture.complete_call(active, **complete).model_dump()
    try:
        capture.complete_call(active, **complete)
        again = None
    except gym.CaptureError as error:
        again = type(error).__name__
    return {"coords": coords, "stored": stored, "again": again}


def golden_vectors() -> Any:
    gym.assert_golden_vectors()
    return gym.load_golden_vectors()


OPERATIONS: dict[str, Callable[..., Any]] = {
    operation.__name__: operation
    for operation in (
        *(parse, extras_digest, staging_digest, token_hashes, fingerprints, encode_routes),
        *(decode_routes, route_span, linearize, terminal, call, golden_vectors),
    )
}


def from_line(value: dict[str, Any]) -> Any:
    if value.keys() == {"$tuple"}:
        return tuple(value["$tuple"])
    if value.keys() == {"$bytes"}:
        return bytes.fromhex(value["$bytes"])
    return value


def answer(line: str) -> dict[str, Any]:
    request = json.loads(line, object_hook=from_line)
    operation = OPERATIONS[request["op"]]
    # A wrong question ends the process: it must not look like a rejection.
    bound = inspect.signature(operation).bind(**request["args"])
    try:
        return {"value": operation(*bound.args)}
    except Exception as error:  # noqa: BLE001 - whatever it raises is how Gym rejects the input
        return {"rejected": type(error).__name__, "code": getattr(error, "code", None)}


def main() -> None:
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
