"""A server in this process: over the tiny Megatron model, or over a script, with an HTTP client."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine
from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.engine_adapter.scripted_engine import Script, ScriptedEngine
from tokenplane.engine_adapter.server.app import create_app
from tokenplane.engine_adapter.server.config import parse_config
from tokenplane.engine_adapter.server.parts import ServerParts, build_parts
from tokenplane.schemas.staged_row import STAGED_PARTITION, StagedRow, parse_staged_row
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore

WEIGHT_VERSION = 7

type Answer = list[tuple[int, float]]


@functools.cache
def tiny() -> LoadedModel:
    """The tiny model for its tokenizer and identity; no engine computes with it."""
    return load_model("tiny")


def encode(text: str) -> list[int]:
    """Ids of ``text`` by the tiny tokenizer; special-token strings become their ids."""
    return [int(i) for i in tiny().tokenizer(text, add_special_tokens=False)["input_ids"]]


def say(text: str, *, end: str = "<|im_end|>") -> Answer:
    """An answer that spells ``text`` and ends its turn."""
    ids = encode(text + end)
    return [(token, -0.125 * (1 + at % 7)) for at, token in enumerate(ids)]


@dataclass(frozen=True)
class Served:
    """One server and what a test looks at."""

    parts: ServerParts
    app: FastAPI
    client: httpx.AsyncClient

    @property
    def store(self) -> StagingStore:
        return self.parts.store

    @property
    def script(self) -> ScriptedEngine:
        assert isinstance(self.parts.engine, ScriptedEngine)
        return self.parts.engine

    async def chat(
        self, messages: Sequence[dict[str, Any]], *, rollout: str | None = "r1", **body: Any
    ) -> httpx.Response:
        """One chat completion; headers through ``headers=``."""
        headers = body.pop("headers", {})
        base = "" if rollout is None else f"/rollouts/{rollout}"
        return await self.client.post(
            f"{base}/v1/chat/completions", json={"messages": messages, **body}, headers=headers
        )

    async def failures(self, rollout: str = "r1") -> list[str]:
        """Codes of the rollout's failures, as the control route lists them."""
        reply = await self.client.get(f"/rollouts/{rollout}/failures")
        return [failure["code"] for failure in reply.json()["failures"]]

    def rows(self, rollout: str = "r1") -> list[StagedRow]:
        """The rollout's staged rows in write order, from the store itself."""
        found = self.store.scan(STAGED_PARTITION, prefix=f"{rollout}/")
        return [parse_staged_row(batch, key=key) for key, batch in found]


@asynccontextmanager
async def serving(
    engine: Engine,
    *,
    store: StagingStore | None = None,
    control_token: str | None = None,
    api_key: str | None = None,
    version: int | None = WEIGHT_VERSION,
    tokenizer: Any = None,
    **config: Any,
) -> AsyncIterator[Served]:
    """A server over ``engine``; a store that is given stays open."""
    model = tiny()
    own = store is None
    held = open_store("memory:") if store is None else store
    if version is not None:
        await engine.set_weight_version(version)
    parts = build_parts(
        parse_config({"model": "tiny"} | config),
        engine=engine,
        tokenizer=tokenizer or model.tokenizer,
        generation_config=model.generation_config,
        detokenize=model.detokenize,
        store=held,
    )
    app = create_app(parts, control_token=control_token, api_key=api_key)
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield Served(parts, app, client)
    finally:
        await parts.close()
        if own:
            held.close()


def tiny_engine(**limits: int) -> MegatronCpuEngine:
    """A real engine over a tiny model of its own."""
    model = load_model("tiny")
    return MegatronCpuEngine(model.model, model.info, model.detokenize, **limits)


def scripted(script: Script | Iterable[Answer], *, step_s: float = 0.0) -> ScriptedEngine:
    """An engine that replays; answers are given in turn."""
    model = tiny()
    if not callable(script):
        left = iter(script)
        return ScriptedEngine(
            model.info, lambda _request: next(left), model.detokenize, step_s=step_s
        )
    return ScriptedEngine(model.info, script, model.detokenize, step_s=step_s)


class HandDrivenStream:
    """One streamed chat by the ASGI protocol itself: the in-process HTTP client hands over whole
    bodies only, and cannot go away in the middle of one."""

    def __init__(self, served: Served, rollout: str = "r1", **body: Any) -> None:
        self._app: Any = served.app
        self._path = f"/rollouts/{rollout}/v1/chat/completions"
        self._body: bytes | None = json.dumps(
            {"messages": [user("a")], "stream": True} | body
        ).encode()
        self._pieces: list[str] = []
        self._whole = True
        self.headers = [(b"content-type", b"application/json")]
        self.gone = asyncio.Event()
        """Set it to go away."""

    def hold_body(self) -> None:
        """Send the first half of the body only."""
        assert self._body is not None
        self._body, self._whole = self._body[: len(self._body) // 2], False

    @property
    def text(self) -> str:
        """What has been received so far."""
        return "".join(self._pieces)

    @property
    def content(self) -> str:
        """The answer's text so far."""
        chunks = [json.loads(event) for event in events_of(self.text) if event != "[DONE]"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk.get("choices")]
        return "".join(delta.get("content") or "" for delta in deltas)

    async def run(self) -> None:
        """Until the server has ended the response."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": self.headers,
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": not self._whole}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self._pieces.append(message["body"].decode())


def text_of(reply: httpx.Response) -> str:
    """The content of a chat answer."""
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def message_of(reply: httpx.Response) -> dict[str, Any]:
    """The message of a chat answer, as an agent echoes it."""
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def whole(chain: Sequence[StagedRow]) -> np.ndarray:
    """int32[cum_len]: all tokens of a chain of rows."""
    return np.concatenate([row.call.token_ids_delta for row in chain])


def events_of(text: str) -> list[str]:
    """The data of every server-sent event, comments left out."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            },
        },
    }
]
