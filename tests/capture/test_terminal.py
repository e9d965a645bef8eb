"""Terminal choice: witnesses that agree, disagree or abstain, and the heuristic walk."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.capture.collect.receipt import build_receipt
from tokenplane.capture.collect.terminal import resolve_terminal, select_terminal_call
from tokenplane.schemas.fingerprints import FINGERPRINT_VERSION, assistant_fingerprint
from tokenplane.schemas.manifest import CallRecord, ManifestFailure, RolloutManifest

ANSWER = [{"type": "message", "role": "assistant", "content": "four"}]
CALL = [{"type": "function_call", "call_id": "x", "name": "add", "arguments": "{}"}]
RESULT = [{"type": "function_call_output", "call_id": "x", "output": "4"}]


def record(ident: str, parent: str | None = None, n: int = 10, **fields: Any) -> CallRecord:
    depth = 0 if parent is None else n - 5
    return CallRecord(
        **{
            "model_call_id": ident,
            "parent_call_id": parent,
            "prev_len": depth,
            "delta_len": n - depth,
            "cum_len": n,
            "weight_version": 1,
            "digest": "1" * 64,
            "extras_digest": "2" * 64,
            "staging_key": f"r/{ident}",
            "mode": "text" if parent is None else "token_in",
            "chain_hash": hashlib.sha256(ident.encode()).hexdigest(),
            "cumulative_hash": hashlib.sha256(ident.encode()).hexdigest(),
            "response_id": f"resp-{ident}",
            "fingerprint_version": FINGERPRINT_VERSION,
            **fields,
        }
    )


CHAIN = [record("a"), record("b", "a", 15), record("c", "b", 20)]


def test_declared_must_match_one_sequence() -> None:
    assert resolve_terminal(CHAIN, declared="resp-b").model_call_id == "b"
    assert resolve_terminal(CHAIN, declared="resp-x").reason == "declared_terminal_not_captured"
    same: Any = {"chain_hash": "a" * 64, "cumulative_hash": "b" * 64}
    twins = [record(i, response_id="resp", **same) for i in ("z", "y")]
    assert resolve_terminal(twins, declared="resp").model_call_id == "y"
    others = [record(i, response_id="resp") for i in ("z", "y")]
    assert resolve_terminal(others, declared="resp").model_call_id is None


def test_explicit_abstains_when_it_misses_and_is_named_declared() -> None:
    choice = resolve_terminal(CHAIN, explicit="nope", response_id="resp-c")
    assert (choice.model_call_id, choice.selection) == ("c", "response_id")
    assert resolve_terminal(CHAIN, explicit="b").selection == "declared"


def test_witnesses_must_agree() -> None:
    choice = resolve_terminal(CHAIN, declared="resp-b", response_id="resp-c")
    assert choice.model_call_id is None
    assert choice.reason == "witness_disagreement[declared=b;response_id=c]"
    assert resolve_terminal(CHAIN, declared="resp-c", response_id="resp-c").model_call_id == "c"


def test_the_content_witness_reads_whole_and_trailing_output() -> None:
    rows = [
        record("a", output_fingerprint=assistant_fingerprint(CALL)),
        record("b", "a", 15, output_fingerprint=assistant_fingerprint(ANSWER)),
    ]
    scored = {"output": [*CALL, *RESULT, *ANSWER]}
    choice = resolve_terminal(rows, scored=scored)
    assert (choice.model_call_id, choice.selection) == ("b", "content")
    whole = record("c", continuation_fingerprint=assistant_fingerprint(scored["output"]))
    assert resolve_terminal([whole], scored=scored).model_call_id == "c"
    old = rows[1].model_copy(update={"fingerprint_version": 1})
    assert resolve_terminal([rows[0], old], scored=scored).reason == "no_content_match"
    odd: Any
    for odd in ({"output": "four"}, {"choices": []}, {"output": [3]}):
        choice = resolve_terminal(rows, scored=odd)
        assert (choice.model_call_id, choice.settled) == (None, False)


def test_heuristic_reasons() -> None:
    assert select_terminal_call([]).reason == "no_records"
    assert select_terminal_call([CHAIN[0], CHAIN[0]]).reason == "duplicate_call_id"
    assert select_terminal_call([CHAIN[1]]).reason == "orphaned_row"
    loop = [record("a", "b", 15), record("b", "a", 15)]
    assert select_terminal_call(loop).reason == "no_root"
    assert select_terminal_call(CHAIN).model_call_id == "c"
    fork = [*CHAIN, record("d", "b", 20)]
    assert select_terminal_call(fork).reason == "ambiguous_terminal"
    extended = [*fork, record("e", "d", 25)]
    assert select_terminal_call(extended).model_call_id == "e"


def test_heuristic_root_order() -> None:
    late = record("late", admitted_at=5.0)
    early = record("early", admitted_at=2.0)
    unstamped = record("unstamped")
    assert select_terminal_call([unstamped, late, early]).model_call_id == "early"
    assert select_terminal_call([unstamped, record("other")]).model_call_id == "unstamped"
    assert select_terminal_call([early, late, record("x", "late", 15)]).model_call_id == "x"


@given(st.lists(st.integers(0, 5), max_size=8))
def test_the_heuristic_ends_at_a_leaf_or_says_why(parents: list[int]) -> None:
    rows = [record("c0")]
    for i, p in enumerate(parents, 1):
        parent = rows[p % i]
        rows.append(
            record(
                f"c{i}",
                parent.model_call_id,
                parent.cum_len + 5,
                prev_len=parent.cum_len,
                delta_len=5,
            )
        )
    choice = select_terminal_call(rows)
    if choice.model_call_id is None:
        assert choice.reason == "ambiguous_terminal"
    else:
        assert choice.model_call_id not in {r.parent_call_id for r in rows}


FAILED = [ManifestFailure(model_call_id="z", reason="stage_failed")]


@pytest.mark.parametrize(
    ("strictness", "declared", "poisoned"),
    [("chain", "resp-c", False), ("chain", None, True), ("gym", "resp-c", True)],
)
def test_a_failure_poisons_unless_a_witness_named_the_end(
    strictness: Any, declared: str | None, poisoned: bool
) -> None:
    manifest = RolloutManifest(rollout_id="r", records=CHAIN, failures=FAILED)
    receipt = build_receipt(manifest, declared=declared, strictness=strictness)
    assert receipt.capture_poisoned is poisoned
    assert receipt.failure_reason == ("stage_failed" if poisoned else None)


def test_a_declared_miss_never_falls_back() -> None:
    receipt = build_receipt(RolloutManifest(rollout_id="r", records=CHAIN), declared="resp-x")
    assert receipt.terminal_model_call_id is None
    assert receipt.failure_reason == "declared_terminal_not_captured"
    assert build_receipt(RolloutManifest(rollout_id="r")).failure_reason == "no_records"


def test_a_call_that_the_client_left_is_not_the_end() -> None:
    left = [ManifestFailure(model_call_id="z", reason="client_disconnected")]
    manifest = RolloutManifest(rollout_id="r", records=CHAIN, failures=left)
    assert build_receipt(manifest).terminal_model_call_id == "c"
    assert build_receipt(manifest, strictness="gym").failure_reason == "client_disconnected"
    manifest = manifest.model_copy(update={"failures": left + FAILED})
    assert build_receipt(manifest).failure_reason == "stage_failed"
