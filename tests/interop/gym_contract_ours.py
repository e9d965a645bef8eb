"""The operations of ``gym_contract_server``, answered by tokenplane."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from tokenplane.capture.collect.linearize import verify_and_linearize
from tokenplane.capture.collect.terminal import resolve_terminal, select_terminal_call
from tokenplane.capture.core import RolloutTokenCapture
from tokenplane.schemas import digests, manifest, routes, wire
from tokenplane.schemas.errors import CaptureError, TokenplaneError
from tokenplane.schemas.fingerprints import assistant_fingerprint, conversation_digest
from tokenplane.schemas.manifest import CallRecord, RolloutReceipt
from tokenplane.schemas.wire import CaptureAdmission, StagedCallBaseSnapshot, StageResult


class Rejected(Exception):
    """Our side said no, with one of its own errors."""

    def __init__(self, name: str, code: str | None) -> None:
        super().__init__(f"{name} {code}")
        self.name = name
        self.code = code


def answers[**P, R](operation: Callable[P, R]) -> Callable[P, R]:
    """``operation`` with our own errors, and no others, turned into ``Rejected``."""

    @functools.wraps(operation)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return operation(*args, **kwargs)
        except TokenplaneError as error:
            raise Rejected(type(error).__name__, error.code) from error
        except ValidationError as error:
            raise Rejected("ValidationError", None) from error

    return wrapped


@answers
def parse(model: str, data: Any, as_json: bool) -> Any:
    kind = getattr(wire, model, None) or getattr(manifest, model)
    parsed = kind.model_validate_json(json.dumps(data)) if as_json else kind.model_validate(data)
    return parsed.model_dump()


@answers
def extras_digest(extras: Any) -> str:
    return digests.extras_digest(extras)


@answers
def staging_digest(fields: dict[str, Any]) -> str:
    return digests.staging_digest(**fields)


@answers
def token_hashes(ids: Any, parent: Any) -> list[str]:
    return [digests.cumulative_hash(ids), digests.chain_hash(parent, ids)]


@answers
def fingerprints(items: Any) -> list[str]:
    return [assistant_fingerprint(items), conversation_digest(items)]


@answers
def encode_routes(values: Any, dtype: Any) -> str:
    return routes.encode_routes(values, dtype)


@answers
def decode_routes(payload: Any) -> Any:
    return routes.decode_routes(payload).tolist()


@answers
def route_span(lengths: list[Any]) -> str:
    return routes.classify_route_span(*lengths)


@answers
def linearize(receipt: dict[str, Any], snapshots: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [CallRecord.model_construct(**record) for record in receipt["manifest"]]
    built = RolloutReceipt.model_construct(**{**receipt, "manifest": rows})
    columns = [StagedCallBaseSnapshot.model_construct(**row) for row in snapshots]
    return verify_and_linearize(built, columns).to_wire()


@answers
def terminal(
    rows: list[dict[str, Any]], explicit: Any, declared: Any, response: Any
) -> list[str | None]:
    parsed = [CallRecord.model_validate(row) for row in rows]
    ident = None if response is None else response.get("id")
    named = resolve_terminal(
        parsed, explicit=explicit, declared=declared, response_id=ident, scored=response
    )
    walked = select_terminal_call(parsed)
    return [named.model_call_id, walked.model_call_id, walked.reason]


@answers
def call(
    admission: dict[str, Any],
    begin: dict[str, Any],
    provided: Any,
    complete: dict[str, Any],
    sink: str,
) -> dict[str, Any]:
    stored: list[Any] = []

    def store(record: Any, keywords: dict[str, Any]) -> Any:
        if sink == "raises":
            raise RuntimeError("the disk is gone")
        if sink == "refuses":
            return StageResult(ok=False, error="full")
        if sink == "says nothing":
            return None
        stored.append([record.to_wire().model_dump(), keywords])
        return StageResult(ok=True, staging_key=f"key of {record.model_call_id}")

    class Sink:
        def stage(self, record: Any, **keywords: Any) -> Any:
            return store(record, keywords)

    class PlainSink:
        def stage(self, record: Any) -> Any:
            return store(record, {})

    capture = RolloutTokenCapture(
        sink=PlainSink() if sink == "plain" else Sink(), weight_version_fn=lambda: provided
    )
    active = capture.begin_call(CaptureAdmission.model_validate(admission), **begin)
    coords = capture.complete_call(active, **complete).model_dump()
    try:
        capture.complete_call(active, **complete)
        again = None
    except CaptureError as error:
        again = type(error).__name__
    return {"coords": coords, "stored": stored, "again": again}
