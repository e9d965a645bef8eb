"""One rollout on two workers: the second has never seen the first turn, and continues it exactly.

Two engines over one store, each worker with a store object, a ledger and a resolver of its own.
Workers are addressed directly, so that no hop is left to chance.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.replicas.fleet import Replica, replicas
from tests.replicas.gym_admission import admission
from tests.server.serving import message_of, say, scripted, text_of, tiny_engine, user, whole
from tests.stores.redis_server import RedisServer
from tokenplane.capture.collect.collector import Collector
from tokenplane.capture.ledger import Ledger
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.engine_adapter.engine import GenerationRequest
from tokenplane.schemas.epochs import generation_versions
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.staging.token_source import TokenSource

KEY = {"Idempotency-Key": "k1"}


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that both workers open by themselves."""
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    server = RedisServer(tmp_path / "redis")
    try:
        yield server.url
    finally:
        server.stop()


def prompts(replica: Replica) -> list[np.ndarray]:
    return [request.prompt_token_ids for request in replica.served.script.requests]


@pytest.mark.engine
async def test_every_turn_on_another_worker_continues_the_staged_tokens(url: str) -> None:
    async with replicas([tiny_engine(), tiny_engine()], url) as found:
        messages = [user("What is 2 + 2?")]
        for turn in range(4):
            worker = found[turn % 2]
            assert worker.served.parts.resolver.stats().hits == 0
            reply = await worker.chat(messages, max_tokens=8, temperature=1.0)
            assert reply.headers["x-tokenplane-capture"] == "staged", reply.text
            messages += [message_of(reply), user(f"And then {turn}?")]
        rows = found[0].served.rows()
        assert [row.evidence.prefix_source for row in rows] == ["root", "store", "store", "store"]
        for parent, child in itertools.pairwise(rows):
            assert child.call.parent_call_id == parent.call.model_call_id
            assert child.call.prev_len == parent.call.cum_len
        store = found[1].served.store
        (row,) = Collector(TokenSource(store), Ledger(store)).finalize("r1")
        assert row.sample_mask == 1, row.reason
        assert len(row.call_spans) == 4


async def test_the_prompt_of_the_second_worker_starts_with_the_first_ones_tokens(url: str) -> None:
    async with replicas([scripted([say("Hi.")]), scripted([say("Ho.")])], url) as found:
        first = await found[0].chat([user("a")])
        messages = [user("a"), message_of(first), user("b")]
        await found[1].chat(messages)
        staged = whole(found[1].served.rows()[:1])
        assert np.array_equal(prompts(found[1])[0][: len(staged)], staged)


async def ask_as_gym(
    worker: Replica, messages: list[dict[str, Any]], ng_capture: dict[str, Any]
) -> httpx.Response:
    body = {"logprobs": True, "top_logprobs": 0, "max_tokens": 6}
    offload = {"ng_capture": ng_capture}
    return await worker.chat(messages, rollout=None, offload_params=offload, **body)


@pytest.mark.engine
async def test_an_admission_of_gym_continues_on_the_other_worker(url: str) -> None:
    async with replicas([tiny_engine(), tiny_engine()], url) as found:
        first = await ask_as_gym(found[0], [user("a")], admission("c1"))
        coords = first.json()["ng_commit_coords"]
        assert coords["disposition"] == "staged"
        messages = [user("a"), message_of(first), user("b")]
        second = await ask_as_gym(found[1], messages, admission("c2", coords))
        after = second.json()["ng_commit_coords"]
        assert (after["disposition"], after["parent_call_id"]) == ("staged", "c1")
        rows = found[0].served.rows("g1")
        assert rows[1].evidence.prefix_source == "store"
        assert rows[1].call.prev_len == rows[0].call.cum_len == coords["cum_len"]


async def test_one_admission_at_two_workers_gives_two_rows_and_harms_neither(url: str) -> None:
    async with replicas([scripted([say("One.")]), scripted([say("Two.")])], url) as found:
        replies = await asyncio.gather(
            *(ask_as_gym(worker, [user("a")], admission("c1")) for worker in found)
        )
        rows: dict[str, StagedRow] = {r.staging_key: r for r in found[0].served.rows("g1")}
        for reply in replies:
            coords = reply.json()["ng_commit_coords"]
            assert rows[coords["staging_key"]].call.digest == coords["digest"]
        assert len(rows) == 2


async def test_a_key_sent_again_to_another_worker_gets_the_first_answer(url: str) -> None:
    async with replicas([scripted([say("One.")]), scripted([])], url) as found:
        first = await found[0].chat([user("a")], headers=KEY)
        again = await found[1].chat([user("a")], headers=KEY)
        assert again.content == first.content
        assert again.headers["x-tokenplane-call"] == first.headers["x-tokenplane-call"]
        assert not found[1].served.script.requests
        other = await found[1].chat([user("b")], headers=KEY)
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "idempotency_mismatch"


