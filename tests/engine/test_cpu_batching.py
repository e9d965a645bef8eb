"""How the CPU engine shares its steps: chunks, queues, budgets, and prefill under a refit."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny_models import TinyEngines
from tokenplane.engine_adapter.contract_suite.suite import EngineSuite, until
from tokenplane.engine_adapter.engine import Engine

pytestmark = pytest.mark.engine


class TestBatching(TinyEngines, EngineSuite):
    long_prompt = tuple(3 + (11 * i) % 300 for i in range(150))

    @pytest.mark.parametrize("max_step_tokens", [1, 7, 64, 149, 150, 4096])
    def test_chunked_prefill_gives_the_same_answer(self, max_step_tokens: int) -> None:
        async def scenario(engine: Engine) -> None:
            result = await engine.generate(self.request(self.long_prompt))
            reference = self.reference_log_probs(engine, result)
            assert np.abs(reference - result.generated_log_probs).max() <= self.logprob_tolerance
            chunks = -(-len(self.long_prompt) // max_step_tokens)
            assert engine.stats().steps == chunks + 23
            assert engine.stats().computed_tokens == len(self.long_prompt) + 23

        self.run(scenario, max_step_tokens=max_step_tokens, max_live_requests=1)

    def test_a_long_prompt_does_not_stop_those_who_decode(self) -> None:
        async def scenario(engine: Engine) -> None:
            order: list[str] = []
            await engine.pause()
            short = asyncio.create_task(
                engine.generate(
                    self.request(max_tokens=10, on_tokens=lambda _: order.append("short"))
                )
            )
            long = asyncio.create_task(
                engine.generate(
                    self.request(
                        self.long_prompt, max_tokens=2, on_tokens=lambda _: order.append("long")
                    )
                )
            )
            await until(lambda: engine.stats().waiting_requests == 2)
            await engine.unpause()
            await asyncio.gather(short, long)
            assert order[:9] == ["short"] * 9

        self.run(scenario, max_step_tokens=10, max_live_requests=4)

    def test_requests_beyond_the_limit_wait_in_order(self) -> None:
        async def scenario(engine: Engine) -> None:
            started: list[int] = []

            def first(index: int) -> Any:
                return lambda _: started.append(index) if index not in started else None

            await engine.pause()
            tasks = []
            for index in range(6):
                request = self.request(max_tokens=5, on_tokens=first(index))
                tasks.append(asyncio.create_task(engine.generate(request)))
                await until(lambda n=index: engine.stats().waiting_requests == n + 1)  # type: ignore[misc]
            await engine.unpause()
            results = await asyncio.gather(*tasks)
            assert started == list(range(6))
            # Two at a time, five steps each.
            assert engine.stats().steps == 15
            assert results[5].queue_s >= results[0].prefill_s

        self.run(scenario, max_live_requests=2)

    def test_the_cache_budget_delays_and_never_fails(self) -> None:
        async def scenario(engine: Engine) -> None:
            peak = 0

            def watch(_: np.ndarray) -> None:
                nonlocal peak
                peak = max(peak, engine.stats().kv_bytes)

            results = await asyncio.gather(
                *(
                    engine.generate(self.request(self.long_prompt, max_tokens=60, on_tokens=watch))
                    for _ in range(5)
                )
            )
            assert len({r.generated_token_ids.tobytes() for r in results}) == 1
            assert 0 < peak <= 256 * 512

        # 512 bytes of cache per token: room for one such request, not for two.
        self.run(scenario, max_sequence_length=256, max_kv_bytes=256 * 512)

    def test_a_refit_within_a_prefill(self) -> None:
        """Part of the prompt's cache is of the old weights, and the boundary says which part."""

        async def scenario(engine: Engine) -> None:
            await engine.set_weight_version(1)
            await engine.pause()
            task = asyncio.create_task(
                engine.generate(self.request(self.long_prompt * 4, max_tokens=4))
            )
            await until(lambda: engine.stats().waiting_requests == 1)
            await engine.unpause()
            await until(lambda: engine.stats().kv_tokens >= 8)
            await engine.pause()
            computed = engine.stats().kv_tokens
            await engine.update_weights(self.change_weights, version=2)
            await engine.unpause()
            result = await task
            last = len(self.long_prompt * 4) - 1
            assert 8 <= computed < last
            assert result.policy_epochs == ((0, 1), (last, 2))
            assert result.kv_cache_epochs == ((0, 1), (computed, 2))

        self.run(scenario, max_step_tokens=2, max_live_requests=1)

    def test_times_add_up(self) -> None:
        async def scenario(engine: Engine) -> None:
            loop = asyncio.get_running_loop()
            began = loop.time()
            result = await engine.generate(self.request(self.long_prompt))
            wall = loop.time() - began
            assert 0 < result.prefill_s + result.decode_s + result.queue_s <= wall
            assert 0 < engine.stats().step_s <= wall

        self.run(scenario)
