"""What the steps of the GPU check share: the plan, an engine, a request, a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import torch

from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.dynamic.gpu_model import GraphScope, gpu_twin
from tokenplane.engine_adapter.dynamic.settings import DynamicSettings
from tokenplane.engine_adapter.engine import Engine, GenerationRequest, SamplingParams
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.server.app import create_app
from tokenplane.engine_adapter.server.config import parse_config
from tokenplane.engine_adapter.server.parts import ServerParts, build_parts
from tokenplane.staging import open_store

MAX_LOGPROB_GAP = 1e-4


_opened: list[MegatronDynamicEngine] = []


class CheckError(Exception):
    """A check found something wrong; the message holds what was measured."""


@dataclass(frozen=True)
class Plan:
    """How much each step does."""

    rehearse: bool
    answer_tokens: int
    pairs: int
    graphs: GraphScope
    deadline_s: float
    """For everything, in seconds from ``began_s`` on: the last step measures less where less is
    left."""
    switch_interval_s: float = 0.0005
    loads: tuple[str, ...] = ("spread", "in_step")
    """Of the throughput: see ``gpu_check_speed.LOADS``."""
    began_s: float = field(default_factory=time.monotonic)

    def model(self, loaded: LoadedModel) -> torch.nn.Module:
        """Where the tiny model runs."""
        return loaded.model if self.rehearse else gpu_twin(loaded.model)

    def until(self, limit_s: float) -> Plan:
        """The same, with a deadline ``limit_s`` seconds from now."""
        return replace(self, deadline_s=limit_s, began_s=time.monotonic())

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.began_s + self.deadline_s - time.monotonic()


def engine_over(model: torch.nn.Module, loaded: LoadedModel, **settings: Any) -> Any:
    """A dynamic engine, sized for these checks unless told otherwise."""
    given = {"max_sequence_length": 2048, "max_live_requests": 64, "block_tokens": 256} | settings
    engine = MegatronDynamicEngine(
        model, loaded.info, loaded.detokenize, settings=DynamicSettings(**given)
    )
    _opened.append(engine)
    return engine


async def close_engines() -> None:
    """End what ``engine_over`` made: a step that failed must not stand in another's way."""
    while _opened:
        await _opened.pop().close()


def ask(name: str, ids: list[int], **sampling: Any) -> GenerationRequest:
    """A request that ignores end ids."""
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | sampling))
    return GenerationRequest(name, np.array(ids, dtype=np.int32), params)


async def gather(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """All answers, asked for at once."""
    tasks = [engine.generate(ask(f"p{i}", ids, **sampling)) for i, ids in enumerate(prompts)]
    return list(await asyncio.gather(*tasks))


async def tokens_made(engine: Engine, total: int, call: asyncio.Future[Any]) -> None:
    """Until the engine has generated ``total`` tokens.

    Raises: CheckError if ``call``, which is to make them, ended before; or what it raised.
    """
    while engine.stats().generated_tokens < total:
        if call.done():
            raise CheckError(f"the call ended too early, with {call.result()}")
        await asyncio.sleep(0.001)


@asynccontextmanager
async def server_over(
    engine: Engine, loaded: LoadedModel, url: str, *, version: int | None = 1
) -> AsyncIterator[tuple[ServerParts, httpx.AsyncClient]]:
    """The OpenAI server in this process, over a store at ``url``; sets the ``version`` given."""
    store = open_store(url)
    parts = build_parts(
        parse_config({"model": "tiny", "max_in_flight": 256}),
        engine=engine,
        tokenizer=loaded.tokenizer,
        generation_config=loaded.generation_config,
        detokenize=loaded.detokenize,
        store=store,
    )
    if version is not None:
        await engine.set_weight_version(version)
    transport = httpx.ASGITransport(create_app(parts))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://server", timeout=120
    ) as client:
        try:
            yield parts, client
        finally:
            await parts.close()
            store.close()


def change_weights(model: torch.nn.Module) -> None:
    """Another policy, in place."""
    for index, parameter in enumerate(model.parameters()):
        parameter.mul_(1.02 if index % 2 else 0.97)
