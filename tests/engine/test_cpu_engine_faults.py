"""The CPU engine under faults: what fails, who is told, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.tiny_models import TinyEngines
from tokenplane.engine_adapter.contract_suite.suite import EngineSuite, until
from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine
from tokenplane.engine_adapter.engine import Engine, EngineState
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.schemas.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    EngineStateError,
    RequestRejectedError,
)

pytestmark = pytest.mark.engine


class TestFaults(TinyEngines, EngineSuite):
    def break_forward(self, layer: int = 1) -> Callable[[], None]:
        """Make the model's forward raise in the middle of the layers; gives the repair."""

        def broken(*_: object) -> None:
            raise RuntimeError("a kernel failed")

        handle = self.loaded.model.decoder.layers[layer].register_forward_pre_hook(broken)
        return handle.remove  # type: ignore[no-any-return]

    def test_a_failed_step_ends_the_engine_and_answers_everybody(self) -> None:
        async def scenario(engine: Engine) -> None:
            await engine.pause()
            tasks = [asyncio.create_task(engine.generate(self.request())) for _ in range(3)]
            await until(lambda: engine.stats().waiting_requests == 3)
            self.break_forward()
            await engine.unpause()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, EngineDeadError)
                assert "a kernel failed" in str(outcome)
            assert engine.state() is EngineState.DEAD
            calls: list[Callable[[], Awaitable[object]]] = [
                engine.pause,
                engine.unpause,
                engine.resume,
                lambda: engine.set_weight_version(1),
                lambda: engine.generate(self.request()),
            ]
            for call in calls:
                with pytest.raises(EngineDeadError, match="a kernel failed"):
                    await call()
            stats = engine.stats()
            assert (stats.failed_requests, stats.live_requests, stats.kv_bytes) == (3, 0, 0)
            await engine.close()
            assert engine.state() is EngineState.CLOSED

        self.run(scenario)

    def test_weights_that_cannot_be_taken_back_end_the_engine(self) -> None:
        """Commands queued behind the failed update are answered too."""
        shared = torch.zeros(1)

        async def scenario(engine: Engine) -> None:
            # torch refuses to write into a tensor whose elements overlap: this one stays changed.
            def half(model: Any) -> None:
                shared.fill_(1)
                raise ValueError("the transfer broke off")

            self.loaded.model.register_buffer("overlapping", shared.expand(3))
            outcomes = await asyncio.gather(
                engine.update_weights(half, version=1),
                engine.set_weight_version(5),
                engine.pause(),
                return_exceptions=True,
            )
            assert all(isinstance(outcome, EngineDeadError) for outcome in outcomes), outcomes
            assert all("the transfer broke off" in str(outcome) for outcome in outcomes)
            assert engine.weight_version() is None
            assert engine.state() is EngineState.DEAD

        self.run(scenario)

    def test_weights_that_give_nan_are_refused(self) -> None:
        async def scenario(engine: Engine) -> None:
            def poison(model: Any) -> None:
                list(model.parameters())[-1].view(-1)[3] = torch.nan

            with pytest.raises(EngineError, match="not finite"):
                await engine.update_weights(poison, version=1)
            assert engine.weight_version() is None
            assert len((await engine.generate(self.request())).generated_token_ids) == 24

        self.run(scenario)

    def test_logits_that_are_not_finite_fail_their_request_alone(self) -> None:
        async def scenario(engine: Engine) -> None:
            # The embedding of one id overflows in the first norm; no other request has that id.
            with torch.no_grad():
                self.loaded.model.embedding.word_embeddings.weight[250] = torch.inf
            good, bad = await asyncio.gather(
                engine.generate(self.request(stop_token_ids=(250,))),
                engine.generate(self.request([5, 250])),
                return_exceptions=True,
            )
            assert isinstance(bad, EngineError)
            assert "not finite" in str(bad)
            assert not isinstance(good, BaseException)
            assert engine.state() is EngineState.RUNNING
            assert engine.stats().failed_requests == 1

        self.run(scenario)

    def test_a_detokenizer_that_raises_fails_its_request_alone(self) -> None:
        async def scenario(engine: Engine) -> None:
            good, bad = await asyncio.gather(
                engine.generate(self.request()),
                engine.generate(self.request(stop_strings=("x",))),
                return_exceptions=True,
            )
            assert isinstance(bad, ZeroDivisionError)
            assert not isinstance(good, BaseException)

        loaded = load_model("tiny")
        self.loaded = loaded
        engine = MegatronCpuEngine(loaded.model, loaded.info, lambda ids: "x"[1 // 0])

        async def bounded() -> None:
            async with asyncio.timeout(30):
                await scenario(engine)
                await engine.close()

        asyncio.run(bounded())

    def test_stop_strings_need_text(self) -> None:
        loaded = load_model("tiny")
        engine = MegatronCpuEngine(loaded.model, loaded.info)

        async def scenario() -> None:
            with pytest.raises(RequestRejectedError, match="stop_strings"):
                await engine.generate(self.request(stop_strings=("x",)))
            await engine.close()

        asyncio.run(scenario())

    def test_close_while_a_step_hangs_raises_in_time(self) -> None:
        async def scenario() -> None:
            engine = self.make_engine()
            assert isinstance(engine, MegatronCpuEngine)
            release = asyncio.Event()
            loop = asyncio.get_running_loop()
            inside = asyncio.Event()

            def stuck(_ids: np.ndarray) -> None:
                loop.call_soon_threadsafe(inside.set)
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)

            task = asyncio.create_task(engine.generate(self.request(on_tokens=stuck)))
            await inside.wait()
            with pytest.raises(DeadlineError):
                await engine.pause(timeout_s=0.05)
            with pytest.raises(DeadlineError):
                await engine.close(timeout_s=0.05)
            release.set()
            await task
            await engine.close()

        asyncio.run(scenario())

    def test_an_event_loop_that_ends_does_not_hurt_the_engine(self) -> None:
        """Its request runs on to the end; another loop is served as if nothing had been."""
        engine = self.make_engine()

        async def leave() -> None:
            asyncio.create_task(engine.generate(self.request(max_tokens=300)))  # noqa: RUF006
            await until(lambda: engine.stats().live_requests == 1)

        async def come() -> None:
            assert len((await engine.generate(self.request())).generated_token_ids) == 24
            await until(lambda: engine.stats().live_requests == 0)
            await engine.close()

        asyncio.run(leave())
        asyncio.run(come())

    @pytest.mark.parametrize(
        "limits",
        [
            {"max_sequence_length": 1},
            {"max_sequence_length": 10**9},
            {"max_live_requests": 0},
            {"max_live_requests": 9, "max_step_tokens": 8},
            {"max_kv_bytes": 1000},
            {"num_threads": 0},
        ],
    )
    def test_limits_that_cannot_work_are_refused(self, limits: dict[str, int]) -> None:
        with pytest.raises(ConfigError, match=next(iter(limits))):
            self.make_engine(**limits)

    def test_a_model_without_the_seams_is_refused(self) -> None:
        loaded = load_model("tiny")
        loaded.model.rotary_pos_emb = torch.nn.Identity()
        with pytest.raises(ConfigError, match="seams"):
            MegatronCpuEngine(loaded.model, loaded.info)

    def test_closing_twice_at_once(self) -> None:
        async def scenario(engine: Engine) -> None:
            await asyncio.gather(engine.close(), engine.close(), engine.close())
            with pytest.raises(EngineStateError, match="closed"):
                await engine.pause()

        self.run(scenario)

    def test_unknown_suspend_mode(self) -> None:
        async def scenario(engine: Engine) -> None:
            mode: Any = "offload"
            with pytest.raises(RequestRejectedError, match="mode"):
                await engine.suspend(mode)

        self.run(scenario)

    def test_ids_are_copied_at_the_door(self) -> None:
        """What the caller does to its array afterwards changes nothing."""

        async def scenario(engine: Engine) -> None:
            reference = await engine.generate(self.request())
            await engine.pause()
            request = self.request()
            task = asyncio.create_task(engine.generate(request))
            await until(lambda: engine.stats().waiting_requests == 1)
            request.prompt_token_ids[:] = 1
            await engine.unpause()
            result = await task
            assert result.prompt_token_ids.tolist() == list(self.prompt)
            assert result.generated_token_ids.tolist() == reference.generated_token_ids.tolist()
            wide = replace(request, prompt_token_ids=np.array(self.prompt, dtype=np.int64))
            again = await engine.generate(wide)
            assert again.prompt_token_ids.dtype == np.int32

        self.run(scenario)
