"""Rollouts for the verifier: a tree of real calls, its receipt, and ways to damage either."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.schemas.strategies import FLOAT32S, TOKEN_IDS, VERSIONS
from tokenplane.schemas.digests import staging_digest
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.staged_call import StagedCall, build_staged_call
from tokenplane.schemas.tokens import to_log_probs, to_token_ids
from tokenplane.schemas.wire import SIGNED_FIELDS

SHARED = (
    *("model_call_id", "parent_call_id", "mode", "prev_len", "delta_len", "cum_len"),
    *("weight_version", "digest", "extras_digest", "chain_hash", "cumulative_hash"),
)
VERSION_FIELDS = {"schema_version": 2, "digest_version": 2, "extras_digest_version": 1}


@dataclass
class Rollout:
    """A receipt and its snapshots as plain objects; every field is present."""

    receipt: dict[str, Any]
    snapshots: list[dict[str, Any]]

    @property
    def manifest(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.receipt["manifest"]
        return rows

    def resign(self, at: int) -> None:
        """Give the snapshot the digest of its contents, and the manifest the same fields."""
        row = self.snapshots[at]
        try:
            row["digest"] = staging_digest(**{name: row[name] for name in SIGNED_FIELDS})
        except InvalidRecordError:
            return
        self.manifest[at].update({name: row[name] for name in SHARED})


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """One to five calls, each a root or the child of an earlier one; any may be the terminal."""
    calls: list[tuple[Any, list[int]]] = []
    for at in range(draw(st.integers(1, 5))):
        parent = draw(st.sampled_from([None, *calls])) if calls else None
        prefix = [] if parent is None else parent[1]
        prompt = prefix + draw(st.lists(TOKEN_IDS, min_size=parent is None, max_size=3))
        generated = draw(st.lists(TOKEN_IDS, min_size=1, max_size=3))
        call = build_staged_call(
            rollout_id="röll",
            model_call_id=f"call-{at}",
            parent_call_id=None if parent is None else parent[0].model_call_id,
            mode="text" if parent is None else "token_in",
            prev_len=len(prefix),
            weight_version=draw(VERSIONS),
            parent_chain_hash=None if parent is None else parent[0].chain_hash,
            prompt_token_ids=to_token_ids(prompt),
            generated_token_ids=to_token_ids(generated),
            generated_log_probs=to_log_probs([draw(FLOAT32S) for _ in generated]),
            extras=draw(st.sampled_from([None, {}, {"a": 1}])),
        )
        calls.append((call, prompt + generated))
    order = draw(st.permutations([call for call, _ in calls]))
    return as_rollout(order, draw(st.sampled_from(order)).model_call_id)


def as_rollout(calls: list[StagedCall], terminal: str) -> Rollout:
    """The calls in this order as manifest and snapshots, under a receipt that declares one."""
    manifest = [
        {
            **VERSION_FIELDS,
            **{name: getattr(call, name) for name in SHARED},
            "staging_key": f"key/{call.model_call_id}",
            "response_id": f"resp-{call.model_call_id}",
            "admitted_at": None,
            "output_fingerprint": None,
            "continuation_fingerprint": None,
            "fingerprint_version": 0,
        }
        for call in calls
    ]
    receipt = {
        **VERSION_FIELDS,
        "rollout_id": calls[0].rollout_id,
        "reward": 1.0,
        "terminal_model_call_id": terminal,
        "manifest": manifest,
        "capture_poisoned": False,
        "failure_reason": None,
        "terminal_selection": "declared",
        "terminal_attribution_reason": None,
    }
    return Rollout(receipt, [call.to_wire_snapshot().model_dump() for call in calls])


H = "ab" * 32
ODD: dict[str, list[Any]] = {
    "model_call_id": ["call-0", "call-1", "other"],
    "parent_call_id": [None, "call-0", "call-1", "call-2", "gone"],
    "rollout_id": ["other", ""],
    "mode": ["text", "token_in", "other"],
    "prev_len": [0, 1, 2, 3, 5],
    "delta_len": [0, 1, 2, 3],
    "cum_len": [1, 2, 3, 4, 6],
    "weight_version": [0, 7, 2**64],
    "digest": [H, ""],
    "extras_digest": [H, ""],
    "chain_hash": [H, "", None],
    "cumulative_hash": [H, "", None],
    "schema_version": [1, 3],
    "digest_version": [1, 3],
    "extras_digest_version": [0, 2],
    "staging_key": ["key/call-0", "key/call-1"],
}
RECEIPT_ODD: dict[str, list[Any]] = {
    "rollout_id": ["other"],
    "terminal_model_call_id": [None, "gone", "call-0", "call-1"],
    "capture_poisoned": [True],
    "failure_reason": ["unresolved_parent", ""],
    "schema_version": [1, 3],
    "digest_version": [1, 3],
    "extras_digest_version": [0, 2],
}
COLUMNS = ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")


@st.composite
def damaged(draw: st.DrawFn) -> Rollout:
    """A rollout with one or two kinds of damage, signed again or not."""
    rollout = copy.deepcopy(draw(rollouts()))
    for _ in range(draw(st.integers(1, 2))):
        if not rollout.snapshots or not rollout.manifest:
            break
        size = min(len(rollout.snapshots), len(rollout.manifest))
        at, other = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))
        row, record = rollout.snapshots[at], rollout.manifest[at]
        kind = draw(
            st.sampled_from(
                [
                    *("receipt", "record", "snapshot", "signed", "signed column", "column"),
                    *("drop", "twice", "swap", "swap both", "empty", "reparent", "mask", "mask"),
                ]
            )
        )
        if kind == "receipt":
            name = draw(st.sampled_from(sorted(RECEIPT_ODD)))
            rollout.receipt[name] = draw(st.sampled_from(RECEIPT_ODD[name]))
        elif kind == "record":
            name = draw(st.sampled_from(sorted(set(ODD) - {"rollout_id"})))
            record[name] = draw(st.sampled_from(ODD[name]))
        elif kind in ("snapshot", "signed"):
            name = draw(st.sampled_from(sorted(set(ODD) - {"staging_key"})))
            row[name] = draw(st.sampled_from(ODD[name]))
        elif kind in ("column", "signed column"):
            name = draw(st.sampled_from(COLUMNS))
            values = {"token_ids_delta": TOKEN_IDS}.get(name, st.sampled_from([0.0, 1.0, -0.5]))
            place = draw(st.integers(0, len(row[name])))
            row[name] = [*row[name][:place], draw(values), *row[name][place + 1 :]]
        elif kind == "mask":
            row["token_mask_delta"] = [draw(st.sampled_from([0.0, 1.0])) for _ in row[COLUMNS[0]]]
            row["generation_log_probs_delta"] = [0.0 for _ in row[COLUMNS[0]]]
        elif kind == "drop":
            draw(st.sampled_from([rollout.snapshots, rollout.manifest])).pop(at)
        elif kind == "twice":
            rows = draw(st.sampled_from([rollout.snapshots, rollout.manifest]))
            rows[at] = copy.deepcopy(rows[other])
        elif kind in ("swap", "swap both"):
            row_lists = [rollout.snapshots, rollout.manifest][: 1 + (kind == "swap both")]
            for rows in row_lists:
                rows[at], rows[other] = rows[other], rows[at]
        elif kind == "empty":
            rollout.manifest.clear()
        else:
            # Keeps lengths that fit each other only by chance; cycles come from here.
            row["parent_call_id"] = rollout.snapshots[other]["model_call_id"]
            row["mode"] = "token_in"
            fits = draw(st.booleans())
            row["prev_len"] = (
                rollout.snapshots[other]["cum_len"] if fits else max(row["prev_len"], 1)
            )
            row["cum_len"] = row["prev_len"] + row["delta_len"]
        if kind in ("signed", "signed column", "mask", "reparent"):
            rollout.resign(at)
    return rollout


def fixed_rollout() -> Rollout:
    """root - middle - end, and a dead branch at the root; ``end`` is the terminal."""
    calls: dict[str, Any] = {}
    sequences: dict[str | None, list[int]] = {None: []}
    for ident, parent in (("root", None), ("middle", "root"), ("dead", "root"), ("end", "middle")):
        prompt = [*sequences[parent], len(calls) + 10]
        call = build_staged_call(
            rollout_id="r",
            model_call_id=ident,
            parent_call_id=parent,
            mode="text" if parent is None else "token_in",
            prev_len=len(sequences[parent]),
            weight_version=len(calls),
            parent_chain_hash=None if parent is None else calls[parent].chain_hash,
            prompt_token_ids=to_token_ids(prompt),
            generated_token_ids=to_token_ids([len(calls) + 20]),
            generated_log_probs=to_log_probs([-0.5]),
            extras=None,
        )
        calls[ident] = call
        sequences[ident] = [*prompt, len(calls) + 19]
    return as_rollout(list(calls.values()), "end")
