"""``tokenplane serve --replicas 2`` as a process: one API, a worker killed under load, the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.replicas.gym_admission import admission
from tests.server.serve_process import ServeProcess, serve_process
from tokenplane.engine_adapter.replicas.process_tree import await_gone, command_of, descendants
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.schemas.staged_row import parse_staged_row
from tokenplane.staging import open_store
from tokenplane.tools import verify

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TOKEN = "c0ntrol"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
WAIT_S = 300.0
ROLLOUTS = 4
TURNS = 8


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ServeProcess]:
    """Two workers over one file store."""
    with serve_process(
        f"file://{tmp_path}/store",
        tmp_path / "log",
        *("--replicas", "2", "--cpus-per-replica", "0.5", "--weight-version", "5"),
        env={"TOKENPLANE_CONTROL_TOKEN": TOKEN},
        ready_s=480.0,
        fresh=True,
    ) as server:
        yield server


@dataclass
class Conversation:
    """One rollout whose client retries, as a client with an idempotency key may."""

    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def turn(self, client: httpx.AsyncClient, number: int) -> None:
        """Ask until there is an answer."""
        self.messages.append({"role": "user", "content": f"Say something {number}."})
        body = {"messages": self.messages, "max_tokens": 24, "temperature": 1.0}
        headers = {"Idempotency-Key": f"turn-{number}"}
        ends = time.monotonic() + WAIT_S
        path = f"/rollouts/{self.name}/v1/chat/completions"
        while (reply := await self.attempt(client, path, body, headers)) is None:
            assert time.monotonic() < ends, self.failures[-5:]
            await asyncio.sleep(0.2)
        assert reply.headers["x-tokenplane-capture"] == "staged", reply.text
        self.answers.append(reply.json())
        self.workers.append(reply.headers["x-tokenplane-replica"])
        self.messages.append(reply.json()["choices"][0]["message"])

    async def attempt(
        self, client: httpx.AsyncClient, path: str, body: Any, headers: dict[str, str]
    ) -> httpx.Response | None:
        """An answer, or None where the worker died with the question."""
        try:
            reply = await client.post(path, json=body, headers=headers)
        except httpx.TransportError as error:
            self.failures.append(type(error).__name__)
            return None
        if reply.status_code == 200:
            return reply
        self.failures.append(f"{reply.status_code} {reply.text[:200]}")
        assert reply.status_code >= 500, reply.text
        return None


def health(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/health", timeout=60).json()
    return found


def pids(url: str) -> dict[str, int]:
    return {name: one["pid"] for name, one in health(url)["replicas"].items()}


def control(url: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
    reply = httpx.request(method, f"{url}{path}", json=body, headers=AUTH, timeout=120)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def load(url: str, talks: list[Conversation], workers: dict[str, int]) -> str:
    """Every conversation to its end. In the midst of it, the worker that gave the first one its
    latest answer is killed, so that one at least goes on elsewhere. Gives its name."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def talk(conversation: Conversation) -> None:
        for number in range(TURNS):
            await conversation.turn(client, number)
            if conversation is talks[0] and number == TURNS // 2:
                begun.set_result(conversation.workers[-1])

    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        talking = [asyncio.ensure_future(talk(one)) for one in talks]
        victim = await begun
        os.kill(workers[victim], signal.SIGKILL)
        await asyncio.gather(*talking)
    return victim


