"""A server in this process: over the tiny Megatron model, or over a script, with an HTTP client."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from tokenplane.engine_adapter.cpu_engine import MegatronCpuEngine
from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.model_identity import LoadedModel
from tokenplane.engine_adapter.model_source import load_model
from tokenplane.engine_adapter.scripted_engine import Script, ScriptedEngine
from tokenplane.engine_adapter.server_app import create_app
from tokenplane.engine_adapter.server_config import parse_config
from tokenplane.engine_adapter.server_parts import ServerParts, build_parts
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
            yield Served(parts, client)
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


TOOLS: list[dict[str, Any]] = [
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
