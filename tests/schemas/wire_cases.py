"""What the wire models of a call accept and refuse, rule by rule (CONTRACT section 5).

``tests/schemas`` holds our models to these tables, ``tests/interop`` the real NeMo-Gym's.
"""

from __future__ import annotations

from typing import Any

from tokenplane.schemas.digests import ABSENT_EXTRAS_DIGEST, staging_digest
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.wire import SIGNED_FIELDS

type Cases = list[tuple[bool, dict[str, Any]]]

H = "ab" * 32
ROOT: dict[str, Any] = {"rollout_id": "r", "model_call_id": "c", "mode": "text"}
CHILD: dict[str, Any] = {
    "rollout_id": "r",
    "model_call_id": "c",
    "mode": "token_in",
    "parent_call_id": "p",
    "prev_len": 2,
    "staging_chain": ["r/p"],
    "parent_chain_hash": H,
}
INLINE: dict[str, Any] = {**CHILD, "staging_chain": [], "required_prefix_token_ids": [5, 2**40]}
STAGED: dict[str, Any] = {
    "rollout_id": "r",
    "model_call_id": "c",
    "parent_call_id": "p",
    "prev_len": 2,
    "delta_len": 3,
    "cum_len": 5,
    "weight_version": 2**64,
    "digest": H,
    "extras_digest": H,
    "staging_key": "k",
    "chain_hash": H,
    "cumulative_hash": H,
}
NO_PROOF = dict.fromkeys(
    ("digest", "extras_digest", "staging_key", "chain_hash", "cumulative_hash")
)
FAILED: dict[str, Any] = {
    **STAGED,
    **NO_PROOF,
    "delta_len": 0,
    "cum_len": 2,
    "disposition": "capture_failed",
}
ROOT_LENGTHS = {"parent_call_id": None, "prev_len": 0, "cum_len": 3}


def signed(**change: Any) -> dict[str, Any]:
    """A row with the digest that its own fields give (a placeholder where they give none)."""
    row: dict[str, Any] = {
        "rollout_id": "r",
        "model_call_id": "c",
        "parent_call_id": "p",
        "mode": "token_in",
        "prev_len": 3,
        "delta_len": 2,
        "cum_len": 5,
        "weight_version": 7,
        "token_ids_delta": [10, 11],
        "token_mask_delta": [0.0, 1.0],
        "generation_log_probs_delta": [0.0, -0.25],
        "extras_digest": ABSENT_EXTRAS_DIGEST,
        "chain_hash": H,
        "cumulative_hash": H,
        **change,
    }
    try:
        digest = staging_digest(**{name: row[name] for name in SIGNED_FIELDS if name in row})
    except (InvalidRecordError, TypeError):
        digest = H
    return {**row, "digest": change.get("digest", digest)}


def variants(base: dict[str, Any], cases: Cases) -> Cases:
    return [(ok, {**base, **change}) for ok, change in cases]


BAD_ID: list[Any] = ["", None, 5, 1.5, True, ["r"]]
BAD_UINT: list[Any] = [-1, True, 2.0, "2", None, [2]]
BAD_HEX: list[Any] = ["", H[:-1], H + "a", H.upper(), "g" * 64, H + "\n", 5, True]
BAD_IDS: list[Any] = [[5, -1], [5, 7.0], [5, True], [5, "7"], [5, None], "57", {"5": 7}, None, 5]


def each(name: str, values: list[Any], *, ok: bool = False) -> Cases:
    return [(ok, {name: value}) for value in values]


VERSIONED: Cases = [
    *each("schema_version", [2], ok=True),
    *each("schema_version", [1, 3, "2", None]),
    *each("unknown", [1, None]),
]
DIGESTED: Cases = [
    *VERSIONED,
    *each("digest_version", [2], ok=True),
    *each("digest_version", [1, 3, "2", None]),
    *each("extras_digest_version", [1], ok=True),
    *each("extras_digest_version", [0, 2, "1", None]),
]