def test_one_base_url_for_all_and_a_killed_worker_loses_nothing(
    fleet: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = fleet.url
    assert fleet.ready_line.endswith(", 2 replicas)")
    first = pids(url)
    assert len(set(first.values())) == 2
    assert fleet.process.pid not in first.values()
    the_same_routes(url)
    changes_reach_both(url)

    talks = [Conversation(f"load-{number}") for number in range(ROLLOUTS)]
    victim = asyncio.run(load(url, talks, first))
    (survivor,) = first.keys() - {victim}
    assert talks[0].workers[-1] != victim
    the_new_one_waits_for_its_weights(url, survivor)
    second = pids(url)
    assert second[survivor] == first[survivor]
    assert len(second.keys() - first.keys()) == 1

    below = descendants([fleet.process.pid])
    assert fleet.stop() == 0
    assert fleet.output == []
    assert not await_gone(below, 30.0)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
    check_store(tmp_path, talks)
    assert verify.main([f"{tmp_path}/store"]) == 0, capsys.readouterr().out


def test_a_signal_while_ray_starts_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenplane.tools.cli", "serve", "--model", "tiny"]
    command += ["--store", f"file://{tmp_path}/store", "--replicas", "2"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        ends = time.monotonic() + WAIT_S
        below: dict[int, str] = {}
        while not any("raylet/raylet" in command_of(pid) for pid in below):
            assert time.monotonic() < ends, [command_of(pid) for pid in below]
            time.sleep(0.1)
            below = descendants([process.pid])
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            assert time.monotonic() < ends
            below |= descendants([process.pid])
            time.sleep(0.05)
        left = await_gone(below, 5.0)
        assert not left, [command_of(pid) for pid in left]
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "log").read_text()
    assert "tokenplane serve: interrupted while starting" in said
    assert "Traceback" not in said


def the_same_routes(url: str) -> None:
    """What one server serves: an OpenAI client, a stream, NeMo-Gym's admission, the ledger."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with OpenAI(base_url=f"{url}/rollouts/r1/v1", api_key="unused", max_retries=0) as agent:
        answer = agent.chat.completions.create(model="tiny", messages=messages, max_tokens=6)
    messages += [answer.choices[0].message.model_dump(exclude_none=True)]
    messages += [{"role": "user", "content": "more"}]
    body = {"messages": messages, "max_tokens": 6, "stream": True}
    streamed = httpx.post(f"{url}/rollouts/r1/v1/chat/completions", json=body, timeout=120)
    assert streamed.text.rstrip().endswith("data: [DONE]")
    assert ": tokenplane-capture staged" in streamed.text
    gym = {"messages": messages[:1], "max_tokens": 6, "logprobs": True}
    gym |= {"offload_params": {"ng_capture": admission("c1")}}
    reply = httpx.post(f"{url}/v1/chat/completions", json=gym, timeout=120)
    assert reply.json()["ng_commit_coords"]["disposition"] == "staged"
    listed = RolloutManifest.model_validate(control(url, "GET", "/rollouts/r1/manifest"))
    assert [record.weight_version for record in listed.records] == [5, 5]
    assert len(control(url, "GET", "/rollouts/r1/rows")["rows"]) == 2
    assert httpx.get(f"{url}/rollouts/r1/manifest", timeout=60).status_code == 401
    assert httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{url}/nothing", timeout=60).status_code == 404
    bad = httpx.post(f"{url}/v1/chat/completions", content=b"{", timeout=60)
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_json")


def the_new_one_waits_for_its_weights(url: str, survivor: str) -> None:
    """It was started with version 5, where the other has 6 by now."""
    ends = time.monotonic() + WAIT_S
    while len(found := health(url)["replicas"]) < 2:
        assert time.monotonic() < ends, found
        time.sleep(0.5)
    behind = {name: one["behind"] for name, one in found.items()}
    assert behind == dict.fromkeys(found, True) | {survivor: False}
    assert health(url)["status"] == "degraded"
    control(url, "POST", "/admin/weight_version", {"version": 6})
    assert health(url)["status"] == "ok"


def changes_reach_both(url: str) -> None:
    assert httpx.post(f"{url}/admin/pause", timeout=60).status_code == 401
    assert control(url, "POST", "/admin/weight_version", {"version": 6})["version"] == 6
    for path, state in (("/admin/pause", "paused"), ("/admin/resume", "running")):
        assert control(url, "POST", path)["state"] == state
        status = control(url, "GET", "/admin/status")
        assert {one["state"] for one in status["replicas"].values()} == {state}
    metrics = httpx.get(f"{url}/metrics", timeout=60).text
    for name in pids(url):
        assert f'tokenplane_weight_version{{replica="{name}"}} 6.0' in metrics


def check_store(folder: Path, talks: list[Conversation]) -> None:
    """Each acknowledged answer has its row; each turn continues the one before."""
    with open_store(f"file://{folder}/store?mode=ro") as store:
        rows = [parse_staged_row(batch, key=key) for key, batch in store.scan("staged")]
    by_response = {row.ledger.response_id: row for row in rows if row.ledger is not None}
    from_store = []
    for one in talks:
        assert len(one.answers) == TURNS
        parent = None
        for body, worker, last in zip(one.answers, one.workers, ["", *one.workers], strict=False):
            row = by_response[body["id"]]
            row.call.check_digest()
            assert row.call.parent_call_id == parent
            parent = row.call.model_call_id
            if last not in ("", worker):
                from_store.append(row.evidence.prefix_source)
    assert "store" in from_store
