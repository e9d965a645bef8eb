"""kill -9 of ``tokenplane serve`` at random moments under load: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient

from tests.server.serve_process import ServeProcess, serve_process
from tokenplane.schemas.epochs import spans_epochs
from tokenplane.schemas.errors import EngineError
from tokenplane.schemas.staged_row import parse_staged_row
from tokenplane.staging import open_store
from tokenplane.tools.demo.agent import CALCULATOR, TASKS, Agent, Turn

KILLS = 20
ROLLOUTS = 4
TURNS_PER_CONVERSATION = 6


@dataclass
class Rollout:
    """A conversation that goes on through every restart."""

    name: str
    keyed: bool
    """Sends an idempotency key, so that a retried turn is the same call."""
    streams: bool = False
    """Takes answers as streams; one counts as acknowledged from its finish reason on."""
    tools: bool = False
    """Offers the demo's tool with every turn."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn: int = 0
    acknowledged: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(staging status, served body) of each answer that arrived whole; of a stream its id and
    message."""
    conversations: int = 0

    def request(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        if not self.messages:
            self.conversations += 1
            self.messages = [{"role": "user", "content": f"Tell me story {self.conversations}."}]
            self.turn = 0
        rollout_id = f"{self.name}-{self.conversations}"
        body = {"model": "tiny", "messages": self.messages, "max_tokens": 12, "temperature": 1.0}
        body |= {"stream": self.streams, "tools": [CALCULATOR] if self.tools else []}
        key = {"Idempotency-Key": f"turn-{self.turn}"} if self.keyed else {}
        return rollout_id, body, key

    def take(self, status: str, body: dict[str, Any]) -> None:
        self.acknowledged.append((status, body))
        message = body["choices"][0]["message"]
        answer = {"role": "assistant", "content": message["content"]}
        self.messages += [answer, {"role": "user", "content": f"And then? {self.turn}"}]
        self.turn += 1
        if self.turn == TURNS_PER_CONVERSATION:
            self.messages = []


async def converse(client: httpx.AsyncClient, rollout: Rollout) -> None:
    """Turns, one after the other, until the server is gone."""
    while True:
        rollout_id, body, headers = rollout.request()
        path = f"/rollouts/{rollout_id}/v1/chat/completions"
        try:
            async with client.stream("POST", path, json=body, headers=headers) as reply:
                status, served = await read_answer(reply)
        except httpx.TransportError:
            return
        rollout.take(status, served)


async def read_answer(reply: httpx.Response) -> tuple[str, dict[str, Any]]:
    """(staging status, answer). Of a stream: its id and message, whole once a chunk has the finish
    reason; the row is durable by then, whether or not the status still arrives."""
    if reply.status_code != 200:
        raise AssertionError(f"{reply.status_code}: {await reply.aread()!r}")
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return reply.headers["x-tokenplane-capture"], json.loads(await reply.aread())
    text, ident, finished, status = "", "", False, "staged"
    try:
        async for line in reply.aiter_lines():
            if line.startswith(": tokenplane-capture "):
                status = line.split()[2]
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            [choice] = chunk["choices"]
            ident, text = chunk["id"], text + (choice["delta"].get("content") or "")
            finished = finished or choice["finish_reason"] is not None
    except httpx.TransportError:
        if not finished:
            raise
    assert finished
    return status, {"id": ident, "choices": [{"message": {"content": text}}]}


@dataclass
class DemoAgent:
    """The demo's own agent, which sends what its tool says; it goes on through every restart."""

    name: str
    agent: Agent | None = None
    conversations: int = 0
    acknowledged: list[Turn] = field(default_factory=list)

    async def act(self, url: str, turns: int | None = None) -> None:
        """Turns until the server is gone, or as many as said."""
        for number in itertools.count():
            if number == turns:
                return
            if self.agent is None or len(self.agent.turns) == TURNS_PER_CONVERSATION:
                self.conversations += 1
                self.agent = Agent(self.client(url), "tiny", TASKS[0], 12)
            self.agent.client = self.client(url)
            try:
                async with self.agent.client:
                    self.acknowledged.append(await self.agent.take_turn())
            except EngineError as error:
                if turns is None and isinstance(error.__cause__, APIConnectionError):
                    return
                raise

    def client(self, url: str) -> AsyncOpenAI:
        return AsyncOpenAI(
            api_key="none",
            base_url=f"{url}/rollouts/{self.name}-{self.conversations}/v1",
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(trust_env=False, timeout=30),
        )


