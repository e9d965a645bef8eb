"""Nothing waits for ever: a start, a step, a coordinator that is stuck or dead, in every state."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.dynamic.conftest import MakeWorker
from tests.dynamic.dynamic_engines import open_engine
from tests.dynamic.dynamic_requests import ask, change_weights
from tests.dynamic.waiting import until
from tokenplane.engine_adapter.dynamic import engine as engine_module
from tokenplane.engine_adapter.dynamic.coordinator_liveness import CoordinatorLiveness
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.engine import EngineState
from tokenplane.schemas.errors import (
    DeadlineError,
    EngineDeadError,
    TokenplaneError,
)

pytestmark = pytest.mark.engine

DATA = {"input_ids": torch.tensor([[5, 9, 17]]), "input_lengths": torch.tensor([3])}


def engine_threads() -> int:
    return sum(t.name == "tokenplane-dynamic" for t in threading.enumerate())


@pytest.fixture
def own_coordinator() -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(vocab_size=512, max_requests=64, block_tokens=16)
    process.address(300)
    yield process
    if process.poll() is None:
        os.kill(process.pid, signal.SIGCONT)
    process.close()


def test_a_start_out_of_time_is_reported_and_what_it_makes_later_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    stock: Any = vars(engine_module)["core_builder"]
    freed: list[bool] = []

    def slow(*args: Any) -> Callable[[], Any]:
        build = stock(*args)

        def later() -> Any:
            go_on.wait(60)
            core = build()
            free = core.free

            def noted() -> None:
                freed.append(True)
                free()

            core.free = noted
            return core

        return later

    monkeypatch.setattr(engine_module, "core_builder", slow)
    with pytest.raises(DeadlineError, match="did not start"):
        open_engine(start_timeout_s=0.1)
    go_on.set()
    until(lambda: engine_threads() == 0)
    assert freed == [True]


def test_a_stuck_step_holds_up_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine: Any = open_engine()
        go_on, stuck = threading.Event(), threading.Event()
        stock = engine._loop.core.async_step

        async def hang() -> Any:
            stuck.set()
            go_on.wait(60)
            return await stock()

        engine._loop.core.async_step = hang
        task = asyncio.create_task(engine.generate(ask([5, 6])))
        await asyncio.to_thread(stuck.wait, 60)
        for call in (
            engine.pause(timeout_s=0.05),
            engine.set_weight_version(1, timeout_s=0.05),
            engine.update_weights(change_weights, version=1, timeout_s=0.05),
            engine.close(timeout_s=0.05),
        ):
            with pytest.raises(DeadlineError):
                await call
        go_on.set()
        with pytest.raises(TokenplaneError, match="closed"):
            await task
        await asyncio.to_thread(until, lambda: engine_threads() == 0)
        assert engine.state() is EngineState.CLOSED
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_coordinator_that_lives_but_does_nothing_is_found_out(
    own_coordinator: CoordinatorProcess,
) -> None:
    """At the start, and while a request waits; and once it is dead. One process for all three."""
    os.kill(own_coordinator.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError):
        open_engine(mode="coordinator", coordinator=own_coordinator, start_timeout_s=1.0)
    until(lambda: engine_threads() == 0)
    os.kill(own_coordinator.pid, signal.SIGCONT)

    async def scenario() -> None:
        engine = open_engine(
            mode="coordinator", coordinator=own_coordinator, coordinator_timeout_s=1.0
        )
        assert len((await engine.generate(ask([5, 6]))).generated_token_ids) == 12
        os.kill(own_coordinator.pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDeadError, match="forwards no messages"):
                await engine.generate(ask([5, 6]))
        assert engine.state() is EngineState.DEAD
        await engine.close()

    asyncio.run(scenario())
    own_coordinator.kill()
    until(lambda: own_coordinator.poll() is not None)
    with pytest.raises(EngineDeadError, match="coordinator process has ended"):
        open_engine(mode="coordinator", coordinator=own_coordinator)
    until(lambda: engine_threads() == 0)


def test_silence_counts_only_while_the_engine_listens_and_somebody_waits() -> None:
    asked: list[int] = []
    liveness = CoordinatorLiveness(timeout_s=0.02)

    def check(heard: int, turns: int, *, waiting: bool = True) -> None:
        liveness.check(heard=heard, turns=turns, waiting=waiting, ask=lambda: asked.append(turns))

    def pass_time() -> None:
        threading.Event().wait(0.03)

    check(0, 0, waiting=False)
    pass_time()
    check(0, 50, waiting=False)
    assert asked == []
    pass_time()
    check(0, 50)
    assert asked == [50]
    pass_time()
    check(0, 51)  # a long step: it has not looked
    check(1, 60)  # it heard something
    pass_time()
    check(1, 61)
    assert asked == [50, 61]
    pass_time()
    with pytest.raises(EngineDeadError, match="forwards no messages"):
        check(1, 64)


@pytest.mark.slow
def test_a_coordinator_that_dies_is_reported_to_whoever_drains_or_generates(
    make_worker: MakeWorker,
) -> None:
    worker = make_worker(max_new_tokens=400, stop_token_ids=[], megatron={"use_coordinator": True})
    worker.prepare_for_generation()
    engine = worker.engine
    assert engine is not None
    pid = engine.coordinator_pid()
    assert pid is not None
    found: list[Any] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            found.append(call())
        except TokenplaneError as error:
            found.append(error)

    calls = [lambda: worker.generate(data=DATA), lambda: worker.drain(60)]
    threads = [threading.Thread(target=attempt, args=(call,)) for call in calls]
    threads[0].start()
    until(lambda: engine.stats().live_requests == 1)
    threads[1].start()
    os.kill(pid, signal.SIGKILL)
    worker.shutdown()
    for thread in threads:
        thread.join(60)
    assert [isinstance(outcome, TokenplaneError) for outcome in found] == [True, True], found
    assert engine.state() is EngineState.CLOSED
    assert engine_threads() == 0
