"""Our ledger as NeMo-Gym's: loaded by name, judged by Gym's checks, compared with the stock one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.gym_agents import AGENTS, ANSWERS, ChatAgent, run_rollout
from tests.interop.gym_engine import collect, listening
from tests.interop.gym_process import LINKS, OUR_LEDGER, GymModelServer
from tests.interop.gym_proxy import EngineProxy
from tests.server.serving import say, scripted, tiny
from tokenplane.capture.gym_ledger import GymLedger

CHECKS = Path(__file__).with_name("gym_ledger_checks.py")


@pytest.mark.parametrize("seed", [1, 2])
def test_gyms_conformance_checks_and_the_stock_ledger_agree(
    seed: int, gym_python: Path, tmp_path: Path
) -> None:
    """On the base install alone. Where the two differ, ours resolved a repeated answer."""
    done = subprocess.run(
        [gym_python, "-B", CHECKS, f"file://{tmp_path}/store", tmp_path / "stock", str(seed)],
        env={**os.environ, "PYTHONPATH": str(LINKS)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["type"] == OUR_LEDGER
    assert found["is_capture_ledger"]
    assert found["process_shared"]
    assert "torch" not in found["loaded"]
    assert found["conformance"] == ["lineage_visibility", "fresh_client_lineage_visibility"]
    assert all(count >= 5 for count in found["compared"].values()), found["compared"]


@pytest.fixture(scope="module")
def gym(
    gym_python: Path, proxy: EngineProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GymModelServer]:
    folder = tmp_path_factory.mktemp("our-ledger")
    with _gym_over(folder, gym_python, proxy) as server:
        yield server


def _gym_over(folder: Path, python: Path, proxy: EngineProxy) -> GymModelServer:
    return GymModelServer(
        python,
        proxy.url,
        folder,
        lineage_store=OUR_LEDGER,
        lineage_store_kwargs={"store": f"file://{folder}/ledger"},
    )


@pytest.mark.engine
@pytest.mark.parametrize("dialect", AGENTS)
async def test_rollouts_resolve_through_it(
    dialect: str, gym: GymModelServer, proxy: EngineProxy
) -> None:
    agent = AGENTS[dialect](gym, f"ours-{dialect.replace('/', '-')}")
    async with listening(scripted([say(text) for text in ANSWERS]), proxy) as served:
        await run_rollout(agent)
        manifest = gym.manifest(agent.rollout)
        assert manifest.failures == []
        assert len(collect(served.store, manifest, strictness="gym").call_spans) == 4


@pytest.mark.engine
@pytest.mark.parametrize("hint", [None, "Think again."])
async def test_a_call_made_twice_with_one_answer_keeps_its_continuations(
    hint: str | None,
    gym: GymModelServer,
    gym_servers: dict[str, GymModelServer],
    proxy: EngineProxy,
) -> None:
    """An agent repeats its call, as it was or with a hint, and a greedy model its answer: the stock
    ledger is lost there."""
    rollout = "repeated" if hint is None else "hinted"
    for server, expected in ((gym, []), (gym_servers["megatron_worker"], ["unresolved_parent"])):
        agent = ChatAgent(server, rollout)
        engine = scripted([say("One."), say("One."), say("Two.")])
        async with listening(engine, proxy) as served:
            agent.items.append({"role": "user", "content": "First?"})
            await agent.send()
            if hint is not None:
                agent.items.append({"role": "user", "content": hint})
            await agent.call()
            last = await agent.ask("Second?")
            assert server.reasons(rollout, at_least=len(expected)) == expected
            if not expected:
                row = collect(served.store, server.manifest(rollout), response_id=last["id"])
                assert len(row.call_spans) == 2
                prompt = engine.requests[-1].prompt_token_ids
                assert row.token_ids[: len(prompt)].tolist() == prompt.tolist()
                assert hint is None or hint in tiny().tokenizer.decode(prompt)


@pytest.mark.engine
async def test_rollouts_go_on_after_the_model_server_restarts(
    gym_python: Path, proxy: EngineProxy, tmp_path: Path
) -> None:
    async with listening(scripted([say("One."), say("Two.")]), proxy) as served:
        with _gym_over(tmp_path, gym_python, proxy) as first:
            agent = ChatAgent(first, "restarted")
            await agent.ask("First?")
        with _gym_over(tmp_path, gym_python, proxy) as second:
            after = ChatAgent(second, "restarted")
            after.items = agent.items
            await after.ask("Second?")
            manifest = second.manifest("restarted")
            assert len(collect(served.store, manifest, strictness="gym").call_spans) == 2
        # The same store without Gym: what a framework on this host reads.
        ledger = GymLedger(f"file://{tmp_path}/ledger")
        assert ledger.read_manifest("restarted") == manifest
        assert await ledger.manifest("restarted") == manifest.model_dump(mode="json")
        await ledger.close()
