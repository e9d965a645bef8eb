"""What ``tokenplane verify contract`` asks both sides: fixed questions, so that runs compare."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any

from tokenplane.schemas.digests import (
    chain_hash,
    cumulative_hash,
    extras_digest,
    staging_digest,
)

type Question = tuple[str, list[Any]]
"""An operation and its JSON arguments."""

_TOKENS: list[list[Any]] = [[], [0], [1, 2, 3], [2**31 - 1], list(range(300)), [-1], [True], [1.0]]
_PARENTS: list[Any] = [None, "0" * 64, "ab" * 32, "AB" * 32, "ab" * 31, ""]
_EXTRAS: list[Any] = [
    None,
    {},
    {"b": 1, "a": 1.0, "é": "\U0001f600", "z": [None, True, False, -0.0]},
    {"deep": {"list": [[], {}, {"x": -(2**63)}], "big": 2**63 - 1}},
    {"too_big": 2**63},
    {"tiny": 5e-324, "third": 1 / 3},
    [1, "x", 2.5],
]
_CONVERSATIONS: list[list[Any]] = [
    [],
    [{"role": "user", "content": "2+2?"}],
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4 \u2603"}],
    [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"text": "b"}]}],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"b": 1,  "a": 2.50}'}],
    [{"type": "function_call", "id": "c", "name": "f", "namespace": "n", "arguments": " odd "}],
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ],
    [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
    ],
    [{"type": "reasoning", "summary": []}, {"type": "function_call_output", "output": {"a": 1}}],
    [{"role": "user", "content": [{"no": "type"}]}],
]
_ROUTES: list[Any] = [
    [[[0, 1], [2, 3]]],
    [[[-1]], [[7]], [[127]]],
    [[[128]]],
    [[[1], [2, 3]]],
    [],
    [[[True]]],
    "nrlre1:int16:1x1x1:AQA=",
    "nrlre1:int16:1x1x1:AQ==",
    "nrlre1:float:1x1x1:AQA=",
]
_ODD: list[Any] = [None, True, -1, 0, 7.0, 2**64, "", "x", "AB" * 32, [], ["x"], [1, 2], {}, 1.5]
"""What each field of each model is set to, one at a time."""


def questions() -> Iterator[Question]:
    """All of them, in a fixed order."""
    for extras in _EXTRAS:
        yield "extras_digest", [extras]
    for ids in _TOKENS:
        yield "cumulative_hash", [ids]
        for parent in _PARENTS:
            yield "chain_hash", [parent, ids]
    for items in _CONVERSATIONS:
        yield "assistant_fingerprint", [items]
        yield "conversation_digest", [items]
    for routes in _ROUTES:
        for dtype in ("int8", "int16", "int32"):
            yield "encode_routes", [routes, dtype]
        yield "decode_routes", [routes]
    for carry, generation, staged in ((2, 3, 5), (2, 3, 3), (2, 3, 4), (2, 3, 2), (0, 0, 0)):
        yield "route_span", [carry, generation, staged]
    for change in _calls():
        yield "staging_digest", [change]
    for model, example in examples().items():
        yield "model", [model, example]
        for name in (*example, "schema_version", "digest_version", "not_a_field"):
            for odd in _ODD:
                yield "model", [model, {**example, name: odd}]
            without = copy.deepcopy(example)
            without.pop(name, None)
            yield "model", [model, without]


def _calls() -> Iterator[dict[str, Any]]:
    """A root, a child, and each field of the child set to something odd."""
    for call in (_root(), _child()):
        fields = {k: v for k, v in call.items() if k not in ("digest", "extras")}
        yield fields
        for name in fields:
            for odd in _ODD:
                yield {**fields, name: odd}


def _signed(fields: dict[str, Any], ids: list[int], parent: str | None) -> dict[str, Any]:
    call = {
        "rollout_id": "rollout é",
        "parent_call_id": None,
        "delta_len": 4,
        "token_ids_delta": ids[-4:],
        "token_mask_delta": [0.0, 0.0, 1.0, 1.0],
        "generation_log_probs_delta": [0.0, 0.0, -0.5, -0.0],
        "extras_digest": extras_digest(None),
        "chain_hash": chain_hash(parent, ids[-4:]),
        "cumulative_hash": cumulative_hash(ids),
        **fields,
    }
    return {**call, "digest": staging_digest(**call)}


def _root() -> dict[str, Any]:
    ids = [5, 6, 7, 2**31 - 1]
    lengths = {"mode": "text", "prev_len": 0, "cum_len": 4, "weight_version": 0}
    return _signed({"model_call_id": "a", **lengths}, ids, None)


def _child() -> dict[str, Any]:
    ids = [5, 6, 7, 2**31 - 1, 9, 10, 11, 0]
    lengths = {"mode": "token_in", "prev_len": 4, "cum_len": 8, "weight_version": 2**64 - 1}
    names = {"model_call_id": "b", "parent_call_id": "a"}
    return _signed({**names, **lengths}, ids, _root()["chain_hash"])


def examples() -> dict[str, dict[str, Any]]:
    """One valid object of every wire model."""
    root, child = _root(), _child()
    shared = ("parent_call_id", "prev_len", "delta_len", "cum_len", "weight_version", "digest")
    digests = ("extras_digest", "chain_hash", "cumulative_hash")
    record = {
        **{name: child[name] for name in ("model_call_id", "mode", *shared, *digests)},
        "staging_key": "rollout/b/1",
        "response_id": "response",
        "admitted_at": 1.5,
        "output_fingerprint": hashlib.sha256(b"output").hexdigest(),
        "continuation_fingerprint": None,
        "fingerprint_version": 2,
    }
    first = {
        **record,
        **{name: root[name] for name in ("model_call_id", "mode", *shared, *digests)},
        "staging_key": "rollout/a/1",
    }
    failure = {"model_call_id": "c", "reason": "worker_capture_failed"}
    return {
        "CaptureAdmission": {
            "rollout_id": "r",
            "model_call_id": "b",
            "parent_call_id": "a",
            "prev_len": 4,
            "mode": "token_in",
            "required_prefix_token_ids": [],
            "staging_chain": ["r/a/1"],
            "parent_chain_hash": root["chain_hash"],
        },
        "StagedCallBaseSnapshot": root,
        "StagedCallRecord": {**child, "extras": None},
        "StageResult": {"ok": True, "staging_key": "r/a/1", "error": None},
        "CommitCoords": {
            **{name: child[name] for name in ("rollout_id", "model_call_id", *shared, *digests)},
            "disposition": "staged",
            "staging_key": "r/b/1",
        },
        "CallRecord": record,
        "ManifestFailure": failure,
        "RolloutManifest": {"rollout_id": "r", "records": [first, record], "failures": [failure]},
        "RolloutReceipt": {
            "rollout_id": "r",
            "reward": 1.0,
            "terminal_model_call_id": "b",
            "manifest": [first, record],
            "capture_poisoned": False,
            "failure_reason": None,
            "terminal_selection": "response_id",
            "terminal_attribution_reason": "selected",
        },
    }