async def run_both(found: list[Replica], other: str = "a") -> list[httpx.Response]:
    """One key at both workers at once: the first worker is done first, the second began first."""
    quick, slow = found
    await slow.served.script.pause()
    late = asyncio.create_task(slow.chat([user(other)], headers=KEY))
    await until(lambda: len(slow.served.script.requests) == 1)
    early = await quick.chat([user("a")], headers=KEY)
    await slow.served.script.unpause()
    return [early, await late]


class EndlessAnswer:
    """A script that goes on saying the same until ``end`` is set."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def __call__(self, _request: GenerationRequest) -> Iterator[tuple[int, float]]:
        while not self.end.is_set():
            yield from say(" word", end="")
        yield from say(" end.")


async def test_a_key_that_runs_on_two_workers_at_once_has_one_answer(url: str) -> None:
    """Both generate; the store's write order says whose answer both give."""
    async with replicas([scripted([say("One.")]), scripted([say("Two.")])], url) as found:
        early, late = await run_both(found)
        assert text_of(early) == "One."
        assert late.content == early.content
        assert late.headers["x-tokenplane-call"] == early.headers["x-tokenplane-call"]
        assert len(found[0].served.rows()) == 2
        # The other run's row is no call of the rollout: nobody ever got its answer.
        for worker in found:
            manifest = worker.served.parts.ledger.manifest("r1")
            assert [record.response_id for record in manifest.records] == [early.json()["id"]]
            assert not manifest.failures
        again = await found[1].chat([user("a")], headers=KEY)
        assert again.content == early.content


async def test_the_run_that_nobody_was_told_of_is_no_parent(url: str) -> None:
    """Equal words in other tokens: with both as candidates the parent would be ambiguous."""
    in_letters = [*say("a", end=""), *say("n")]
    engines = [scripted([say("an"), say("Next.")]), scripted([in_letters])]
    async with replicas(engines, url) as found:
        early, late = await run_both(found)
        assert text_of(early) == text_of(late) == "an"
        rows = found[0].served.rows()
        assert rows[0].call.cumulative_hash != rows[1].call.cumulative_hash
        child = await found[0].chat([user("a"), message_of(early), user("b")])
        assert child.headers["x-tokenplane-capture"] == "staged"
        last = found[0].served.rows()[-1]
        assert last.call.parent_call_id == rows[0].call.model_call_id
        store = found[0].served.store
        (row,) = Collector(TokenSource(store), Ledger(store)).finalize("r1")
        assert row.sample_mask == 1, row.reason


async def test_two_bodies_under_one_key_at_once_are_not_both_answered(url: str) -> None:
    async with replicas([scripted([say("One.")]), scripted([say("Two.")])], url) as found:
        early, late = await run_both(found, other="b")
        assert early.status_code == 200
        assert late.status_code == 409
        assert late.json()["error"]["code"] == "idempotency_mismatch"


async def test_a_stream_that_was_overtaken_ends_with_an_error_and_no_finish(url: str) -> None:
    answer = EndlessAnswer()
    engines = [scripted([say("One.")]), scripted(answer, step_s=0.01)]
    async with replicas(engines, url) as found:
        late = asyncio.create_task(found[1].chat([user("a")], headers=KEY, stream=True))
        await until(lambda: engines[1].stats().generated_tokens > 0)
        early = await found[0].chat([user("a")], headers=KEY)
        answer.end.set()
        overtaken = (await late).text
        assert text_of(early) == "One."
        assert '"code":"idempotency_superseded"' in overtaken
        assert '"finish_reason":"stop"' not in overtaken
        assert "[DONE]" not in overtaken
        again = await found[1].chat([user("a")], headers=KEY, stream=True)
        assert '"content":"One."' in again.text
        assert "[DONE]" in again.text


async def test_versions_that_differ_during_a_rolling_update_are_in_the_rows(url: str) -> None:
    """One worker is updated, in the midst of its call; the other is not yet."""
    answer = EndlessAnswer()
    engines = [scripted(answer, step_s=0.01), scripted([say("Ho.")])]
    async with replicas(engines, url) as found:
        running = asyncio.create_task(found[0].chat([user("a")]))
        await until(lambda: engines[0].stats().generated_tokens > 1)
        update = {"version": 8}
        reply = await found[1].client.post("/admin/weight_version?replica=a", json=update)
        assert reply.json() == {"version": 8}
        answer.end.set()
        first = await running
        await found[1].chat([user("a"), message_of(first), user("b")])
        rows = found[1].served.rows()
        assert [row.call.weight_version for row in rows] == [7, 7]
        spanning = rows[0]
        made = generation_versions(
            spanning.evidence.policy_epochs,
            spanning.call.cum_len - spanning.call.generation_len,
            spanning.call.cum_len,
        )
        assert sorted(set(made.tolist())) == [7, 8]
        assert list(rows[1].evidence.policy_epochs) == [(0, 7)]
        store = found[0].served.store
        (row,) = Collector(TokenSource(store), Ledger(store)).finalize("r1")
        assert row.sample_mask == 1, row.reason
