"""The contract of an engine's states, versions and weight updates (see ``testing``)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from tokenplane.engine_adapter.contract_suite.suite import WAIT_S, EngineSuite, until
from tokenplane.engine_adapter.engine import Engine, EngineState
from tokenplane.schemas.errors import (
    DeadlineError,
    EngineStateError,
    RequestCancelledError,
    RequestRejectedError,
)


class LifecycleContract(EngineSuite):
    """Pause, suspend, refit, close: between two steps, whole or not at all, with evidence."""

    @pytest.mark.parametrize("mode", ["persist", "recompute"])
    def test_refit_opens_a_boundary_between_old_and_new_tokens(self, mode: Any) -> None:
        """Tokens up to the boundary come from the old weights, those after it from the new."""

        async def scenario(engine: Engine) -> None:
            await engine.set_weight_version(1)
            before = await engine.generate(self.request(max_tokens=200))
            made = engine.stats().generated_tokens
            task = asyncio.create_task(engine.generate(self.request(max_tokens=200)))
            await until(lambda: engine.stats().generated_tokens >= made + 8)
            await engine.pause()
            await engine.suspend(mode)
            await engine.update_weights(self.change_weights, version=2)
            await engine.resume()
            await engine.unpause()
            result = await task
            (start, old), (boundary, new) = result.policy_epochs
            assert (start, old, new) == (0, 1, 2)
            first = len(self.prompt)
            assert first + 8 <= boundary + 1 < first + 200
            kept = boundary + 1 - first
            same = result.generated_token_ids[:kept] == before.generated_token_ids[:kept]
            assert same.all()
            old_log_probs = before.generated_log_probs[:kept]
            gap = np.abs(result.generated_log_probs[:kept] - old_log_probs).max()
            assert gap <= self.logprob_tolerance
            reference = self.reference_log_probs(engine, result)[kept:]
            gap = np.abs(reference - result.generated_log_probs[kept:]).max()
            if mode == "recompute":
                assert result.kv_cache_epochs == ((0, 2),)
                assert result.num_evictions == 1
                assert gap <= self.logprob_tolerance
            else:
                assert result.kv_cache_epochs == result.policy_epochs
                assert result.num_evictions == 0
                assert gap > self.logprob_tolerance, "the cache of old weights shows"

        self.run(scenario)

    def test_several_changes_are_all_recorded(self) -> None:
        async def scenario(engine: Engine) -> None:
            await engine.set_weight_version(1)
            await engine.pause()
            task = asyncio.create_task(engine.generate(self.request()))
            await until(lambda: engine.stats().waiting_requests == 1)
            await engine.set_weight_version(1)
            await engine.set_weight_version(2)
            await engine.unpause()
            result = await task
            assert result.policy_epochs == ((0, 1), (len(self.prompt) - 1, 2))
            assert result.kv_cache_epochs[-1][1] == 2

        self.run(scenario)

    def test_pause_stops_and_unpause_goes_on(self) -> None:
        async def scenario(engine: Engine) -> None:
            whole = await engine.generate(self.request(max_tokens=100))
            made = engine.stats().generated_tokens
            task = asyncio.create_task(engine.generate(self.request(max_tokens=100)))
            await until(lambda: engine.stats().generated_tokens > made)
            await engine.pause()
            assert engine.state() is EngineState.PAUSED
            frozen = engine.stats()
            await asyncio.sleep(0.05)
            assert engine.stats() == frozen
            await engine.unpause()
            result = await task
            assert result.generated_token_ids.tolist() == whole.generated_token_ids.tolist()

        self.run(scenario)

    def test_transitions(self) -> None:
        async def scenario(engine: Engine) -> None:
            async def refused(call: Awaitable[None], state: EngineState) -> None:
                with pytest.raises(EngineStateError, match=state.value):
                    await call
                assert engine.state() is state

            await engine.unpause()
            await refused(engine.suspend("persist"), EngineState.RUNNING)
            await refused(engine.resume(), EngineState.RUNNING)
            await engine.pause()
            await engine.pause()
            await engine.resume()
            await engine.suspend("recompute")
            await engine.suspend("recompute")
            await refused(engine.suspend("persist"), EngineState.SUSPENDED)
            await refused(engine.pause(), EngineState.SUSPENDED)
            await refused(engine.unpause(), EngineState.SUSPENDED)
            await engine.resume()
            assert engine.state() is EngineState.PAUSED
            await engine.unpause()
            assert engine.state() is EngineState.RUNNING
            await engine.close()
            assert engine.state() is EngineState.CLOSED
            await engine.close()
            for call in (engine.pause(), engine.unpause(), engine.set_weight_version(1)):
                await refused(call, EngineState.CLOSED)
            with pytest.raises(EngineStateError, match="closed"):
                await engine.generate(self.request())

        self.run(scenario)

    @pytest.mark.parametrize("waiting", [False, True])
    def test_close_answers_everybody(self, waiting: bool) -> None:
        async def scenario(engine: Engine) -> None:
            if waiting:
                await engine.pause()
            tasks = [
                asyncio.create_task(engine.generate(self.request(max_tokens=5000)))
                for _ in range(3)
            ]
            stats = engine.stats
            await until(lambda: stats().live_requests + stats().waiting_requests == 3)
            await engine.close()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, RequestCancelledError)
            assert engine.stats().kv_bytes == 0

        self.run(scenario, max_sequence_length=6000)

    def test_failed_update_leaves_weights_and_version(self) -> None:
        async def scenario(engine: Engine) -> None:
            await engine.set_weight_version(3)
            before = await engine.generate(self.request())

            def half(model: Any) -> None:
                next(iter(model.parameters())).zero_()
                raise ValueError("the transfer broke off")

            with pytest.raises(ValueError, match="broke off"):
                await engine.update_weights(half, version=4)
            assert engine.weight_version() == 3
            after = await engine.generate(self.request())
            assert after.policy_epochs == ((0, 3),)
            assert after.generated_token_ids.tolist() == before.generated_token_ids.tolist()
            assert after.generated_log_probs.tobytes() == before.generated_log_probs.tobytes()
            await engine.update_weights(self.change_weights, version=4)
            assert engine.weight_version() == 4
            changed = await engine.generate(self.request())
            assert changed.generated_log_probs.tobytes() != before.generated_log_probs.tobytes()

        self.run(scenario)

    def test_a_control_call_out_of_time_does_not_take_effect(self) -> None:
        async def scenario(engine: Engine) -> None:
            begun, go_on = threading.Event(), threading.Event()

            def slow(_model: Any) -> None:
                begun.set()
                go_on.wait(WAIT_S)

            update = asyncio.create_task(engine.update_weights(slow, version=1))
            try:
                await until(begun.is_set)
                with pytest.raises(DeadlineError):
                    await engine.pause(timeout_s=0.05)
                with pytest.raises(DeadlineError):
                    await engine.set_weight_version(9, timeout_s=0.05)
            finally:
                go_on.set()
            await update
            await engine.set_weight_version(2)
            assert engine.state() is EngineState.RUNNING
            assert engine.weight_version() == 2
            result = await engine.generate(self.request())
            assert result.policy_epochs == ((0, 2),)

        self.run(scenario)

    @pytest.mark.parametrize("version", [-1, True, "1", 1.0])
    def test_versions_are_integers_from_zero(self, version: Any) -> None:
        async def scenario(engine: Engine) -> None:
            with pytest.raises(RequestRejectedError, match="version"):
                await engine.set_weight_version(version)
            with pytest.raises(RequestRejectedError, match="version"):
                await engine.update_weights(self.change_weights, version=version)

        self.run(scenario)
