"""Every refusal: OpenAI's shape, the right status, and no word that NeMo-Gym misreads."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import httpx
import pytest

from tests.server.serving import say, scripted, serving, text_of, tiny, user
from tokenplane.engine_adapter.contract_suite.suite import until

OVERFLOW = ("context length", "max_tokens")
"""A 400 with either is served by NeMo-Gym as an empty, finished answer (CONTRACT section 13)."""


def error_of(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"max_tokens": 0}, None),
    ({"max_tokens": "many"}, None),
    ({"max_tokens": True}, None),
    ({"max_completion_tokens": -1}, None),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, None),
    ({"n": 2}, "n"),
    ({"n": "1"}, "n"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"min_p": 0.1}, "min_p"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"model": "gpt-4"}, "model"),
    ({"model": "max_tokens"}, "model"),
    ({"model": 7}, "model"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ({"messages": [3]}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
async def test_a_bad_field_is_named_and_nothing_is_generated(
    body: dict[str, Any], param: str | None
) -> None:
    async with serving(scripted([])) as served:
        reply = await served.chat(**({"messages": [user("a")]} | body))
        assert reply.status_code == 400
        error = error_of(reply)
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"] == param
        assert not any(word in reply.text.lower() for word in OVERFLOW)
        assert not served.rows()


HARMLESS: list[dict[str, Any]] = [
    {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}},
    {"response_format": {"type": "text"}, "repetition_penalty": 1.0, "min_p": 0},
    {"top_k": None, "temperature": None, "stop": None, "seed": None, "max_tokens": None},
    {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True},
    {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
    {"some_future_field": {"deep": [1]}},
    {"stream_options": None, "stream": False, "modalities": ["text"]},
]


async def test_an_unknown_field_is_ignored_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(scripted([say("1"), say("2")])) as served:
        for _ in range(2):
            assert (await served.chat([user("a")], temprature=0)).status_code == 200
    [said] = [record for record in caplog.records if "temprature" in record.getMessage()]
    assert said.levelname == "WARNING"


@pytest.mark.parametrize("body", HARMLESS)
async def test_harmless_fields_are_accepted(body: dict[str, Any]) -> None:
    async with serving(scripted([say("Hi.")])) as served:
        assert text_of(await served.chat([user("a")], **body)) == "Hi."


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b'{"messages": NaN}', b"\xff", b"[" * 5000]
)
async def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    async with serving(scripted([])) as served:
        for path in ("/v1/chat/completions", "/rollouts/r1/v1/completions"):
            reply = await served.client.post(path, content=raw)
            assert reply.status_code == 400
            assert error_of(reply)["code"] == "invalid_json"


async def test_overflow_is_a_400_that_says_context_length() -> None:
    async with serving(scripted([])) as served:
        for path, body in (
            ("/rollouts/r1/v1/chat/completions", {"messages": [user("x" * 9000)]}),
            ("/v1/completions", {"prompt": "x" * 9000}),
        ):
            reply = await served.client.post(path, json=body)
            assert reply.status_code == 400
            error = error_of(reply)
            assert "context length" in error["message"]
            assert error["code"] == "context_length_exceeded"
        assert await served.failures() == []


async def test_a_template_that_refuses_is_the_requests_fault() -> None:
    tokenizer = copy.deepcopy(tiny().tokenizer)
    tokenizer.chat_template = "{{ raise_exception('max_tokens first, then system') }}"
    async with serving(scripted([]), tokenizer=tokenizer) as served:
        reply = await served.chat([user("a")])
        assert reply.status_code == 400
        assert error_of(reply)["code"] == "template_refused"
        assert "max_tokens" not in reply.text


async def test_a_body_over_the_limit_is_refused_unread() -> None:
    async with serving(scripted([]), max_body_bytes=2048) as served:
        reply = await served.chat([user("x" * 5000)])
        assert reply.status_code == 413
        assert error_of(reply)["code"] == "body_too_large"


@pytest.mark.parametrize("rollout", ["-a", "a b", "ü", "x" * 201, "a%2Fb"])
async def test_a_malformed_rollout_id_is_refused(rollout: str) -> None:
    async with serving(scripted([])) as served:
        reply = await served.chat([user("a")], rollout=rollout)
        assert reply.status_code in (400, 404)
        assert error_of(reply)["code"] in ("invalid_rollout_id", "not_found")
        rows = await served.client.get(f"/rollouts/{rollout}/rows")
        assert rows.status_code in (400, 404)


async def test_unknown_routes_and_methods_have_the_same_shape() -> None:
    async with serving(scripted([])) as served:
        missing = await served.client.get("/v2/models")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
        assert "GET /v2/models" in error_of(missing)["message"]
        method = await served.client.get("/v1/chat/completions")
        assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
        assert "GET /v1/chat/completions" in error_of(method)["message"]


async def test_a_dead_engine_is_an_outage() -> None:
    engine = scripted([])
    async with serving(engine) as served:
        assert (await served.client.get("/health")).json()["status"] == "ok"
        engine.fail()
        reply = await served.chat([user("a")])
        assert reply.status_code == 503
        assert error_of(reply)["code"] == "engine_dead"
        assert reply.headers["retry-after"] == "1"
        assert (await served.client.get("/health")).status_code == 503


async def test_an_answer_that_takes_too_long_is_a_504_and_frees_the_engine() -> None:
    engine = scripted([say("a very long answer " * 40)], step_s=0.02)
    async with serving(engine, request_timeout_s=0.1) as served:
        reply = await served.chat([user("a")])
        assert reply.status_code == 504
        assert error_of(reply)["code"] == "deadline_exceeded"
        assert engine.stats().live_requests == 0
        assert not served.rows()


@pytest.mark.parametrize(
    ("stopping", "code"), [(True, "server_stopped"), (False, "request_cancelled")]
)
async def test_a_call_whose_engine_is_closed_is_answered_and_recorded(
    stopping: bool, code: str
) -> None:
    """The engine may end a call before the server's own cancelling reaches it."""
    engine = scripted([say("a very long answer " * 40)], step_s=0.02)
    async with serving(engine) as served:
        running = asyncio.create_task(served.chat([user("a")]))
        await until(lambda: engine.stats().generated_tokens > 2)
        served.parts.path.stopping = stopping
        await engine.close()
        reply = await running
        assert reply.status_code == 503
        assert error_of(reply)["code"] == code
        await until(lambda: bool(served.parts.ledger.failures("r1")))
        assert [failure.code for failure in served.parts.ledger.failures("r1")] == [code]


