"""Cached prefixes round weight changes: cleared, or kept and seen, and what the rows say of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from tests.dynamic.dynamic_engines import fresh_model, open_engine
from tests.dynamic.dynamic_requests import ask, change_weights
from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.dynamic.settings import parse_settings
from tokenplane.engine_adapter.engine import GenerationResult
from tokenplane.engine_adapter.server.app import create_app
from tokenplane.engine_adapter.server.config import parse_config
from tokenplane.engine_adapter.server.parts import ServerParts, build_parts
from tokenplane.schemas.errors import ConfigError
from tokenplane.staging import TokenSource, open_store

pytestmark = pytest.mark.engine

PROMPT = tuple(3 + (7 * i) % 90 for i in range(53))
"""Three blocks of 16 and a bit."""


def run(scenario: Callable[[Any], Awaitable[None]], spec: str = "tiny", **settings: Any) -> None:
    async def bounded() -> None:
        engine = open_engine(spec, prefix_caching=True, **settings)
        try:
            async with asyncio.timeout(60):
                await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(bounded())


def hits(engine: Any) -> int:
    return int(engine._loop.core._prefix_cache_hits)


def fresh_answer(prompt: Any, changes: int) -> GenerationResult:
    """What an engine without a cache answers after so many weight changes."""
    found: list[GenerationResult] = []

    async def scenario() -> None:
        engine = open_engine()
        for change in range(changes):
            await engine.update_weights(change_weights, version=change)
        found.append(await engine.generate(ask(prompt)))
        await engine.close()

    asyncio.run(scenario())
    return found[0]


def assert_same(result: GenerationResult, other: GenerationResult) -> None:
    assert result.generated_token_ids.tolist() == other.generated_token_ids.tolist()
    assert np.abs(result.generated_log_probs - other.generated_log_probs).max() < 1e-5


@pytest.mark.parametrize("keep", [False, True])
def test_weights_that_change_without_a_new_number_forget_the_prefixes(keep: bool) -> None:
    """Neither the first version nor one that is given twice could show a stale block."""
    found: list[GenerationResult] = []

    async def scenario(engine: MegatronDynamicEngine) -> None:
        await engine.generate(ask(PROMPT))
        await engine.update_weights(change_weights, version=1)
        found.append(await engine.generate(ask(PROMPT)))
        await engine.update_weights(change_weights, version=1)
        found.append(await engine.generate(ask(PROMPT)))
        assert hits(engine) == 0

    run(scenario, keep_prefixes_at_refit=keep)
    for changes, result in enumerate(found, start=1):
        assert result.kv_cache_epochs == ((0, 1),)
        assert_same(result, fresh_answer(PROMPT, changes))


def test_the_first_version_names_the_blocks_that_are_there() -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        await engine.generate(ask(PROMPT))
        await engine.set_weight_version(1)
        again = await engine.generate(ask(PROMPT))
        assert hits(engine) == 1
        assert again.kv_cache_epochs == ((0, 1),)
        await engine.update_weights(change_weights, version=2)
        stale = await engine.generate(ask(PROMPT))
        assert stale.kv_cache_epochs == ((0, 1), (48, 2))

    run(scenario, keep_prefixes_at_refit=True)


def test_a_block_that_is_computed_again_is_of_the_new_weights() -> None:
    """Megatron computes at least two tokens of a prompt, so whole blocks at its end are remade."""

    async def scenario(engine: MegatronDynamicEngine) -> None:
        await engine.set_weight_version(1)
        await engine.generate(ask(PROMPT))
        await engine.update_weights(change_weights, version=2)
        whole = await engine.generate(ask(PROMPT[:48]))
        assert whole.kv_cache_epochs == ((0, 1), (32, 2))
        longer = await engine.generate(ask(PROMPT))
        assert longer.kv_cache_epochs == ((0, 1), (32, 2))

    run(scenario, keep_prefixes_at_refit=True)


def test_a_prefill_that_a_refit_cuts_in_two_leaves_no_block_of_mixed_weights() -> None:
    long = PROMPT * 4
    found: list[GenerationResult] = []

    async def scenario(engine: Any) -> None:
        await engine.set_weight_version(1)
        core = engine._loop.core
        stock = core.async_step

        async def first_step_then_pause() -> Any:
            result = await stock()
            if core.context.chunked_prefill_request_id >= 0:
                core.async_step = stock
                await_pause.set()
                while not go_on.is_set():
                    engine._loop.run_commands()
                    await asyncio.sleep(0.001)
            return result

        await_pause, go_on = asyncio.Event(), asyncio.Event()
        core.async_step = first_step_then_pause
        task = asyncio.create_task(engine.generate(ask(long)))
        while not await_pause.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.update_weights(change_weights, version=2)
        go_on.set()
        cut = await task
        assert [epoch for _, epoch in cut.kv_cache_epochs] == [1, 2]
        found.append(await engine.generate(ask(long)))
        assert found[0].kv_cache_epochs == ((0, 2),)

    run(scenario, chunked_prefill=True, max_step_tokens=64)
    assert_same(found[0], fresh_answer(long, 1))


def test_stale_blocks_and_later_chunks_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="keep_prefixes_at_refit with chunked_prefill"):
        parse_settings({"keep_prefixes_at_refit": True, "chunked_prefill": True})


def test_routes_of_a_cached_prefix_are_those_of_its_first_computation() -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        await engine.set_weight_version(1)
        first = await engine.generate(ask(PROMPT))
        again = await engine.generate(ask(PROMPT))
        assert hits(engine) == 1
        assert first.routing_indices is not None
        assert again.routing_indices is not None
        assert np.array_equal(first.routing_indices, again.routing_indices)
        assert len(again.routing_indices) == len(PROMPT) + 11

    run(scenario, "tiny-moe")


@asynccontextmanager
async def served(
    **settings: Any,
) -> AsyncIterator[tuple[MegatronDynamicEngine, ServerParts, httpx.AsyncClient]]:
    loaded = fresh_model("tiny")
    engine = open_engine("tiny", prefix_caching=True, **settings)
    with tempfile.TemporaryDirectory() as folder, open_store(f"file://{folder}") as store:
        parts = build_parts(
            parse_config({"model": "tiny"}),
            engine=engine,
            tokenizer=loaded.tokenizer,
            generation_config=loaded.generation_config,
            detokenize=loaded.detokenize,
            store=store,
        )
        transport = httpx.ASGITransport(create_app(parts))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield engine, parts, client
        await parts.close()


@pytest.mark.parametrize("keep", [False, True])
def test_the_rows_of_a_rollout_say_what_became_of_its_prefix_at_a_refit(keep: bool) -> None:
    async def scenario() -> None:
        async with served(keep_prefixes_at_refit=keep) as (engine, parts, client):
            await engine.set_weight_version(1)
            messages: list[dict[str, Any]] = []
            for turn in range(3):
                if turn == 2:
                    await engine.update_weights(change_weights, version=2)
                messages.append({"role": "user", "content": f"turn {turn} of many words"})
                body = {"messages": messages, "max_tokens": 30, "ignore_eos": True}
                reply = await client.post("/rollouts/r/v1/chat/completions", json=body, timeout=60)
                assert reply.status_code == 200, reply.text
                messages.append(reply.json()["choices"][0]["message"])
            assert hits(engine) == (2 if keep else 1)
            keys = parts.store.keys("staged")
            rows = TokenSource(parts.store).fetch_rows(keys)
            first, second, third = sorted(rows, key=lambda row: row.call.prev_len)
            assert first.evidence.kv_cache_epochs == second.evidence.kv_cache_epochs == ((0, 1),)
            assert third.evidence.policy_epochs == ((0, 2),)
            kv = third.evidence.kv_cache_epochs
            kept = third.call.prev_len // 16 * 16
            # A cached block holds prompt tokens only: those of the turn before, at their most.
            assert [epoch for _, epoch in kv] == ([1, 2] if keep else [2])
            assert 0 < kv[-1][0] <= kept if keep else kv == ((0, 2),)
            word = "kept" if keep else "cleared"
            for row in rows:
                assert row.evidence.engine is not None
                assert f"legacy scheduling, prefix cache {word} at refit" in row.evidence.engine

    asyncio.run(scenario())
