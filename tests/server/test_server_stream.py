"""Streams: whole text in order, nothing lost from capture, staged before the chunk that ends it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pyarrow as pa
import pytest

from tests.server.serving import (
    HandDrivenStream,
    events_of,
    message_of,
    say,
    scripted,
    serving,
    text_of,
    tiny_engine,
    user,
    whole,
)
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.schemas.errors import StoreUnavailableError
from tokenplane.staging.memory_backend.store import MemoryStore


def chunks_of(text: str) -> list[dict[str, Any]]:
    events = events_of(text)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def content_of(chunks: list[dict[str, Any]]) -> str:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_a_stream_says_what_the_whole_answer_says_and_is_captured() -> None:
    async with serving(scripted([say("Grüße, 世界! 🙂 Bye.")] * 2)) as served:
        plain = await served.chat([user("a")])
        reply = await served.chat([user("a")], rollout="r2", stream=True)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-tokenplane-capture"] == "pending"
        chunks = chunks_of(reply.text)
        assert content_of(chunks) == text_of(plain) == "Grüße, 世界! 🙂 Bye."
        assert "\N{REPLACEMENT CHARACTER}" not in reply.text
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]
        (row,) = served.rows("r2")
        assert row.ledger is not None
        assert row.ledger.response_id == chunks[0]["id"]
        assert f": tokenplane-capture staged {row.call.model_call_id}\n" in reply.text


async def test_usage_comes_last_where_it_is_asked_for() -> None:
    async with serving(scripted([say("Yes."), say("Yes.")])) as served:
        options = {"include_usage": True}
        reply = await served.chat([user("a")], stream=True, stream_options=options)
        *_, finish, usage = chunks_of(reply.text)
        assert finish["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        (row,) = served.rows()
        generated = int(row.call.token_mask_delta.sum())
        assert usage["usage"] == {
            "prompt_tokens": row.call.cum_len - generated,
            "completion_tokens": generated,
            "total_tokens": row.call.cum_len,
        }
        without = await served.chat([user("a")], rollout="r2", stream=True)
        assert "usage" not in without.text


async def test_a_stop_string_never_shows() -> None:
    script = [say("one two STOP three", end=""), say("one two STOP three", end="")]
    async with serving(scripted(script)) as served:
        body: dict[str, Any] = {"stop": [" STOP"], "max_tokens": 99}
        plain = await served.chat([user("a")], **body)
        reply = await served.chat([user("a")], rollout="r2", stream=True, **body)
        assert text_of(plain) == content_of(chunks_of(reply.text)) == "one two"
        evidence = served.rows("r2")[0].evidence
        assert (evidence.finish_reason, evidence.stop_reason) == ("stop", '" STOP"')


async def test_completions_stream_text() -> None:
    async with serving(scripted([say("a b")])) as served:
        url = "/rollouts/r1/v1/completions"
        reply = await served.client.post(url, json={"prompt": "x", "stream": True})
        chunks = chunks_of(reply.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a b"
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert len(served.rows()) == 1


async def test_log_probs_of_a_stream_come_with_its_last_chunk() -> None:
    answer = say("a b")
    async with serving(scripted([answer])) as served:
        reply = await served.chat([user("x")], rollout=None, stream=True, logprobs=True)
        *_, last = chunks_of(reply.text)
        listed = last["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in listed] == [value for _, value in answer]


class GatedStore(MemoryStore):
    """A store whose writes wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.open = threading.Event(), threading.Event()

    def put(self, partition: str, key: str, row: pa.RecordBatch, **kwargs: Any) -> bool:
        if partition == "staged":
            self.arrived.set()
            assert self.open.wait(30)
        return super().put(partition, key, row, **kwargs)


async def test_the_row_is_durable_before_the_finishing_chunk() -> None:
    store = GatedStore()
    async with serving(scripted([say("Hello there.")]), store=store) as served:
        stream = HandDrivenStream(served)
        call = asyncio.create_task(stream.run())
        await until(store.arrived.is_set)
        await asyncio.sleep(0.05)
        assert stream.content == "Hello there.", "text flows while the row waits"
        assert '"finish_reason":"stop"' not in stream.text
        assert not served.rows()
        store.open.set()
        await call
        assert '"finish_reason":"stop"' in stream.text
        assert "tokenplane-capture staged" in stream.text
        assert len(served.rows()) == 1
    store.close()


class BrokenStore(MemoryStore):
    """A store that takes failures but no staged row."""

    def put(self, partition: str, key: str, row: pa.RecordBatch, **kwargs: Any) -> bool:
        if partition == "staged":
            raise StoreUnavailableError("the disk is gone")
        return super().put(partition, key, row, **kwargs)


async def test_a_stream_whose_staging_fails_still_finishes() -> None:
    store = BrokenStore()
    async with serving(scripted([say("Hi.")]), store=store) as served:
        reply = await served.chat([user("a")], stream=True)
        chunks = chunks_of(reply.text)
        assert content_of(chunks) == "Hi."
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert ": tokenplane-capture capture_failed" in reply.text
        assert await served.failures() == ["stage_failed"]
    store.close()


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error() -> None:
    engine = scripted([say("one two three four five")], step_s=0.01)
    async with serving(engine) as served:
        stream = HandDrivenStream(served)
        call = asyncio.create_task(stream.run())
        await until(lambda: "two" in stream.content)
        engine.fail()
        await call
        last = json.loads(events_of(stream.text)[-1])
        assert last["error"]["code"] == "engine_dead"
        assert "[DONE]" not in stream.text


async def test_a_refused_stream_has_a_status_of_its_own() -> None:
    async with serving(scripted([])) as served:
        reply = await served.chat([user("x" * 9000)], stream=True)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_a_silent_stream_sends_comments() -> None:
    async with serving(scripted([say("a b")], step_s=0.08), heartbeat_s=0.02) as served:
        reply = await served.chat([user("a")], stream=True)
        assert ": waiting" in reply.text
        assert content_of(chunks_of(reply.text)) == "a b"


async def test_a_client_that_leaves_a_stream_cancels_the_request() -> None:
    engine = scripted([say("a very long answer " * 40)], step_s=0.01)
    async with serving(engine) as served:
        stream = HandDrivenStream(served)
        task = asyncio.create_task(stream.run())
        await until(lambda: "very" in stream.content)
        stream.gone.set()
        await asyncio.wait_for(task, 5)
        assert engine.stats().cancelled_requests == 1
        assert engine.stats().live_requests == 0
        served.parts.path.close()
        assert [f.code for f in served.parts.ledger.failures("r1")] == ["client_disconnected"]
        assert not served.rows()


@pytest.mark.engine
async def test_a_real_engines_stream_is_its_whole_answer() -> None:
    async with serving(tiny_engine()) as served:
        settings: dict[str, Any] = {"seed": 5, "max_tokens": 60}
        plain = message_of(await served.chat([user("a")], **settings))
        reply = await served.chat([user("a")], rollout="r2", stream=True, **settings)
        assert content_of(chunks_of(reply.text)) == plain["content"]
        assert len(chunks_of(reply.text)) > 5
        assert whole(served.rows()).tolist() == whole(served.rows("r2")).tolist()
