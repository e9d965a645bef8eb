"""``tokenplane serve`` with a real engine behind the real Gym model server, weights moving on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from tests.interop.gym_agents import AGENTS
from tests.interop.gym_engine import collect, find_token_fields
from tests.interop.gym_process import BACKENDS, GymModelServer
from tests.interop.gym_proxy import EngineProxy
from tests.server.serve_process import serve_process
from tokenplane.engine_adapter.engine_log import read_engine_log
from tokenplane.staging.open_store import open_store

pytestmark = [pytest.mark.engine]

LIMITS = {
    "chat/completions": {"max_tokens": 12},
    "responses": {"max_output_tokens": 12},
    "messages": {"max_tokens": 12},
}
"""Each dialect's name for the token limit. The tiny model seldom ends a turn by itself."""


@dataclass(frozen=True)
class Serve:
    """A running ``tokenplane serve``."""

    url: str
    store_url: str
    engine_log: Path


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    folder = tmp_path_factory.mktemp("serve")
    store_url, engine_log = f"file://{folder}/store", folder / "engine.jsonl"
    log = folder / "serve.log"
    with serve_process(store_url, log, "--engine-log", str(engine_log)) as server:
        yield Serve(server.url, store_url, engine_log)
        assert server.stop() == 0, log.read_text()[-4000:]


@pytest.mark.parametrize("dialect", AGENTS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_rows_are_what_the_engine_itself_logged(
    backend: str,
    dialect: str,
    gym_servers: dict[str, GymModelServer],
    proxy: EngineProxy,
    serve: Serve,
) -> None:
    """Sampled bytes that no text gives back, a new weight version per turn: still exact."""
    proxy.route(urlsplit(serve.url).port)
    gym = gym_servers[backend]
    rollout = f"serve-{backend}-{dialect.replace('/', '-')}"
    agent = AGENTS[dialect](gym, rollout, **LIMITS[dialect])
    async with httpx.AsyncClient(base_url=serve.url, trust_env=False) as control:
        for turn in range(3):
            reply = await control.post("/admin/weight_version", json={"version": 10 + turn})
            assert reply.status_code == 200
            await agent.ask(f"Turn {turn}?")
    assert [find_token_fields(reply) for reply in agent.replies] == [[], [], []]
    manifest = gym.manifest(rollout)
    assert (len(manifest.records), manifest.failures) == (3, [])
    assert [record.weight_version for record in manifest.records] == [10, 11, 12]
    with open_store(f"{serve.store_url}?mode=ro") as store:
        row = collect(store, manifest, response_id=agent.replies[-1]["id"], strictness="gym")
    logged = {request.request_id: request for request in read_engine_log(serve.engine_log)}
    for span, record, answer in zip(row.call_spans, manifest.records, agent.replies, strict=True):
        request = logged[answer["id"]]
        assert record.response_id == answer["id"]
        at = span.start + span.carry_len
        sampled = slice(at, at + span.generation_len)
        assert np.array_equal(row.token_ids[:at], request.prompt_token_ids)
        assert np.array_equal(row.token_ids[sampled], request.generated_token_ids)
        assert row.log_probs[sampled].tobytes() == request.generated_log_probs.tobytes()
        assert set(row.weight_versions[sampled]) == {span.weight_version}


async def test_plain_traffic_beside_a_rollout_is_not_captured(
    gym_servers: dict[str, GymModelServer], proxy: EngineProxy, serve: Serve
) -> None:
    """Without the capture segment in its URL Gym sends no admission, and nothing is staged."""
    proxy.route(urlsplit(serve.url).port)
    gym = gym_servers["megatron_worker"]
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        reply = await client.post(f"{gym.url}/ng-rollout/plain/v1/chat/completions", json=body)
    assert reply.status_code == 200
    assert "ng_capture" not in json.loads(proxy.bodies[-1])
    with open_store(f"{serve.store_url}?mode=ro") as store:
        assert store.keys("staged", "plain/") == []
    assert gym.manifest("plain").records == []