async def change_versions(client: httpx.AsyncClient) -> None:
    """New weight versions, also in the midst of answers, until the server is gone."""
    for version in itertools.count(1):
        try:
            await client.post("/admin/weight_version", json={"version": version})
        except httpx.TransportError:
            return
        await asyncio.sleep(0.02)


async def one_life(
    server: ServeProcess, rollouts: list[Rollout], agent: DemoAgent, lives_s: float
) -> None:
    """Load until the kill; every conversation must have met the end of the connection."""
    limits = httpx.Limits(max_connections=ROLLOUTS + 1)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=30, limits=limits, trust_env=False
    ) as client:
        load = [*(converse(client, rollout) for rollout in rollouts), change_versions(client)]
        running = [asyncio.ensure_future(part) for part in (*load, agent.act(server.url))]
        await asyncio.sleep(lives_s)
        server.process.kill()
        await asyncio.gather(*running)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_every_acknowledged_call_survives_twenty_kills(tmp_path: Path) -> None:
    moment = random.Random(20)
    rollouts = [
        Rollout(f"r{i}", keyed=i % 2 == 0, streams=i >= 2, tools=i in (1, 2))
        for i in range(ROLLOUTS)
    ]
    agent = DemoAgent("demo")
    store, log = f"file://{tmp_path}/store", tmp_path / "log"
    for _ in range(KILLS):
        with serve_process(store, log) as server:
            asyncio.run(one_life(server, rollouts, agent, moment.uniform(0.05, 1.5)))
            assert server.process.wait(60) == -signal.SIGKILL
    with serve_process(store, log) as server:
        # The last server goes on with every conversation, then stops in order.
        before = [len(rollout.acknowledged) for rollout in rollouts]
        asyncio.run(finish(server.url, rollouts))
        turns = len(agent.acknowledged)
        asyncio.run(agent.act(server.url, turns=1))
        assert all(len(r.acknowledged) > n for r, n in zip(rollouts, before, strict=True))
        assert server.stop() == 0
    answers = [answer for rollout in rollouts for answer in rollout.acknowledged]
    assert len(answers) > KILLS
    assert turns > KILLS
    assert {"object" in body for _, body in answers} == {True, False}  # whole ones and streams
    # After a restart each turn finds the parent that an earlier process staged.
    assert {status for status, _ in answers} == {"staged"}
    assert {turn.capture for turn in agent.acknowledged} == {"staged"}
    served = {turn.response_id for turn in agent.acknowledged}
    check_store(tmp_path, [body for _, body in answers], served)
    verified = subprocess.run(
        [sys.executable, "-m", "tokenplane.tools.cli", "verify", f"{tmp_path}/store", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert json.loads(verified.stdout)["verified"] is True


async def finish(url: str, rollouts: list[Rollout]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        for rollout in rollouts:
            rollout_id, body, headers = rollout.request()
            path = f"/rollouts/{rollout_id}/v1/chat/completions"
            async with client.stream("POST", path, json=body, headers=headers) as reply:
                rollout.take(*await read_answer(reply))


def check_store(folder: Path, acknowledged: list[dict[str, Any]], served: set[str]) -> None:
    """Every acknowledged answer has one whole row that holds exactly it."""
    with open_store(f"file://{folder}/store?mode=ro") as store:
        by_response: dict[str, list[str | None]] = {}
        spanning = 0
        for key, batch in store.scan("staged"):
            row = parse_staged_row(batch, key=key)
            row.call.check_digest()
            spanning += spans_epochs(row.evidence.policy_epochs)
            assert row.ledger is not None
            by_response.setdefault(row.ledger.response_id, []).append(row.ledger.response_body)
    assert spanning > 0
    assert served <= by_response.keys()
    for body in acknowledged:
        [stored] = by_response[body["id"]]
        assert stored is not None
        whole = json.loads(stored)
        if "object" in body:
            assert whole == body
        else:
            assert text_of(whole) == text_of(body)


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])
