"""The ledger that Gym loads: parents, identical replies, write-once commits, manifests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.capture.test_terminal import record
from tokenplane.capture.gym_ledger import GymLedger
from tokenplane.schemas.errors import KeyConflictError, LedgerError
from tokenplane.schemas.manifest import CaptureLedgerCommit, RolloutManifest

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"type": "message", "role": "assistant", "content": "4"}


def commit(
    ident: str, items: Any = (USER,), answer: Any = (ANSWER,), **fields: Any
) -> CaptureLedgerCommit:
    row = record(ident, **fields)
    return CaptureLedgerCommit(
        rollout_id="0-1",
        record=row,
        staging_chain=(row.staging_key,),
        request_items=list(items),
        response_items=list(answer),
    )


@pytest.fixture(params=["memory:", "file"])
def ledger(request: Any, tmp_path: Path) -> GymLedger:
    return GymLedger("memory:" if request.param == "memory:" else f"file://{tmp_path}/store")


def run(awaitable: Any) -> Any:
    return asyncio.run(awaitable)


def test_parents(ledger: GymLedger) -> None:
    assert run(ledger.resolve("0-1", [USER])).status == "root"
    assert run(ledger.resolve("0-1", [USER, ANSWER, USER])).status == "unresolved"
    assert not run(ledger.has_rows("0-1"))
    run(ledger.record(commit("a")))
    found = run(ledger.resolve("0-1", [USER, ANSWER, USER]))
    assert found.status == "resolved"
    assert (found.match.model_call_id, found.match.staging_chain) == ("a", ("r/a",))
    assert (found.match.prev_len, found.match.cumulative_token_ids) == (10, ())
    assert run(ledger.resolve("0-1", [{**USER, "content": "3+3?"}, ANSWER, USER])).reason == (
        "no_match"
    )
    assert run(ledger.resolve("0-2", [USER, ANSWER, USER])).status == "unresolved"
    assert run(ledger.has_rows("0-1"))
    run(ledger.close())


def test_identical_replies_resolve_if_their_tokens_are_equal(ledger: GymLedger) -> None:
    same = {"cumulative_hash": "a" * 64}
    run(ledger.record(commit("b", **same)))
    run(ledger.record(commit("a", **same)))
    assert run(ledger.resolve("0-1", [USER, ANSWER, USER])).match.model_call_id == "a"
    run(ledger.record(commit("c")))
    assert run(ledger.resolve("0-1", [USER, ANSWER, USER])).reason == "ambiguous"


HINT = {"role": "user", "content": "Think again."}
REASONING = {"type": "reasoning", "summary": []}
SILENCE = {"type": "message", "role": "assistant", "content": ""}
CALLS = [{"type": "function_call", "call_id": c, "name": "f", "arguments": "{}"} for c in "xy"]
RESULTS = [{"type": "function_call_output", "call_id": c, "output": "1"} for c in "xy"]


def test_the_longest_matching_parent_wins(ledger: GymLedger) -> None:
    """The same answer to a prefix of the conversation, and to all of it up to that answer."""

    def parent_of(*items: Any) -> Any:
        found = run(ledger.resolve("0-1", list(items)))
        return found.match.model_call_id if found.match else found.reason

    run(ledger.record(commit("short")))
    run(ledger.record(commit("long", items=[USER, HINT], answer=[REASONING, ANSWER])))
    assert parent_of(USER, HINT, ANSWER, USER) == "long"
    assert parent_of(USER, HINT, REASONING, ANSWER, USER) == "long"
    assert parent_of(USER, ANSWER, HINT) == "short"
    assert parent_of(USER, ANSWER) == "short"
    run(ledger.record(commit("silent", items=[USER, ANSWER, HINT], answer=[SILENCE])))
    assert parent_of(USER, ANSWER, HINT, SILENCE, USER) == "silent"
    assert parent_of(USER, ANSWER, HINT, USER) == "short"
    assert parent_of(HINT, ANSWER, USER) == "no_match"


def test_tool_results_between_the_calls_of_one_answer(ledger: GymLedger) -> None:
    """An agent may put each result after its call: the stock ledger finds the parent, ours too."""
    run(ledger.record(commit("a", answer=CALLS)))
    mixed = [USER, CALLS[0], RESULTS[0], CALLS[1], RESULTS[1]]
    assert run(ledger.resolve("0-1", mixed)).match.model_call_id == "a"
    run(ledger.record(commit("b", items=[USER, *CALLS[:1], *RESULTS[:1]], answer=CALLS[1:])))
    assert run(ledger.resolve("0-1", mixed)).match.model_call_id == "b"
    assert run(ledger.resolve("0-1", [USER, *CALLS, *RESULTS])).match.model_call_id == "a"


def test_commits_are_write_once(ledger: GymLedger) -> None:
    run(ledger.record(commit("a")))
    run(ledger.record(commit("a")))
    with pytest.raises(KeyConflictError):
        run(ledger.record(commit("a", weight_version=2)))


def test_the_manifest_lists_commits_and_failures_in_order(ledger: GymLedger) -> None:
    run(ledger.record(commit("b")))
    run(ledger.record_failure("0-1", "x", "unresolved_parent"))
    run(ledger.record_failure("0-1", "x", "request_finished_without_staged_coordinates"))
    run(ledger.record(commit("a")))
    manifest = RolloutManifest(**run(ledger.manifest("0-1")))
    assert [r.model_call_id for r in manifest.records] == ["b", "a"]
    assert [f.reason for f in manifest.failures] == [
        "unresolved_parent",
        "request_finished_without_staged_coordinates",
    ]
    assert run(ledger.manifest("0-9")) == {
        "schema_version": 2,
        "rollout_id": "0-9",
        "records": [],
        "failures": [],
    }
    with pytest.raises(LedgerError):
        run(ledger.manifest("../x"))


def test_it_says_who_shares_its_rows(tmp_path: Path) -> None:
    assert not GymLedger("memory:").is_process_shared()
    one, two = GymLedger(f"file://{tmp_path}/s"), GymLedger(f"file://{tmp_path}/s")
    assert one.is_process_shared()
    run(one.record(commit("a")))
    assert run(two.resolve("0-1", [USER, ANSWER])).status == "resolved"


def test_what_cannot_be_fingerprinted_is_kept_and_never_a_parent(ledger: GymLedger) -> None:
    odd = {"role": "user", "content": [{"no": "type"}]}
    run(ledger.record(commit("a", items=[odd])))
    assert len(run(ledger.manifest("0-1"))["records"]) == 1


def test_a_failed_call_stays_failed_and_a_repeated_reason_counts_once(ledger: GymLedger) -> None:
    for _ in range(2):
        run(ledger.record_failure("0-1", "a", "worker_capture_failed"))
    with pytest.raises(KeyConflictError, match="failed"):
        run(ledger.record(commit("a")))
    manifest = RolloutManifest(**run(ledger.manifest("0-1")))
    assert (manifest.records, len(manifest.failures)) == ([], 1)