async def test_a_call_that_ends_after_the_path_was_closed_is_recorded() -> None:
    engine = scripted([say("a very long answer " * 40)], step_s=0.02)
    async with serving(engine) as served:
        running = asyncio.create_task(served.chat([user("a")]))
        await until(lambda: engine.stats().generated_tokens > 2)
        served.parts.path.close()
        await engine.close()
        assert (await running).status_code == 503
        assert [f.code for f in served.parts.ledger.failures("r1")] == ["request_cancelled"]


async def test_too_many_calls_at_once_are_turned_away() -> None:
    engine = scripted([say("one two three")], step_s=0.02)
    async with serving(engine, max_in_flight=1) as served:
        first = asyncio.create_task(served.chat([user("a")]))
        await until(lambda: engine.stats().live_requests == 1)
        reply = await served.chat([user("b")])
        assert reply.status_code == 503
        assert error_of(reply)["code"] == "server_busy"
        assert (await first).status_code == 200


async def test_a_bug_is_a_500_without_details() -> None:
    def broken(_request: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    async with serving(scripted(broken)) as served:
        reply = await served.chat([user("a")])
        assert reply.status_code == 500
        assert error_of(reply)["code"] == "internal_error"
        assert "secret" not in reply.text


async def test_an_api_key_is_asked_for_where_one_is_set() -> None:
    async with serving(scripted([say("Hi.")]), api_key="k") as served:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic k"}):
            reply = await served.chat([user("a")], headers=headers)
            assert reply.status_code == 401
            assert error_of(reply)["type"] == "authentication_error"
        assert (await served.client.get("/v1/models")).status_code == 401
        good = {"Authorization": "Bearer k"}
        assert text_of(await served.chat([user("a")], headers=good)) == "Hi."


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": ["a", "b"]},
    {"prompt": [[1], [2]]},
    {"prompt": [1, "a"]},
    {"prompt": [True]},
    {"prompt": [-1]},
    {"prompt": [2**40]},
    {"prompt": [5000]},
    {"prompt": "a", "echo": True},
    {"prompt": "a", "suffix": "b"},
    {"prompt": "a", "best_of": 2},
    {"prompt": "a", "logprobs": 3},
    {},
]


@pytest.mark.parametrize("body", COMPLETIONS)
async def test_bad_completions_are_refused(body: dict[str, Any]) -> None:
    async with serving(scripted([])) as served:
        reply = await served.client.post("/rollouts/r1/v1/completions", json=body)
        assert reply.status_code == 400
        error_of(reply)
        assert not served.rows()


async def test_models_are_listed_and_any_of_their_names_works() -> None:
    script = [say("Hi.")] * 3
    names = ["tiny", "tokenplane/tiny", "policy"]
    async with serving(scripted(script), served_model_names=["policy"]) as served:
        for base in ("/v1", "/rollouts/r1/v1"):
            reply = await served.client.get(f"{base}/models")
            assert [entry["id"] for entry in reply.json()["data"]] == names
        for name in names:
            reply = await served.chat([user("a")], rollout=None, model=name)
            assert reply.json()["model"] == name
