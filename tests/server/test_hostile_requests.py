"""Requests of any shape: a coded refusal, or an answer whose capture is staged or has a reason."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.serving import HandDrivenStream, Served, say, scripted, serving, user
from tokenplane.engine_adapter.server.openai_requests import MAX_DEPTH
from tokenplane.schemas.failure_row import FAILURE_PARTITION, parse_failure_row

ADMISSION = {"rollout_id": "g1", "model_call_id": "m1", "mode": "text"}
OVERFLOW = ("context length", "max_tokens")


def endless() -> Any:
    return scripted(lambda _request: say("Hi."))


async def check(served: Served, reply: httpx.Response, rollout: str) -> None:
    """What must hold for every reply whatsoever."""
    answer = reply.json()
    if reply.status_code != 200:
        assert reply.status_code in (400, 404, 409, 413), reply.text
        error = answer["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] != "internal_error"
        if error["code"] != "context_length_exceeded":
            assert not any(word in reply.text.lower() for word in OVERFLOW)
        return
    status = reply.headers["x-tokenplane-capture"]
    if status == "staged":
        ids = [row.ledger.response_id for row in served.rows(rollout) if row.ledger is not None]
        assert answer["id"] in ids
    else:
        assert status in ("unproven", "capture_failed")
        assert await served.failures(rollout)


def deep(levels: int) -> Any:
    value: Any = 1
    for at in range(levels):
        value = [value] if at % 2 else {"a": value}
    return value


PLACES: dict[str, Any] = {
    "metadata": lambda value: {"metadata": value},
    "unknown": lambda value: {"some_field": value},
    "message": lambda value: {"messages": [user("a") | {"x": value}]},
    "tools": lambda value: {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": value}}]
    },
    "template": lambda value: {"chat_template_kwargs": {"k": value}},
    "arguments": lambda value: {
        "messages": [
            user("a"),
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]},
            user("b"),
        ]
    },
    "offload": lambda value: {"offload_params": {"k": value}},
    "admission": lambda value: {"ng_capture": value},
}


@pytest.mark.parametrize("place", PLACES)
async def test_nesting_is_served_or_refused_and_never_a_bug(place: str) -> None:
    async with serving(endless()) as served:
        rollout = None if place == "admission" else "r1"
        for levels in (50, MAX_DEPTH - 12, MAX_DEPTH, MAX_DEPTH + 60, 900):
            reply = await served.chat(
                **({"messages": [user("a")]} | PLACES[place](deep(levels))), rollout=rollout
            )
            assert reply.status_code == (200 if levels < MAX_DEPTH else 400), (levels, reply.text)
            if levels >= MAX_DEPTH:
                assert reply.json()["error"]["code"] == "invalid_json"
                assert "nested" in reply.json()["error"]["message"]
            elif rollout is not None:
                await check(served, reply, rollout)


async def test_brackets_in_texts_are_no_nesting() -> None:
    async with serving(endless()) as served:
        reply = await served.chat([user("[{" * 1000)])
        assert reply.headers["x-tokenplane-capture"] == "staged"


NAMES = [
    "a/b",
    "a\r\nx-evil: 1",
    "\0",
    "a\nb",
    "\u00e9",
    "\U0001f600",
    "x" * 5000,
    " ",
    "..",
    "é" * 900,
]


@pytest.mark.parametrize("field", ["rollout_id", "model_call_id"])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:12]))
async def test_any_name_that_gym_may_use_is_answered_with_coordinates(
    field: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Names come back in the coordinates, never as a header; what cannot be kept has a row."""
    async with serving(endless()) as served:
        with caplog.at_level(logging.ERROR):
            reply = await served.chat(
                [user("a")], rollout=None, offload_params={"ng_capture": ADMISSION | {field: name}}
            )
        assert reply.status_code == 200
        assert "x-evil" not in reply.headers
        assert all(value.isascii() and value.isprintable() for value in reply.headers.values())
        coords = reply.json()["ng_commit_coords"]
        assert coords[field] == name
        kept = [parse_failure_row(row) for _, row in served.store.scan(FAILURE_PARTITION)]
        if reply.headers["x-tokenplane-capture"] == "staged":
            assert coords["disposition"] == "staged"
            assert kept == []
        else:
            assert coords["disposition"] == "capture_failed"
            assert [getattr(row, field) for row in kept] == [name]
        assert caplog.records == []


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
calls = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": texts}, optional={"arguments": json_values | texts | st.just('{"a": [1')}
        )
    },
    optional={"id": json_values | texts, "type": json_values},
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"])},
        optional={
            "content": texts
            | st.none()
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
            | json_values,
            "tool_calls": st.lists(calls, max_size=2) | json_values,
            "tool_call_id": texts | json_values,
            "name": json_values,
            "reasoning_content": texts | json_values,
        },
    ),
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {"messages": messages | json_values},
    optional=dict.fromkeys(
        (
            *("temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "max_tokens"),
            *("n", "logprobs", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"),
            *("stream_options", "logit_bias", "response_format", "metadata", "model", "user"),
            *("ignore_eos", "offload_params", "max_completion_tokens", "unheard_of"),
        ),
        json_values,
    ),
)


@settings(max_examples=20)
@given(st.lists(bodies, min_size=15, max_size=15))
def test_any_body_is_refused_with_a_code_or_accounted_for(batch: list[dict[str, Any]]) -> None:
    async def run() -> None:
        async with serving(endless()) as served:
            for number, body in enumerate(batch):
                rollout = f"r{number}"
                path = f"/rollouts/{rollout}/v1/chat/completions"
                reply = await served.client.post(path, content=json.dumps(body).encode())
                await check(served, reply, rollout)
                if reply.status_code == 200:
                    # The next turn, as an agent would send it.
                    said = reply.json()["choices"][0]["message"]
                    body = body | {"messages": [*body["messages"], said, user("next")]}
                    after = await served.client.post(path, content=json.dumps(body).encode())
                    await check(served, after, rollout)

    asyncio.run(run())


@settings(max_examples=15)
@given(
    st.lists(
        json_values
        | st.fixed_dictionaries(
            {
                "rollout_id": texts,
                "model_call_id": texts,
                "mode": st.sampled_from(["text", "token_in"]),
            },
            optional={
                "parent_call_id": json_values | texts,
                "prev_len": st.integers(-1, 2**70) | json_values,
                "parent_chain_hash": st.just("a" * 64) | json_values,
                "staging_chain": st.lists(texts, max_size=3) | json_values,
                "required_prefix_token_ids": st.lists(st.integers(-1, 2**33), max_size=3)
                | json_values,
                "unheard_of": json_values,
            },
        ),
        min_size=15,
        max_size=15,
    )
)
def test_any_admission_is_refused_failed_or_staged(batch: list[Any]) -> None:
    async def run() -> None:
        async with serving(endless()) as served:
            for admission in batch:
                for body in (
                    {"ng_capture": admission},
                    {"offload_params": {"ng_capture": admission}},
                ):
                    raw = json.dumps({"messages": [user("a")]} | body).encode()
                    reply = await served.client.post("/v1/chat/completions", content=raw)
                    assert reply.status_code in (200, 400, 409), reply.text
                    answer = reply.json()
                    if reply.status_code != 200:
                        assert answer["error"]["code"] != "internal_error"
                        continue
                    staged = reply.headers["x-tokenplane-capture"] == "staged"
                    coords = answer.get("ng_commit_coords")
                    if staged or coords is not None:
                        assert coords["disposition"] == ("staged" if staged else "capture_failed")
                    if not staged:
                        assert reply.headers["x-tokenplane-capture"] == "capture_failed"
                        assert served.parts.failures.counts()

    asyncio.run(run())


async def test_a_stop_may_not_cost_every_other_request_its_time() -> None:
    """Each token is compared with the beginnings of all stops, on the engine's own thread."""
    async with serving(endless()) as served:
        for body in ({"stop": ["x" * 1025]}, {"stop_token_ids": [5] * 1025}, {"top_k": 2**31}):
            reply = await served.chat([user("a")], **body)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == next(iter(body))
        largest: dict[str, Any] = {
            "stop": ["x" * 1024] * 16,
            "stop_token_ids": [5] * 1024,
            "top_k": 2**31 - 1,
        }
        reply = await served.chat([user("a")], **largest)
        assert reply.headers["x-tokenplane-capture"] == "staged"


async def test_a_declared_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    async with serving(endless(), max_body_bytes=2048) as served:
        stream = HandDrivenStream(served)
        for length in (b"2049", b"99999999999999999999999999"):
            stream = HandDrivenStream(served)
            stream.headers.append((b"content-length", length))
            stream.hold_body()
            await asyncio.wait_for(stream.run(), 60)
            assert "body_too_large" in stream.text


async def test_a_client_that_leaves_in_mid_body_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(endless()) as served:
        stream = HandDrivenStream(served)
        stream.hold_body()
        stream.gone.set()
        with caplog.at_level(logging.ERROR):
            await asyncio.wait_for(stream.run(), 60)
        assert caplog.records == []
        assert not served.script.requests


async def test_one_rollout_may_be_asked_many_things_at_once() -> None:
    """Siblings with one history: each has its row; equal answers stay one possible parent."""
    async with serving(endless()) as served:
        replies = await asyncio.gather(*(served.chat([user("a")]) for _ in range(12)))
        assert {reply.headers["x-tokenplane-capture"] for reply in replies} == {"staged"}
        assert len({row.staging_key for row in served.rows()}) == 12
        said = replies[0].json()["choices"][0]["message"]
        after = await asyncio.gather(
            *(served.chat([user("a"), said, user(str(n))]) for n in range(12))
        )
        assert {reply.headers["x-tokenplane-capture"] for reply in after} == {"staged"}
        assert len({row.staging_key for row in served.rows()}) == 24
