"""What our server does wrong on purpose, as NeMo-Gym sees it: statuses, words, reasons, no tokens.

The lines of the contract's misbehaviour table that our server can produce. Gym sends some statuses
again, reads some 400s as a full context, and loses a rollout over one early failure; each of our
errors must be in the right class.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.interop.gym_agents import ChatAgent
from tests.interop.gym_engine import collect, find_token_fields, listening
from tests.interop.gym_process import GymModelServer
from tests.interop.gym_proxy import EngineProxy
from tests.server.serving import say, scripted, serving, user
from tokenplane.engine_adapter.engine import GenerationRequest
from tokenplane.schemas.errors import EngineError
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.schemas.wire import CommitCoords

pytestmark = [pytest.mark.engine]

UNFINISHED = "request_finished_without_staged_coordinates"
SENT_AGAIN = {404, 408, 429, 500, 502, 503, 504, 520}
"""Statuses on which Gym delivers the same admission again."""
OVERFLOW_WORDS = ("context length", "max_tokens")


@pytest.fixture
def gym(gym_servers: dict[str, GymModelServer]) -> GymModelServer:
    return gym_servers["megatron_worker"]


async def test_a_full_context_is_a_served_empty_answer(
    gym: GymModelServer, proxy: EngineProxy
) -> None:
    agent = ChatAgent(gym, "overflow")
    async with listening(scripted([say("Hi.")]), proxy) as served:
        answer = await agent.ask("word " * 9000)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert len(proxy.bodies) == 1
        assert gym.manifest("overflow").records == []
        assert gym.reasons("overflow", at_least=1) == [UNFINISHED]
        direct = await served.client.post("/v1/chat/completions", content=proxy.bodies[0])
        assert direct.status_code == 400
        assert "context length" in direct.json()["error"]["message"]


REFUSED: dict[str, dict[str, Any]] = {
    "a temperature out of range": {"temperature": -1},
    "an unsupported parameter": {"frequency_penalty": 0.5},
    "a forced tool": {"tool_choice": "required"},
    "a negative token limit": {"max_tokens": -1},
    "a token limit that is no number": {"max_tokens": "many"},
    "a newer name of the token limit": {"max_completion_tokens": 0},
    "another model": {"model": "max_tokens"},
    "an unknown role": {"messages": [{"role": "context length", "content": ""}]},
    "no messages": {"messages": []},
    "media": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]
    },
    "several answers": {"n": 2},
    "a stream": {"stream": True},
    "a private parameter": {"offload_params": {"_max_tokens": 1}},
    "an admission in two places": {"offload_params": {"ng_capture": {}}},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_no_other_refusal_reads_as_an_overflow_or_is_sent_again(name: str) -> None:
    admission = {"rollout_id": "r", "model_call_id": "c", "mode": "text"}
    body = {"messages": [{"role": "user", "content": "?"}], "ng_capture": admission}
    async with serving(scripted([say("Hi.")])) as served:
        reply = await served.client.post("/v1/chat/completions", json=body | REFUSED[name])
        assert reply.status_code == 400
        assert not any(word in reply.text for word in OVERFLOW_WORDS)
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_refusal_reaches_the_agent_once(gym: GymModelServer, proxy: EngineProxy) -> None:
    agent = ChatAgent(gym, "refused", frequency_penalty=0.5)
    async with listening(scripted([say("Hi.")]), proxy):
        agent.items.append({"role": "user", "content": "?"})
        reply = await agent.send()
        assert reply.status_code == 500
        assert len(proxy.bodies) == 1
        assert gym.reasons("refused", at_least=1) == [UNFINISHED]


async def test_a_body_over_the_limit_reaches_the_agent_once(
    gym: GymModelServer, proxy: EngineProxy
) -> None:
    agent = ChatAgent(gym, "too-large")
    async with listening(scripted([say("Hi.")]), proxy, max_body_bytes=8192) as served:
        agent.items.append({"role": "user", "content": "x" * 9000})
        reply = await agent.send()
        assert reply.status_code == 500
        assert len(proxy.bodies) == 1
        assert gym.reasons("too-large", at_least=1) == [UNFINISHED]
        direct = await served.client.post("/v1/chat/completions", content=proxy.bodies[0])
        assert direct.status_code == 413
        assert direct.status_code not in SENT_AGAIN


async def test_an_answer_to_another_history_is_refused_once_and_before_generating(
    gym: GymModelServer, proxy: EngineProxy
) -> None:
    """Gym's ledger finds the parent of a history with a message put before the parent's answer; the
    staged prefix does not hold that message, so nothing is generated from either."""
    agent = ChatAgent(gym, "put-in")
    async with listening(scripted([say("One."), say("Two."), say("No.")]), proxy) as served:
        await agent.ask("First?")
        await agent.ask("Second?")
        agent.items.insert(3, {"role": "user", "content": "Put in."})
        agent.items.append({"role": "user", "content": "Third?"})
        assert (await agent.send()).status_code == 500
        assert len(proxy.bodies) == 3
        assert len(served.script.requests) == 2
        direct = await served.client.post("/v1/chat/completions", content=proxy.bodies[2])
        assert (direct.status_code, direct.json()["error"]["code"]) == (
            409,
            "history_not_in_prefix",
        )
        assert gym.reasons("put-in", at_least=1) == [UNFINISHED]


async def test_a_prefix_that_is_gone_is_refused_once_and_before_generating(
    gym: GymModelServer, proxy: EngineProxy
) -> None:
    agent = ChatAgent(gym, "lost-prefix")
    async with listening(scripted([say("Hi."), say("No.")]), proxy) as served:
        await agent.ask("Hello?")
    async with listening(scripted([say("No.")]), proxy) as served:
        # A new server with an empty store: nothing of the first turn is there.
        agent.items.append({"role": "user", "content": "And?"})
        reply = await agent.send()
        assert reply.status_code == 500
        assert len(proxy.bodies) == 1
        assert served.script.requests == []
        direct = await served.client.post("/v1/chat/completions", content=proxy.bodies[0])
        assert direct.status_code == 409
        assert direct.status_code not in SENT_AGAIN
        assert not any(word in direct.text for word in OVERFLOW_WORDS)
        assert direct.json()["error"]["code"] == "prefix_missing_row"
    assert len(gym.manifest("lost-prefix").records) == 1
    assert gym.reasons("lost-prefix", at_least=1) == [UNFINISHED]


async def test_a_failed_capture_is_served_and_loses_the_rollout_in_gyms_ledger(
    gym: GymModelServer, proxy: EngineProxy
) -> None:
    """The store takes no row: the answers go out all the same, and every reason is kept."""
    agent = ChatAgent(gym, "unstaged")
    answers = [say("Before."), say("One."), say("Two."), say("One.")]
    async with listening(scripted(answers), proxy) as served:
        await served.chat([user("?")], rollout="earlier")
        served.store.seal(STAGED_PARTITION)
        await agent.ask("First?")
        await agent.ask("Second?")
        assert [find_token_fields(reply) for reply in agent.replies] == [[], []]
        assert gym.manifest("unstaged").records == []
        expected = ["worker_capture_failed", UNFINISHED, "unresolved_parent"]
        assert sorted(gym.reasons("unstaged", at_least=3)) == sorted(expected)
        first, second = (json.loads(body) for body in proxy.bodies)
        assert "offload_params" not in second
        reply = await served.client.post("/v1/chat/completions", json=first)
        coords = reply.json()["ng_commit_coords"]
        assert set(coords) == set(CommitCoords.model_fields)
        assert (coords["disposition"], coords["delta_len"], coords["digest"]) == (
            "capture_failed",
            0,
            None,
        )
        failures = await served.failures("unstaged")
        assert failures == ["stage_failed", "stage_failed"]


async def test_without_a_weight_version_nothing_is_captured(
    gym: GymModelServer, proxy: EngineProxy
) -> None:
    agent = ChatAgent(gym, "no-version")
    async with listening(scripted([say("One.")]), proxy, version=None) as served:
        await agent.ask("First?")
        assert gym.reasons("no-version", at_least=2) == ["worker_capture_failed", UNFINISHED]
        assert await served.failures("no-version") == ["no_policy_epoch"]


async def test_a_malformed_admission_is_served_without_coordinates() -> None:
    admission = {"rollout_id": "odd", "model_call_id": "c", "mode": "token_in"}
    body = {"messages": [{"role": "user", "content": "?"}], "ng_capture": admission}
    async with serving(scripted([say("Hi.")])) as served:
        reply = await served.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200
        assert "ng_commit_coords" not in reply.json()
        assert await served.failures("odd") == ["invalid_admission"]


async def test_an_edited_history_is_plain_traffic(gym: GymModelServer, proxy: EngineProxy) -> None:
    agent = ChatAgent(gym, "edited")
    async with listening(scripted([say("One."), say("Two.")]), proxy) as served:
        await agent.ask("First?")
        agent.items[0] = {"role": "user", "content": "Zeroth?"}
        await agent.ask("Second?")
        assert gym.reasons("edited", at_least=1) == ["unresolved_parent"]
        assert len(served.rows("edited")) == 1
        row = collect(served.store, gym.manifest("edited"), response_id=agent.replies[0]["id"])
        assert row.terminal_selection == "response_id"


async def test_a_dead_engine_is_asked_three_times(gym: GymModelServer, proxy: EngineProxy) -> None:
    agent = ChatAgent(gym, "dead")
    async with listening(scripted([say("One.")]), proxy) as served:
        served.script.fail()
        agent.items.append({"role": "user", "content": "?"})
        reply = await agent.send()
        assert reply.status_code == 500
        calls = [json.loads(body)["offload_params"]["ng_capture"] for body in proxy.bodies]
        assert len(calls) == 3
        assert len({call["model_call_id"] for call in calls}) == 1
        assert gym.reasons("dead", at_least=1) == [UNFINISHED]


async def test_a_call_that_fails_once_is_captured_on_the_second_delivery(
    gym: GymModelServer, proxy: EngineProxy
) -> None:
    tries = iter(["broken", "whole"])

    def script(_request: GenerationRequest) -> Iterable[tuple[int, float]]:
        if next(tries) == "broken":
            raise EngineError("a step failed")
        return say("One.")

    agent = ChatAgent(gym, "flaky")
    async with listening(scripted(script), proxy) as served:
        await agent.ask("First?")
        assert len(proxy.bodies) == 2
        manifest = gym.manifest("flaky")
        assert (len(manifest.records), manifest.failures) == (1, [])
        assert len(collect(served.store, manifest).call_spans) == 1
