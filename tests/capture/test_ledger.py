"""The standalone ledger: who continues whom, what is never guessed, and exactly-once repeats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.capture.rollouts import RolloutMaker
from tokenplane.capture.collect.linearize import verify_and_linearize
from tokenplane.capture.collect.receipt import build_receipt
from tokenplane.capture.failures import CaptureFailure
from tokenplane.capture.hook_types import (
    ADMISSION_KEY,
    CONTEXT_KEY,
    CallContext,
    FinishedRequestRecord,
    OffloadedRequestPayload,
)
from tokenplane.capture.ledger import Ledger, LedgerDecision, LedgerRequest
from tokenplane.capture.prefix_resolver import PrefixResolver
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.schemas.errors import LedgerError
from tokenplane.schemas.staged_row import CallEvidence
from tokenplane.staging import StagingStore, TokenSink, TokenSource, open_store

USER = {"role": "user", "content": "2+2?"}
AGAIN = {"role": "user", "content": "and 3+3?"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def said(text: str, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **extra}


@pytest.fixture
def store() -> Iterator[StagingStore]:
    with open_store("memory:") as store:
        yield store


class Server:
    """Serves requests as the call path does: admit, generate, stage with the ledger entry."""

    def __init__(self, store: StagingStore, seed: int = 3) -> None:
        self.ledger = Ledger(store)
        self.stager = TQMegatronTokenStager(
            TokenSink(store), resolver=PrefixResolver(TokenSource(store))
        )
        self.source = TokenSource(store)
        self.rng = np.random.default_rng(seed)
        self.served = 0

    def serve(
        self,
        messages: Any,
        reply: dict[str, Any],
        *,
        tokens: list[int] | None = None,
        **request: Any,
    ) -> tuple[LedgerDecision, str]:
        decision = self.ledger.admit(
            LedgerRequest(request.pop("rollout_id", "r1"), messages, **request)
        )
        self.served += 1
        response_id = f"resp-{self.served}"
        if decision.admission is None:
            return decision, response_id
        prefix: Any = np.empty(0, np.int32)
        if decision.admission.staging_chain:
            prefix = self.source.fetch_prefix(decision.admission.staging_chain)
        made = self.rng.integers(0, 99, 4) if tokens is None else np.array(tokens)
        prompt = np.concatenate([prefix, [len(messages or ())]]).astype(np.int32)
        entry = self.ledger.entry_for(
            decision, response_id=response_id, response_messages=[reply], response_body="{}"
        )
        outcome = self.stager.stage_admitted(
            response_id,
            OffloadedRequestPayload(
                prompt, made.astype(np.int32), np.full(len(made), -0.5, np.float32)
            ),
            finished_metadata=FinishedRequestRecord([(0, 1)]),
            offload_params={
                ADMISSION_KEY: decision.admission,
                CONTEXT_KEY: CallContext(CallEvidence(()), entry),
            },
        )
        assert outcome.staged, self.stager.failures.recent()
        return decision, response_id


@pytest.fixture
def server(store: StagingStore) -> Server:
    return Server(store)


def test_a_first_call_is_a_root_and_the_next_matches_it(server: Server) -> None:
    first, _ = server.serve([USER], said("4"))
    assert (first.kind, first.admission and first.admission.mode) == ("root", "text")
    second, _ = server.serve([USER, said("4"), AGAIN], said("6"))
    assert second.kind == "match"
    assert second.admission is not None
    assert second.admission.parent_call_id == first.model_call_id
    third, _ = server.serve([USER, said("4"), AGAIN, said("6"), USER], said("4"))
    assert third.admission is not None
    assert len(third.admission.staging_chain) == 2
    assert third.admission.prev_len == 10


def test_the_manifest_of_a_served_rollout_linearizes(server: Server) -> None:
    server.serve([USER], said("4"))
    server.serve([USER, said("4"), AGAIN], said("6"))
    manifest = server.ledger.manifest("r1")
    receipt = build_receipt(manifest)
    rows = server.source.fetch([record.staging_key for record in manifest.records])
    linear = verify_and_linearize(receipt, rows)
    assert linear.token_mask.tolist() == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1]


def test_an_edited_history_is_unproven_and_never_a_root(server: Server) -> None:
    server.serve([USER], said("4"))
    for messages in (
        [USER, said("five"), AGAIN],
        [{"role": "user", "content": "2+3?"}, said("4"), AGAIN],
        [{"role": "system", "content": "be brief"}, USER, said("4"), AGAIN],
    ):
        decision, _ = server.serve(messages, said("x"))
        assert (decision.kind, decision.reason) == ("unproven", "unresolved_parent")
        assert decision.admission is None


def test_tools_and_template_arguments_are_context(server: Server) -> None:
    server.serve([USER], said("4"), settings={"tools": TOOLS})
    messages = [USER, said("4"), AGAIN]
    for settings in ({}, {"tools": [*TOOLS, *TOOLS]}, {"tools": TOOLS, "enable_thinking": True}):
        decision, _ = server.serve(messages, said("6"), settings=settings)
        assert decision.kind == "unproven", settings
    assert server.serve(messages, said("6"), settings={"tools": TOOLS})[0].kind == "match"


def test_seeded_history_is_a_root_only_for_a_rollout_without_rows(server: Server) -> None:
    few_shot = [USER, said("4"), AGAIN]
    assert server.serve(few_shot, said("6"))[0].kind == "root"
    assert server.serve([*few_shot, said("6"), USER], said("4"))[0].kind == "match"
    assert server.serve([AGAIN, said("6"), USER], said("4"))[0].kind == "unproven"


def test_a_declared_segment_is_a_root_where_no_parent_is_proven(server: Server) -> None:
    server.serve([USER], said("4"))
    compacted = [{"role": "user", "content": "summary"}, said("so far: 4"), AGAIN]
    assert server.serve(compacted, said("6"))[0].kind == "unproven"
    assert server.serve(compacted, said("6"), new_segment=True)[0].kind == "root"
    known = [USER, said("4"), AGAIN]
    assert server.serve(known, said("6"), new_segment=True)[0].kind == "match"


def test_identical_replies_with_equal_tokens_are_interchangeable(server: Server) -> None:
    a, _ = server.serve([USER], said("4"), tokens=[1, 2])
    b, _ = server.serve([USER], said("4"), tokens=[1, 2])
    decision, _ = server.serve([USER, said("4"), AGAIN], said("6"))
    assert decision.parent is not None
    assert decision.parent.model_call_id == min(a.model_call_id, b.model_call_id)


def test_identical_replies_with_other_tokens_are_ambiguous_unless_named(server: Server) -> None:
    server.serve([USER], said("4"), tokens=[1, 2])
    second, response_id = server.serve([USER], said("4"), tokens=[3, 4])
    messages = [USER, said("4"), AGAIN]
    decision, _ = server.serve(messages, said("6"))
    assert (decision.kind, decision.reason) == ("unproven", "ambiguous_parent")
    named, _ = server.serve(messages, said("6"), parent_response_id=response_id)
    assert named.parent is not None
    assert named.parent.model_call_id == second.model_call_id


def test_a_named_parent_must_exist_and_agree(server: Server) -> None:
    _, response_id = server.serve([USER], said("4"))
    with pytest.raises(LedgerError) as caught:
        server.serve([USER, said("4"), AGAIN], said("6"), parent_response_id="nobody")
    assert caught.value.code == "unknown_parent"
    for messages in ([USER, said("five"), AGAIN], [AGAIN]):
        decision, _ = server.serve(messages, said("6"), parent_response_id=response_id)
        assert (decision.kind, decision.reason) == ("unproven", "parent_context_mismatch")


def test_a_repeat_is_recognised_by_its_key_and_body(server: Server) -> None:
    keys: Any = {"idempotency_key": "k", "request_digest": "ab" * 32}
    first, _ = server.serve([USER], said("4"), **keys)
    again, _ = server.serve([USER], said("4"), **keys)
    assert again.kind == "repeat"
    assert again.parent is not None
    assert again.parent.model_call_id == first.model_call_id
    assert len(server.ledger.manifest("r1").records) == 1
    with pytest.raises(LedgerError) as caught:
        server.serve([AGAIN], said("4"), idempotency_key="k", request_digest="cd" * 32)
    assert caught.value.code == "idempotency_mismatch"
    other, _ = server.serve([USER], said("4"), rollout_id="r2", **keys)
    assert other.kind == "root"


def test_tool_calls_match_whatever_the_order_of_their_arguments(server: Server) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a":1,"b":2}'},
    }
    server.serve([USER], said("", tool_calls=[call]))
    echoed = {**call, "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    turn = {"role": "assistant", "content": None, "tool_calls": [echoed]}
    assert server.serve([USER, turn, result], said("3"))[0].kind == "match"


def test_branches_and_rollbacks_continue_the_turn_they_show(server: Server) -> None:
    root, _ = server.serve([USER], said("4"))
    left, _ = server.serve([USER, said("4"), AGAIN], said("6"))
    right, _ = server.serve([USER, said("4"), USER], said("four"))
    assert {
        left.parent and left.parent.model_call_id,
        right.parent and right.parent.model_call_id,
    } == {root.model_call_id}
    deeper, _ = server.serve([USER, said("4"), USER, said("four"), AGAIN], said("6"))
    assert deeper.parent is not None
    assert deeper.parent.model_call_id == right.model_call_id


def test_a_token_prompt_is_matched_by_its_hash(server: Server, store: StagingStore) -> None:
    root, _ = server.serve(None, said(""), prompt_token_ids=np.array([1, 2], np.int32))
    assert root.kind == "root"
    [row] = server.source.fetch_rows(list(server.ledger.index("r1").rows))
    whole = row.call.token_ids_delta
    prompt = np.concatenate([whole, [5, 6]]).astype(np.int32)
    decision = server.ledger.admit(LedgerRequest("r1", None, prompt_token_ids=prompt))
    assert decision.parent is not None
    assert decision.parent.model_call_id == root.model_call_id
    other = prompt.copy()
    other[0] += 1
    assert server.ledger.admit(LedgerRequest("r1", None, prompt_token_ids=other)).kind == "root"


def test_two_ledgers_on_one_store_agree(store: StagingStore) -> None:
    one, two = Server(store, 1), Server(store, 2)
    one.serve([USER], said("4"))
    decision, _ = two.serve([USER, said("4"), AGAIN], said("6"))
    assert decision.kind == "match"
    assert len(one.ledger.manifest("r1").records) == 2


def test_a_row_that_retention_removed_leaves_the_index(server: Server, store: StagingStore) -> None:
    server.serve([USER], said("4"))
    store.discard("staged", list(server.ledger.index("r1").rows))
    assert server.ledger.manifest("r1").records == []
    assert server.ledger.admit(LedgerRequest("r1", [USER, said("4"), AGAIN])).kind == "root"


def test_failures_are_rows_of_their_own(server: Server) -> None:
    server.ledger.record_failure(CaptureFailure("r1", "c9", "stage_failed", "disk", 1.0))
    [row] = server.ledger.failures("r1")
    assert (row.code, row.message) == ("stage_failed", "disk")
    assert server.ledger.manifest("r1").failures[0].reason == "stage_failed"
    assert server.ledger.manifest("r10").failures == []


@pytest.mark.parametrize("bad", ["", "a/b", "..", "x" * 201, "é", "a b", "-a"])
def test_rollout_ids_are_checked(server: Server, bad: str) -> None:
    for act in (server.ledger.manifest, lambda r: server.ledger.admit(LedgerRequest(r, [USER]))):
        with pytest.raises(LedgerError) as caught:
            act(bad)
        assert caught.value.code == "invalid_rollout_id"


def test_rows_staged_for_gym_are_no_parents_here(server: Server) -> None:
    RolloutMaker(server.stager, "r1").stage()
    manifest = server.ledger.manifest("r1")
    assert manifest.records == []
    assert manifest.failures[0].reason == "ledger_row_missing_response_id"


def test_blocks_and_text_are_the_same_turn_and_odd_content_is_unproven(server: Server) -> None:
    server.serve([USER], said("4"))
    blocks = {"role": "assistant", "content": [{"type": "text", "text": "4"}]}
    assert server.serve([USER, blocks, AGAIN], said("6"))[0].kind == "match"
    odd = {"role": "assistant", "content": [{"nothing": 1}]}
    decision, _ = server.serve([USER, odd, AGAIN], said("6"))
    assert decision.reason == "unfingerprintable_request"
