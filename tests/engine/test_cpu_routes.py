"""Router indices of a mixture-of-experts model: every input position, or none at all."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from megatron.core.transformer.moe.router import TopKRouter

from tests.engine.tiny_models import TinyEngines, full_forward
from tokenplane.engine_adapter.contract_suite.suite import EngineSuite, until
from tokenplane.engine_adapter.engine import Engine
from tokenplane.schemas.errors import RequestRejectedError

pytestmark = pytest.mark.engine


class TestRoutes(TinyEngines, EngineSuite):
    spec = "tiny-moe"

    def reference_routes(self, ids: np.ndarray) -> np.ndarray:
        """int16[n, L, K], experts of a position in ascending order."""
        full_forward(self.loaded.model, ids)
        routers: list[Any] = [m for m in self.loaded.model.modules() if isinstance(m, TopKRouter)]
        taken = [r.router_replay.get_recorded_indices().numpy() for r in routers]
        return np.sort(np.stack(taken, axis=1), axis=-1).astype(np.int16)

    @pytest.mark.parametrize("max_step_tokens", [16, 512])
    def test_routes_of_a_batch_match_a_forward_without_cache(self, max_step_tokens: int) -> None:
        async def scenario(engine: Engine) -> None:
            prompts = [[3 + (7 * i + j) % 90 for j in range(1 + 9 * i)] for i in range(6)]
            results = await asyncio.gather(*(engine.generate(self.request(p)) for p in prompts))
            for result in results:
                routes = result.routing_indices
                assert routes is not None
                ids = np.concatenate([result.prompt_token_ids, result.generated_token_ids])
                assert routes.dtype == np.int16
                assert routes.shape == (len(ids) - 1, 2, 2)
                assert routes.flags.c_contiguous
                assert not routes.flags.writeable
                reference = self.reference_routes(ids[:-1])
                assert np.array_equal(np.sort(routes, axis=-1), reference)
                assert len(np.unique(routes)) == 4

        self.run(scenario, max_step_tokens=max_step_tokens, max_live_requests=8)

    @pytest.mark.parametrize("max_step_tokens", [16, 512])
    def test_routes_begin_where_they_are_asked_for(self, max_step_tokens: int) -> None:
        """A growing rollout ships each route once: what precedes is in the rows before."""

        async def scenario(engine: Engine) -> None:
            prompt = [3 + j % 90 for j in range(50)]
            for start in (0, 1, 15, 16, 17, 49, 50):
                request = dataclasses.replace(self.request(prompt), routes_from=start)
                result = await engine.generate(request)
                routes = result.routing_indices
                assert routes is not None
                assert result.routing_start == start
                ids = np.concatenate([result.prompt_token_ids, result.generated_token_ids])
                reference = self.reference_routes(ids[:-1])[start:]
                assert np.array_equal(np.sort(routes, axis=-1), reference)
            for start in (-1, 51):
                request = dataclasses.replace(self.request(prompt), routes_from=start)
                with pytest.raises(RequestRejectedError, match="routes_from"):
                    await engine.generate(request)

        self.run(scenario, max_step_tokens=max_step_tokens, max_live_requests=8)

    @pytest.mark.parametrize("mode", ["persist", "recompute"])
    def test_routes_are_unknown_after_a_recompute(self, mode: Any) -> None:
        async def scenario(engine: Engine) -> None:
            task = asyncio.create_task(engine.generate(self.request(max_tokens=200)))
            await until(lambda: engine.stats().generated_tokens > 5)
            await engine.pause()
            await engine.suspend(mode)
            await engine.resume()
            await engine.unpause()
            result = await task
            if mode == "recompute":
                assert result.routing_indices is None
                assert result.num_evictions == 1
            else:
                assert result.routing_indices is not None
                assert len(result.routing_indices) == len(self.prompt) + 199
            fresh = await engine.generate(self.request())
            assert fresh.routing_indices is not None

        self.run(scenario)
