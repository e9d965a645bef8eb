"""The real Gym model server drives our server: three dialects, two backends, tools, one truth."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from tests.interop.gym_agents import AGENTS, ANSWERS, run_rollout
from tests.interop.gym_engine import collect, find_token_fields, listening
from tests.interop.gym_process import GymModelServer
from tests.interop.gym_proxy import EngineProxy
from tests.server.serving import encode, say, scripted
from tokenplane.engine_adapter.engine import GenerationRequest
from tokenplane.engine_adapter.scripted_engine import ScriptedEngine
from tokenplane.schemas.wire import CaptureAdmission, CommitCoords

pytestmark = [pytest.mark.engine]


def check_tokens(engine: ScriptedEngine, token_ids: np.ndarray, mask: np.ndarray) -> None:
    """The row is what the engine was conditioned on and what it sampled, id by id."""
    last = engine.requests[-1].prompt_token_ids
    written = [encode(text + "<|im_end|>") for text in ANSWERS]
    assert token_ids.tolist() == [*last.tolist(), *written[-1]]
    at = 0
    for request, sampled in zip(engine.requests, written, strict=True):
        prompt = request.prompt_token_ids
        assert token_ids[: len(prompt)].tolist() == prompt.tolist()
        assert not mask[at : len(prompt)].any()
        at = len(prompt) + len(sampled)
        assert token_ids[len(prompt) : at].tolist() == sampled
        assert mask[len(prompt) : at].all()


@pytest.mark.parametrize("dialect", AGENTS)
@pytest.mark.parametrize("backend", ["megatron_worker", "vllm_worker"])
async def test_a_rollout_with_tools_becomes_a_verified_row(
    backend: str, dialect: str, gym_servers: dict[str, GymModelServer], proxy: EngineProxy
) -> None:
    gym = gym_servers[backend]
    agent = AGENTS[dialect](gym, f"tools-{backend}-{dialect.replace('/', '-')}")
    engine = scripted([say(text) for text in ANSWERS])
    async with listening(engine, proxy) as served:
        await run_rollout(agent)
        for reply in agent.replies:
            assert find_token_fields(reply) == []
        manifest = gym.manifest(agent.rollout)
        assert [record.mode for record in manifest.records] == ["text"] + ["token_in"] * 3
        assert manifest.failures == []
        assert [record.response_id for record in manifest.records] == [
            reply["id"] for reply in agent.replies
        ]
        last = agent.replies[-1]["id"]
        row = collect(served.store, manifest, response_id=last, strictness="gym")
        check_tokens(engine, row.token_ids, row.token_mask)
        assert row.terminal_selection == "response_id"
        assert collect(served.store, manifest).terminal_selection == "heuristic"


@pytest.mark.parametrize("backend", ["megatron_worker", "vllm_worker"])
async def test_what_travels_between_gym_and_us(
    backend: str, gym_servers: dict[str, GymModelServer], proxy: EngineProxy
) -> None:
    """The admission as Gym sends it, and our coordinates with exactly the contract's fields."""
    gym = gym_servers[backend]
    agent = AGENTS["chat/completions"](gym, f"wire-{backend}")
    async with listening(scripted([say(text) for text in ANSWERS]), proxy) as served:
        await agent.ask("1 + 2.5 + 4?")
        await agent.finish_tools()
        first, second = (json.loads(body) for body in proxy.bodies)
        for body in (first, second):
            carrier = body["offload_params"] if backend == "megatron_worker" else body
            admission = carrier["ng_capture"]
            assert set(admission) == set(CaptureAdmission.model_fields)
            assert body["stream"] is False
            reply = await served.client.post("/v1/chat/completions", json=body)
            answer = reply.json()
            assert set(answer["ng_commit_coords"]) == set(CommitCoords.model_fields)
            assert answer["choices"][0]["logprobs"] is None
            del answer["ng_commit_coords"]
            assert find_token_fields(answer) == []
        assert len(served.rows(f"wire-{backend}")) == 4
        assert len(gym.manifest(f"wire-{backend}").records) == 2


def next_answer(request: GenerationRequest) -> list[tuple[int, float]]:
    """The answer that follows from how many turns the model has had, as a greedy model's would."""
    prompt = request.prompt_token_ids
    start, role = encode("<|im_start|>assistant")
    turns = int(np.sum((prompt[:-1] == start) & (prompt[1:] == role)))
    return say(ANSWERS[turns - 1])


async def test_greedy_rollouts_side_by_side_stay_apart(
    gym_servers: dict[str, GymModelServer], proxy: EngineProxy
) -> None:
    """Eight rollouts at once that say the same: their rows are equal and share nothing."""
    gym = gym_servers["megatron_worker"]
    async with listening(scripted(next_answer), proxy) as served:
        agents = [AGENTS["responses"](gym, f"side-{at}") for at in range(8)]
        await asyncio.gather(*map(run_rollout, agents))
        rows = [collect(served.store, gym.manifest(agent.rollout)) for agent in agents]
        assert len({row.token_ids.tobytes() for row in rows}) == 1
        assert len({span.staging_key for row in rows for span in row.call_spans}) == 32
