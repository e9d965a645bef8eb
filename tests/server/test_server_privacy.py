"""Nothing of the capture reaches an agent: no token field, no list of integers, anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.serving import TOOLS, events_of, message_of, say, scripted, serving, user

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
FORBIDDEN = re.compile(
    r"token_ids|generation_log|log_probs|prompt_token|policy_epoch|kv_cache|routed|routing|"
    r"staging|digest|chain_hash|cumulative|weight_version|num_evictions|moe_|ng_"
)
ADMISSION = {"rollout_id": "g1", "model_call_id": "c1", "mode": "text"}


def leaks(value: Any, path: str = "") -> Iterator[str]:
    """Paths of members that an agent must not see."""
    if isinstance(value, dict):
        for name, member in value.items():
            # Counts are OpenAI's own, and no tokens.
            if path != "/usage" and FORBIDDEN.search(name):
                yield f"{path}/{name}"
            yield from leaks(member, f"{path}/{name}")
    elif isinstance(value, list):
        if value and all(isinstance(member, int) for member in value):
            yield f"{path} is a list of integers"
        for member in value:
            yield from leaks(member, f"{path}[]")


def test_the_scan_finds_what_it_looks_for() -> None:
    found = list(leaks({"a": [{"prompt_token_ids": [1, 2]}], "usage": {"prompt_tokens": 3}}))
    assert found == ["/a[]/prompt_token_ids", "/a[]/prompt_token_ids is a list of integers"]


BODIES: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 0},
    {"tools": TOOLS},
    {"return_token_ids": True, "return_tokens_as_token_ids": True},
    {"logprobs": True, "tools": TOOLS},
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("rollout", ["r1", None])
async def test_standalone_and_plain_answers(body: dict[str, Any], rollout: str | None) -> None:
    async with serving(scripted([say(f"Hi.{CALL}")] * 3)) as served:
        reply = await served.chat([user("a")], rollout=rollout, **body)
        assert reply.status_code == 200
        assert list(leaks(reply.json())) == []
        stream = await served.chat([user("b")], rollout=rollout, stream=True, **body)
        for event in events_of(stream.text)[:-1]:
            assert list(leaks(json.loads(event))) == []
        base = "" if rollout is None else f"/rollouts/{rollout}"
        bare = await served.client.post(f"{base}/v1/completions", json={"prompt": "a"})
        assert list(leaks(bare.json())) == []
        for answer in (reply, stream, bare):
            for name, value in answer.headers.items():
                assert not FORBIDDEN.search(name)
                assert "[" not in value
        row = served.rows()[0] if rollout else None
        if row is not None and row.ledger is not None and row.ledger.response_body is not None:
            assert json.loads(row.ledger.response_body) == reply.json()


@pytest.mark.parametrize("body", BODIES)
async def test_gyms_answers_hold_coordinates_and_nothing_else(body: dict[str, Any]) -> None:
    async with serving(scripted([say(f"Hi.{CALL}")])) as served:
        capture = {"offload_params": {"ng_capture": ADMISSION}}
        reply = await served.chat([user("a")], rollout=None, **capture, **body)
        answer = reply.json()
        answer.pop("ng_commit_coords")
        assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
        (choice,) = answer["choices"]
        assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
        assert choice["logprobs"] is None
        assert choice["message"].keys() <= {"role", "content", "tool_calls"}
        assert list(leaks(answer)) == []


async def test_log_probs_are_openais_and_no_ids() -> None:
    answer = say("ab")
    async with serving(scripted([answer, answer])) as served:
        reply = await served.chat([user("a")], logprobs=True)
        listed = reply.json()["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in listed] == [value for _, value in answer]
        assert "".join(entry["token"] for entry in listed) == "ab<|im_end|>"
        assert {entry["bytes"] for entry in listed} == {None}
        assert all(entry["top_logprobs"] == [] for entry in listed)
        bare = await served.client.post("/v1/completions", json={"prompt": "a", "logprobs": 0})
        log_probs = bare.json()["choices"][0]["logprobs"]
        assert log_probs["token_logprobs"] == [value for _, value in answer]
        assert "".join(log_probs["tokens"]) == "ab<|im_end|>"


async def test_special_tokens_never_show_in_content() -> None:
    async with serving(scripted([say("a<|im_start|>b"), say("c")])) as served:
        said = message_of(await served.chat([user("a")]))
        assert said["content"] == "ab"
        reply = await served.chat([user("a"), said, user("b")])
        assert reply.headers["x-tokenplane-capture"] == "staged"
