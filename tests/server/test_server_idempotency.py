"""A request that comes again: one row, one answer, whether the first is running, done, or gone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import (
    HandDrivenStream,
    events_of,
    say,
    scripted,
    serving,
    text_of,
    user,
)
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.staging.open_store import open_store

KEY = {"Idempotency-Key": "k1"}


@pytest.mark.parametrize("header", ["Idempotency-Key", "X-Tokenplane-Request-Id"])
async def test_a_repeat_gets_the_first_answer(header: str) -> None:
    async with serving(scripted([say("One."), say("Two.")])) as served:
        first = await served.chat([user("a")], headers={header: "k"})
        again = await served.chat([user("a")], headers={header: "k"})
        assert again.content == first.content
        assert again.headers["x-tokenplane-call"] == first.headers["x-tokenplane-call"]
        assert len(served.rows()) == len(served.script.requests) == 1
        other = await served.chat([user("a")])
        assert text_of(other) == "Two."
        assert len(served.rows()) == 2


async def test_duplicates_in_flight_wait_for_the_first() -> None:
    async with serving(scripted([say("One two three.")], step_s=0.01)) as served:
        replies = await asyncio.gather(
            *(served.chat([user("a")], headers=KEY) for _ in range(5)),
        )
        assert {reply.content for reply in replies} == {replies[0].content}
        assert len(served.rows()) == len(served.script.requests) == 1


async def test_a_key_belongs_to_one_body_and_one_rollout() -> None:
    async with serving(scripted([say("One."), say("Two.")], step_s=0.01)) as served:
        running = asyncio.create_task(served.chat([user("a")], headers=KEY))
        await until(lambda: len(served.script.requests) == 1)
        other = await served.chat([user("b")], headers=KEY)
        await running
        late = await served.chat([user("b")], headers=KEY)
        for reply in (other, late):
            assert reply.status_code == 409
            assert reply.json()["error"]["code"] == "idempotency_mismatch"
        elsewhere = await served.chat([user("b")], rollout="r2", headers=KEY)
        assert text_of(elsewhere) == "Two."


async def test_two_different_keys_are_refused() -> None:
    async with serving(scripted([])) as served:
        headers = {"Idempotency-Key": "a", "X-Tokenplane-Request-Id": "b"}
        assert (await served.chat([user("a")], headers=headers)).status_code == 400
        long = {"Idempotency-Key": "a" * 600}
        assert (await served.chat([user("a")], headers=long)).status_code == 400


async def test_a_repeat_may_ask_for_a_stream_and_the_other_way_round() -> None:
    async with serving(scripted([say("One two.")])) as served:
        first = await served.chat([user("a")], headers=KEY)
        reply = await served.chat([user("a")], headers=KEY, stream=True)
        chunks = [json.loads(event) for event in events_of(reply.text)[:-1]]
        assert {chunk["id"] for chunk in chunks} == {first.json()["id"]}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "One two."}, {}]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert len(served.script.requests) == 1


async def test_a_repeat_after_a_restart_reads_the_answer_from_its_row(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with open_store(url) as store:
        async with serving(scripted([say("One.")]), store=store) as served:
            first = await served.chat([user("a")], headers=KEY)
    with open_store(url) as store:
        async with serving(scripted([]), store=store) as served:
            again = await served.chat([user("a")], headers=KEY)
            assert again.content == first.content
            assert again.headers["x-tokenplane-capture"] == "staged"


async def test_when_the_first_client_leaves_a_waiting_one_takes_over() -> None:
    answers: list[Any] = [say("a very long answer " * 40), say("Short.")]
    async with serving(scripted(answers, step_s=0.005)) as served:
        stream = HandDrivenStream(served, messages=[user("a")])
        stream.headers.append((b"idempotency-key", b"k1"))
        leading = asyncio.create_task(stream.run())
        await until(lambda: "very" in stream.content)
        waiting = asyncio.create_task(served.chat([user("a")], headers=KEY))
        await asyncio.sleep(0.05)
        stream.gone.set()
        await leading
        assert text_of(await waiting) == "Short."
        assert len(served.rows()) == 1
        assert served.script.stats().cancelled_requests == 1


async def test_a_failure_is_shared_by_those_who_wait() -> None:
    engine = scripted([say("a very long answer " * 40)], step_s=0.01)
    async with serving(engine) as served:
        tasks = [asyncio.create_task(served.chat([user("a")], headers=KEY)) for _ in range(3)]
        await until(lambda: engine.stats().generated_tokens > 0)
        engine.fail()
        replies = await asyncio.gather(*tasks)
        assert [reply.status_code for reply in replies] == [503] * 3
        assert {reply.json()["error"]["code"] for reply in replies} == {"engine_dead"}
        assert len(engine.requests) == 1


async def test_an_explicit_parent_chooses_among_equal_conversations() -> None:
    """Two siblings said the same words with other tokens; only a name can tell them apart."""
    in_letters = [*say("a", end=""), *say("n")]
    as_word = say("an")
    assert len(in_letters) > len(as_word)
    script = [in_letters, as_word, say("b"), say("c"), say("d"), say("e")]
    async with serving(scripted(script)) as served:
        replies = [await served.chat([user("q")]) for _ in range(2)]
        assert text_of(replies[0]) == text_of(replies[1]) == "an"
        messages = [user("q"), {"role": "assistant", "content": "an"}, user("r")]
        ambiguous = await served.chat(messages)
        assert ambiguous.headers["x-tokenplane-capture"] == "unproven"
        rows = served.rows()
        for row, reply in zip(rows, replies, strict=True):
            named = {"X-Tokenplane-Parent": reply.json()["id"]}
            child = await served.chat(messages, headers=named)
            assert child.headers["x-tokenplane-capture"] == "staged"
            assert served.rows()[-1].call.parent_call_id == row.call.model_call_id
        unknown = await served.chat(messages, headers={"X-Tokenplane-Parent": "nobody"})
        assert unknown.status_code == 409
        assert unknown.json()["error"]["code"] == "unknown_parent"
        elsewhere = [user("other"), *messages[1:]]
        named = {"X-Tokenplane-Parent": replies[0].json()["id"]}
        wrong = await served.chat(elsewhere, headers=named)
        assert wrong.headers["x-tokenplane-capture"] == "unproven"
        assert await served.failures() == ["ambiguous_parent", "parent_context_mismatch"]