ADMISSIONS: Cases = [
    *variants(
        ROOT,
        [
            (True, {}),
            (True, {"parent_call_id": None, "prev_len": 0, "staging_chain": []}),
            (True, {"required_prefix_token_ids": [], "parent_chain_hash": None}),
            (True, {"rollout_id": "röll/🙂"}),
            *each("parent_call_id", ["p"]),
            *each("prev_len", [1]),
            *each("required_prefix_token_ids", [[1]]),
            *each("staging_chain", [["k"]]),
            *each("parent_chain_hash", [H]),
            *each("mode", ["token_in", "other", None, "", 1]),
            *each("rollout_id", BAD_ID),
            *each("model_call_id", BAD_ID),
            *VERSIONED,
        ],
    ),
    *variants(
        CHILD,
        [
            (True, {}),
            (True, {"required_prefix_token_ids": [1]}),  # not checked where there is a chain
            (True, {"prev_len": 10**30}),
            *each("parent_call_id", BAD_ID),
            *each("prev_len", [0, *BAD_UINT]),
            *each("parent_chain_hash", [None, *BAD_HEX]),
            *each("staging_chain", [[], [5], ["k", None], "k", None]),
            *each("staging_chain", [[""]], ok=True),
            *each("required_prefix_token_ids", BAD_IDS),
            *each("mode", ["text"]),
        ],
    ),
    *variants(
        INLINE,
        [
            (True, {}),
            *each("required_prefix_token_ids", [[], [5], [5, 7, 9], *BAD_IDS]),
        ],
    ),
]
COORDS: Cases = [
    *variants(
        STAGED,
        [
            (True, {}),
            (True, {"disposition": "staged"}),
            (True, ROOT_LENGTHS),
            *[(False, {name: None}) for name in NO_PROOF],
            *[(False, {name: value}) for name in NO_PROOF for value in BAD_HEX[:1] + BAD_HEX[6:]],
            *each("digest", BAD_HEX),
            *each("staging_key", BAD_ID),
            *each("disposition", ["capture_failed", "other", None, ""]),
            *each("parent_call_id", BAD_ID),
            *[
                (False, {name: value})
                for name in ("prev_len", "delta_len", "cum_len", "weight_version")
                for value in BAD_UINT
            ],
            (False, {"cum_len": 6}),
            (False, {"delta_len": 0, "cum_len": 2}),
            (False, {"prev_len": 0, "cum_len": 3}),
            (False, {"parent_call_id": None}),
            *DIGESTED,
        ],
    ),
    *variants(
        FAILED,
        [
            (True, {}),
            (True, {"parent_call_id": None, "prev_len": 0, "cum_len": 0}),
            *[(False, {name: H}) for name in NO_PROOF],
            (False, {"delta_len": 1, "cum_len": 3}),
            (False, {"cum_len": 3}),
            (False, {"disposition": "staged"}),
            *each("reason", ["text"]),
        ],
    ),
]
ROWS: Cases = [
    (True, signed()),
    (True, signed(parent_call_id=None, mode="text", prev_len=0, cum_len=2)),
    (True, signed(token_ids_delta=[10, 2**64 - 1], weight_version=2**64 - 1)),
    (True, signed(generation_log_probs_delta=[-0.0, -1e-45])),
    (True, signed(token_mask_delta=[0.0, 0.0], generation_log_probs_delta=[0.0, 0.0])),
    (True, signed(rollout_id="röll", model_call_id="🙂")),
    (True, {**signed(), "token_mask_delta": [0, 1], "generation_log_probs_delta": [0, -0.25]}),
    (False, {**signed(), "digest": H}),
    (False, {**signed(), "token_ids_delta": [10, 12]}),
    (False, {**signed(), "weight_version": 8}),
    (False, {**signed(), "chain_hash": "cd" * 32}),
    *[(ok, {**signed(), **change}) for ok, change in DIGESTED],
    *[
        (False, signed(**{name: value}))
        for name, values in {
            "rollout_id": BAD_ID,
            "model_call_id": BAD_ID,
            "parent_call_id": BAD_ID,
            "mode": ["text", "other", None],
            "prev_len": [0, 4, *BAD_UINT],
            "delta_len": [0, 1, 3, *BAD_UINT],
            "cum_len": [4, 6, *BAD_UINT],
            "weight_version": [2**64, *BAD_UINT],
            "digest": BAD_HEX,
            "extras_digest": [None, *BAD_HEX],
            "chain_hash": [None, *BAD_HEX],
            "cumulative_hash": [None, *BAD_HEX],
            "token_ids_delta": [[], [10], [10, 2**64], *BAD_IDS],
            "token_mask_delta": [
                *([], [0.0], [0.0, 0.5], [0.0, 2.0], [False, True], ["0", "1"], [0.0, None], None)
            ],
            "generation_log_probs_delta": [
                *([0.0], [0.0, True], [0.0, "-1"], [0.0, None], [-0.5, -0.25], [0.0, 1e39], None)
            ],
        }.items()
        for value in values
    ],
]
RESULTS: Cases = [
    (True, {"ok": True, "staging_key": "k"}),
    (True, {"ok": True, "staging_key": "k", "error": "said anyway"}),
    (True, {"ok": False, "error": "full"}),
    (True, {"ok": False, "error": "full", "staging_key": "k"}),
    *[(False, {"ok": True, "staging_key": value}) for value in BAD_ID],
    (False, {"ok": True}),
    (False, {"ok": False}),
    (False, {"ok": False, "error": ""}),
    (False, {"ok": False, "error": None, "staging_key": "k"}),
    (False, {"ok": False, "error": 5}),
    (False, {"ok": None, "error": "full"}),
    (False, {"error": "full"}),
    *[(ok, {"ok": True, "staging_key": "k", **change}) for ok, change in VERSIONED],
]

CASES: dict[str, Cases] = {
    "CaptureAdmission": ADMISSIONS,
    "CommitCoords": COORDS,
    "StagedCallBaseSnapshot": ROWS,
    "StagedCallRecord": ROWS,
    "StageResult": RESULTS,
}
