"""What the wire models of a rollout accept and refuse, rule by rule (CONTRACT section 5)."""

from __future__ import annotations

from typing import Any

from tests.schemas.wire_cases import (
    BAD_HEX,
    BAD_ID,
    BAD_UINT,
    DIGESTED,
    VERSIONED,
    Cases,
    H,
    each,
    variants,
)

CHILD_ROW: dict[str, Any] = {
    "model_call_id": "c",
    "parent_call_id": "p",
    "response_id": "resp",
    "staging_key": "k",
    "prev_len": 2,
    "delta_len": 3,
    "cum_len": 5,
    "weight_version": 7,
    "digest": H,
    "extras_digest": H,
    "chain_hash": H,
    "cumulative_hash": H,
}
ROOT_ROW: dict[str, Any] = {
    **CHILD_ROW,
    "model_call_id": "p",
    "parent_call_id": None,
    "mode": "text",
    "staging_key": "kp",
    "prev_len": 0,
    "delta_len": 2,
    "cum_len": 2,
}
RECORDS: Cases = [
    *variants(
        CHILD_ROW,
        [
            (True, {}),
            (True, {"mode": "token_in", "weight_version": 2**64}),
            (True, {"admitted_at": 1.5}),
            (True, {"admitted_at": 3}),
            (True, {"admitted_at": None}),
            *each("admitted_at", ["1.5", True, [], float("nan")]),
            *each("output_fingerprint", [None, H], ok=True),
            *each("output_fingerprint", BAD_HEX),
            *each("continuation_fingerprint", [None, H], ok=True),
            *each("continuation_fingerprint", BAD_HEX),
            *each("fingerprint_version", [0, 2, 9], ok=True),
            *each("fingerprint_version", BAD_UINT),
            *[
                (False, {name: value})
                for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash")
                for value in (None, *BAD_HEX)
            ],
            *[
                (False, {name: value})
                for name in ("model_call_id", "parent_call_id", "staging_key", "response_id")
                for value in BAD_ID
            ],
            *[
                (False, {name: value})
                for name in ("prev_len", "delta_len", "cum_len", "weight_version")
                for value in BAD_UINT
            ],
            *each("mode", ["text", "other", None]),
            (False, {"cum_len": 6}),
            (False, {"delta_len": 0, "cum_len": 2}),
            (False, {"prev_len": 0, "cum_len": 3}),
            (False, {"rollout_id": "r"}),
            *DIGESTED,
        ],
    ),
    *variants(
        ROOT_ROW,
        [
            (True, {}),
            (False, {"mode": "token_in"}),
            (False, {"prev_len": 2, "cum_len": 4}),
            (False, {"parent_call_id": "p"}),
        ],
    ),
]
COMMITS: Cases = variants(
    {"rollout_id": "r", "record": CHILD_ROW, "request_items": [], "response_items": []},
    [
        (True, {}),
        (True, {"staging_chain": ["kp", "k"], "request_items": [{"role": "user"}]}),
        *each("staging_chain", [["k", ""], [5], "k", None]),
        *each("record", [None, {**CHILD_ROW, "cum_len": 9}, "c"]),
        *each("request_items", [None, [1], {"a": 1}, ["a"]]),
        *each("response_items", [None, [1], [None]]),
        *each("rollout_id", BAD_ID),
        *VERSIONED,
    ],
)
FAILURES: Cases = variants(
    {"model_call_id": "c", "reason": "unresolved_parent"},
    [
        (True, {}),
        *each("model_call_id", BAD_ID),
        *each("reason", BAD_ID),
        *each("code", ["x"]),
        *VERSIONED,
    ],
)
MANIFESTS: Cases = variants(
    {"rollout_id": "r"},
    [
        (True, {}),
        (True, {"records": [], "failures": []}),
        (True, {"records": [ROOT_ROW, CHILD_ROW, CHILD_ROW]}),
        (True, {"failures": [{"model_call_id": "c", "reason": "x"}] * 2}),
        *each("records", [None, {}, [None], [{**ROOT_ROW, "digest": "x"}]]),
        *each("failures", [None, ["x"], [{"model_call_id": "c"}]]),
        *each("rollout_id", BAD_ID),
        *VERSIONED,
    ],
)
TRUSTED: dict[str, Any] = {
    "rollout_id": "r",
    "manifest": [ROOT_ROW, CHILD_ROW],
    "terminal_model_call_id": "c",
    "terminal_selection": "declared",
}
POISONED: dict[str, Any] = {
    "rollout_id": "r",
    "capture_poisoned": True,
    "failure_reason": "no_records",
}
RECEIPTS: Cases = [
    *variants(
        TRUSTED,
        [
            (True, {}),
            *each("reward", [None, 1, -0.5, "1.5"], ok=True),
            *each("reward", ["x", [], float("nan"), float("inf")]),
            *each("terminal_selection", ["response_id", "content", "heuristic"], ok=True),
            *each("terminal_selection", [None, "explicit", "", 1]),
            *each("terminal_model_call_id", ["p"], ok=True),
            *each("terminal_model_call_id", ["other", *BAD_ID]),
            *each("manifest", [[], [CHILD_ROW, CHILD_ROW], None, [None]]),
            *each("failure_reason", ["x", ""]),
            *each("terminal_attribution_reason", [None, "", "x"], ok=True),
            *each("terminal_attribution_reason", [5]),
            *each("capture_poisoned", [None, "maybe", 2]),
            (True, {"capture_poisoned": True}),
            (True, {"capture_poisoned": True, "failure_reason": "unresolved_parent"}),
            (False, {"capture_poisoned": True, "terminal_selection": None}),
            *DIGESTED,
        ],
    ),
    *variants(
        POISONED,
        [
            (True, {}),
            (True, {"terminal_selection": "heuristic"}),
            (True, {"terminal_selection": "heuristic", "failure_reason": None}),
            (True, {"manifest": [ROOT_ROW]}),
            (False, {"failure_reason": None}),
            (False, {"capture_poisoned": False}),
            (False, {"terminal_model_call_id": "c"}),
            (False, {"manifest": [ROOT_ROW], "terminal_model_call_id": "p"}),
            *each("rollout_id", BAD_ID),
        ],
    ),
]

CASES: dict[str, Cases] = {
    "CallRecord": RECORDS,
    "CaptureLedgerCommit": COMMITS,
    "ManifestFailure": FAILURES,
    "RolloutManifest": MANIFESTS,
    "RolloutReceipt": RECEIPTS,
}
