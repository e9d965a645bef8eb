"""One admission delivered twice: two rows under two keys, and the acknowledged one is the truth."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.interop.gym_agents import ChatAgent
from tests.interop.gym_engine import collect, listening
from tests.interop.gym_process import GymModelServer
from tests.interop.gym_proxy import EngineProxy, Fault
from tests.server.serving import Served, encode, say, scripted
from tokenplane.capture.collect.collector import Collector
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.schemas.training_row import TRAINING_PARTITION
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store_types import RetentionPolicy
from tokenplane.staging.token_source import TokenSource

pytestmark = [pytest.mark.engine]


@pytest.fixture
def gym(gym_servers: dict[str, GymModelServer]) -> GymModelServer:
    return gym_servers["megatron_worker"]


def check_exactly_once(served: Served, manifest: RolloutManifest, sampled: list[str]) -> None:
    """The row holds what the agent saw, and only the lost deliveries are left to be swept."""
    store = served.store
    staged = store.keys(STAGED_PARTITION, f"{manifest.rollout_id}/")
    row = collect(store, manifest, strictness="gym")
    used = [span.staging_key for span in row.call_spans]
    assert [record.staging_key for record in manifest.records] == used
    tokens = row.token_ids[row.token_mask == 1].tolist()
    assert tokens == [token for text in sampled for token in encode(text + "<|im_end|>")]
    collector = Collector(TokenSource(store), manifest)
    report = collector.publish([row], store, clean_partition=STAGED_PARTITION)
    assert (report.published, report.cleaned_rows, report.clean_error) == (1, len(used), None)
    orphans = [key for key in staged if key not in used]
    assert store.keys(STAGED_PARTITION, f"{manifest.rollout_id}/") == orphans
    assert orphans
    young = RetentionPolicy(max_age_s=3600, partition=STAGED_PARTITION)
    assert store.sweep(young).rows == 0
    swept = store.sweep(RetentionPolicy(max_age_s=0, partition=STAGED_PARTITION))
    assert swept.rows == len(orphans)
    assert store.keys(STAGED_PARTITION) == []
    assert store.keys(TRAINING_PARTITION) == [manifest.rollout_id]


async def test_a_reply_lost_after_staging(
    gym: GymModelServer, proxy: EngineProxy, tmp_path: Path
) -> None:
    agent = ChatAgent(gym, "lost-reply")
    engine = scripted([say("Never seen."), say("One."), say("Two.")])
    with open_store(f"file://{tmp_path}/store") as store:
        async with listening(engine, proxy, store=store) as served:
            proxy.inject("lose_reply")
            await agent.ask("First?")
            await agent.ask("Second?")
            admitted = [json.loads(body)["offload_params"]["ng_capture"] for body in proxy.bodies]
            calls = [admission["model_call_id"] for admission in admitted]
            assert calls[0] == calls[1] != calls[2]
            rows = served.rows("lost-reply")
            assert [row.call.model_call_id for row in rows] == calls
            assert len({row.staging_key for row in rows}) == 3
            check_exactly_once(served, gym.manifest("lost-reply"), ["One.", "Two."])


@pytest.mark.parametrize("fault", ["twice_first", "twice_last"])
async def test_two_racing_deliveries(
    fault: Fault, gym: GymModelServer, proxy: EngineProxy, tmp_path: Path
) -> None:
    """Both run to the end; whichever reply Gym gets, its row is the one that stays valid."""
    agent = ChatAgent(gym, f"racing-{fault}")
    engine = scripted([say("A short one."), say("A rather longer one."), say("Two.")], step_s=0.005)
    with open_store(f"file://{tmp_path}/store") as store:
        async with listening(engine, proxy, store=store) as served:
            proxy.inject(fault)
            answer = await agent.ask("First?")
            said = answer["choices"][0]["message"]["content"]
            assert said in ("A short one.", "A rather longer one.")  # both run; either may win
            await asyncio.to_thread(proxy.settle)
            rows = served.rows(agent.rollout)
            assert len({row.staging_key for row in rows}) == 2
            assert len({row.call.model_call_id for row in rows}) == 1
            assert len({row.call.digest for row in rows}) == 2
            await agent.ask("Second?")
            check_exactly_once(served, gym.manifest(agent.rollout), [said, "Two."])


async def test_gym_waits_for_an_engine_that_is_not_up_yet(
    gym: GymModelServer, proxy: EngineProxy
) -> None:
    agent = ChatAgent(gym, "early")
    proxy.route(None)
    asking = asyncio.ensure_future(agent.ask("First?"))
    await asyncio.sleep(0.3)
    async with listening(scripted([say("One.")]), proxy) as served:
        await asking
        assert len(collect(served.store, gym.manifest("early")).call_spans) == 1
