"""What the rows say of refits: stale prefixes, evictions, routes, and settings that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.dynamic.dynamic_engines import fresh_model, open_engine
from tests.dynamic.dynamic_requests import ask, change_weights
from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.dynamic.settings import DynamicSettings, parse_settings
from tokenplane.engine_adapter.engine import GenerationResult
from tokenplane.schemas.errors import ConfigError

pytestmark = pytest.mark.engine

PROMPT = tuple(3 + (7 * i) % 90 for i in range(53))
"""Three blocks of 16 and a bit."""


def run(scenario: Callable[[Any], Awaitable[None]], spec: str = "tiny", **settings: Any) -> None:
    async def bounded() -> None:
        engine = open_engine(spec, **settings)
        try:
            async with asyncio.timeout(60):
                await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(bounded())


async def refit(engine: MegatronDynamicEngine) -> tuple[GenerationResult, GenerationResult]:
    """The same prompt twice under version 1, then once under version 2."""
    await engine.set_weight_version(1)
    await engine.generate(ask(PROMPT))
    again = await engine.generate(ask(PROMPT))
    await engine.update_weights(change_weights, version=2)
    return again, await engine.generate(ask(PROMPT))


def test_cached_prefixes_are_cleared_at_a_refit() -> None:
    found: list[np.ndarray] = []

    async def cached(engine: MegatronDynamicEngine) -> None:
        assert engine.info.engine.endswith("(legacy scheduling, prefix cache cleared at refit)")
        again, after = await refit(engine)
        assert again.kv_cache_epochs == ((0, 1),)
        assert after.kv_cache_epochs == ((0, 2),)
        found.append(after.generated_log_probs)

    async def without(engine: MegatronDynamicEngine) -> None:
        found.append((await refit(engine))[1].generated_log_probs)

    run(cached, prefix_caching=True)
    run(without)
    assert np.abs(found[0] - found[1]).max() < 1e-5


def test_a_kept_stale_prefix_shows_in_the_evidence() -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        assert "prefix cache kept at refit" in engine.info.engine
        _, after = await refit(engine)
        assert after.policy_epochs == ((0, 2),)
        assert after.kv_cache_epochs == ((0, 1), (48, 2))

    run(scenario, prefix_caching=True, keep_prefixes_at_refit=True)


def test_clearing_leaves_live_requests_whole_and_frees_every_block() -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        await engine.set_weight_version(1)
        tasks = [asyncio.create_task(engine.generate(ask(PROMPT, max_tokens=60))) for _ in range(4)]
        while engine.stats().generated_tokens < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.set_weight_version(2)
        later = await engine.generate(ask(PROMPT))
        for result in await asyncio.gather(*tasks):
            assert len(result.generated_token_ids) == 60
        assert later.kv_cache_epochs == ((0, 2),)
        loop: Any = engine._loop
        allocator = loop.core.context.kv_block_allocator
        allocator.evict_lru_blocks(int(allocator.get_evictable_block_count()))
        assert allocator.total_avail == allocator.total_count - 1

    run(scenario, prefix_caching=True)


def test_a_request_that_ran_out_of_memory_is_evicted_and_comes_back_exact() -> None:
    """Room for one request at its longest and a bit: others are evicted and computed again."""
    alone: list[list[int]] = []

    def asks() -> list[Any]:
        return [ask([5 + i, 9, 17], max_tokens=90, seed=i, temperature=1.0) for i in range(4)]

    async def reference(engine: MegatronDynamicEngine) -> None:
        results = [await engine.generate(request) for request in asks()]
        alone.extend(result.generated_token_ids.tolist() for result in results)

    async def scarce(engine: MegatronDynamicEngine) -> None:
        await engine.set_weight_version(1)
        results = await asyncio.gather(*(engine.generate(request) for request in asks()))
        assert [r.generated_token_ids.tolist() for r in results] == alone
        assert sum(r.num_evictions for r in results) == engine.stats().evictions > 0
        for result in results:
            assert len(result.generated_log_probs) == 90
            assert result.kv_cache_epochs == ((0, 1),)
            evicted = result.num_evictions > 0
            assert (result.routing_indices is None) == evicted

    run(reference, "tiny-moe", max_sequence_length=96)
    block = 2 * 2 * 16 * 2 * 16 * 4
    run(scarce, "tiny-moe", max_sequence_length=96, max_kv_bytes=15 * block)


def test_routes_cover_every_input_position() -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        result = await engine.generate(ask(PROMPT, max_tokens=20))
        routes = result.routing_indices
        assert routes is not None
        assert routes.shape == (len(PROMPT) + 19, 2, 2)
        assert routes.dtype == np.int16
        assert not routes.flags.writeable
        assert routes.min() >= 0
        assert routes.max() < 4

    run(scenario, "tiny-moe")


def test_chunked_prefill_gives_the_same_answer() -> None:
    found: list[GenerationResult] = []

    async def scenario(engine: MegatronDynamicEngine) -> None:
        results = await asyncio.gather(
            engine.generate(ask(PROMPT * 4, temperature=1.0, seed=3)),
            engine.generate(ask([5, 9], temperature=1.0, seed=4)),
        )
        found.extend(results)

    run(scenario)
    run(scenario, chunked_prefill=True, max_step_tokens=64)
    for whole, chunked in zip(found[:2], found[2:], strict=True):
        assert whole.generated_token_ids.tolist() == chunked.generated_token_ids.tolist()
        gap = np.abs(whole.generated_log_probs - chunked.generated_log_probs).max()
        assert gap < 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduling": "async"}, "scheduling"),
        ({"block_size": 3}, "block_size"),
        ({"max_live_requests": 0}, "max_live_requests"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(settings)


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_kv_bytes"):
        open_engine(max_kv_bytes=1000)
    with pytest.raises(ConfigError, match="max_sequence_length"):
        open_engine(max_sequence_length=10**6)
    loaded = fresh_model("tiny")
    with pytest.raises(ConfigError, match="given twice"):
        MegatronDynamicEngine(
            loaded.model,
            loaded.info,
            settings=DynamicSettings(max_sequence_length=64),
            megatron_extra={"max_requests": 3},
        )


def test_a_model_that_is_split_over_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = fresh_model("tiny").model
    monkeypatch.setattr(model.config, "tensor_model_parallel_size", 2)
    with pytest.raises(ConfigError, match="split over ranks"):
        open_engine()
