"""A worker when things go wrong: a dead engine, half a move, a refit out of order, a shutdown."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.dynamic.conftest import MakeWorker
from tests.dynamic.dynamic_requests import ask, change_weights
from tests.dynamic.waiting import until
from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
from tokenplane.schemas.errors import (
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    RequestCancelledError,
)
from tokenplane.staging import open_store

pytestmark = pytest.mark.engine

DATA = {
    "input_ids": torch.tensor([[5, 9, 17, 0], [33, 65, 7, 8], [40, 0, 0, 0]]),
    "input_lengths": torch.tensor([3, 4, 1]),
}


def serving(worker: MegatronGenerationWorker) -> Any:
    worker.prepare_for_generation()
    assert worker.engine is not None
    return worker.engine


def in_background(worker: MegatronGenerationWorker, found: list[Any]) -> threading.Thread:
    def run() -> None:
        try:
            found.append(worker.generate(data=DATA, greedy=True))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def has_live(engine: Any, count: int) -> bool:
    return bool(engine.stats().live_requests == count)


def die(engine: Any) -> None:
    """End the engine by a failure that no request answers for."""

    def broken() -> None:
        raise RuntimeError("the device is gone")

    loop = engine._loop
    loop.core.async_step = lambda: broken()
    with pytest.raises(EngineDeadError, match="device is gone"):
        asyncio.run(engine.generate(ask([5, 6])))


def test_a_dead_engine_is_reported_by_every_call_and_a_shutdown_clears_it(
    make_worker: MakeWorker,
) -> None:
    worker = make_worker(colocated=True)
    die(serving(worker))
    for call in (
        worker.prepare_for_generation,
        worker.finish_generation,
        worker.suspend_for_refit,
        lambda: worker.set_rollout_weight_version(2),
        lambda: worker.update_weights(change_weights, version=2),
        lambda: worker.generate(data=DATA),
    ):
        with pytest.raises(EngineDeadError):
            call()
    before = set(threading.enumerate())
    worker.shutdown()
    assert worker.engine is None
    assert threading.active_count() < len(before)
    serving(worker)
    assert len(worker.generate(data=DATA)["output_ids"]) == 3


def test_a_sleep_that_fails_half_way_leaves_the_engine_serving(make_worker: MakeWorker) -> None:
    worker = make_worker(colocated=True)
    engine = serving(worker)
    stock = engine.suspend

    async def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise DeadlineError("suspend did not get its turn", expected="within 0 s")

    for call in (worker.finish_generation, worker.suspend_for_refit):
        engine.suspend = refuse
        with pytest.raises(DeadlineError, match="did not get its turn"):
            call()
        assert engine.state() is EngineState.RUNNING
        engine.suspend = stock
    worker.suspend_for_refit()
    assert engine.state() is EngineState.SUSPENDED
    worker.resume_after_refit()
    assert engine.state() is EngineState.RUNNING


def test_an_engine_that_was_woken_during_a_refit_is_suspended_again(
    make_worker: MakeWorker,
) -> None:
    worker = make_worker()
    engine = serving(worker)
    worker.suspend_for_refit()
    worker.prepare_for_generation(tags=["kv_cache"])
    assert engine.state() is EngineState.RUNNING
    worker.suspend_for_refit()
    assert engine.state() is EngineState.SUSPENDED
    worker.resume_after_refit()
    assert engine.state() is EngineState.RUNNING


def test_options_of_other_backends_are_taken_and_mean_nothing(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.prepare_for_generation(tags=["weights"], another_backends_option=1)
    assert worker.engine is None
    worker.prepare_for_generation(another_backends_option=1)
    assert worker.engine is not None


def test_versions_and_weights_change_on_the_engines_own_thread(make_worker: MakeWorker) -> None:
    worker = make_worker()
    engine = serving(worker)
    seen: list[str] = []
    stock = engine._loop.core.set_version

    def watched(version: int) -> None:
        seen.append(threading.current_thread().name)
        stock(version)

    engine._loop.core.set_version = watched
    worker.set_rollout_weight_version(3)
    worker.update_weights(change_weights, version=4)
    assert seen == [engine._loop._thread.name] * 2
    assert seen[0] != threading.current_thread().name


def test_a_recompute_round_refits_drops_the_cache_and_says_so(make_worker: MakeWorker) -> None:
    worker = make_worker(
        max_new_tokens=200,
        stop_token_ids=[],
        megatron={"recompute_kv_cache_after_weight_updates": True},
    )
    engine = serving(worker)
    worker.set_rollout_weight_version(1)

    async def scenario() -> Any:
        task = asyncio.create_task(engine.generate(ask([5, 9], max_tokens=200)))
        while engine.stats().generated_tokens < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.to_thread(worker.suspend_for_refit)
        await asyncio.to_thread(worker.update_weights, change_weights, 2)
        await asyncio.to_thread(worker.resume_after_refit)
        return await task

    result = asyncio.run(scenario())
    assert [epoch for _, epoch in result.policy_epochs] == [1, 2]
    assert result.kv_cache_epochs == ((0, 2),)
    assert result.num_evictions == 1


def test_cancelling_one_who_iterates_cancels_its_requests_alone(make_worker: MakeWorker) -> None:
    worker = make_worker(max_new_tokens=200, stop_token_ids=[])
    engine = serving(worker)

    async def scenario() -> None:
        async def iterate() -> None:
            async for _ in worker.generate_async(DATA, greedy=True):
                pass

        task = asyncio.create_task(iterate())
        other = asyncio.create_task(engine.generate(ask([5, 9, 17], max_tokens=60)))
        while engine.stats().live_requests < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await other).generated_token_ids) == 60

    asyncio.run(scenario())
    until(lambda: engine.stats().cancelled_requests == 3)
    assert engine.stats().live_requests == engine.stats().waiting_requests == 0
    assert engine.stats().kv_bytes == 0
    short = worker.generate(data=DATA, greedy=True)
    assert short["generation_lengths"].tolist() == [200, 200, 200]


def test_draining_waits_for_what_is_under_way_or_says_what_is_left(
    make_worker: MakeWorker,
) -> None:
    worker = make_worker(colocated=True, max_new_tokens=200, stop_token_ids=[])
    worker.drain(0.1)
    engine = serving(worker)
    worker.drain(0.1)
    found: list[Any] = []
    thread = in_background(worker, found)
    until(lambda: engine.stats().live_requests == 3)
    worker.drain(600)
    assert engine.stats().finished_requests == 3
    thread.join(30)
    worker.finish_generation()
    thread = in_background(worker, found)
    until(lambda: engine.stats().waiting_requests == 3)
    with pytest.raises(EngineStateError, match="suspended"):
        worker.drain(60)
    worker.prepare_for_generation()
    with pytest.raises(DeadlineError, match="3 requests did not finish"):
        worker.drain(0.0)
    thread.join(60)
    assert [type(out) for out in found] == [dict, dict]


def test_a_shutdown_lets_requests_finish_for_a_while_and_cancels_the_rest(
    make_worker: MakeWorker,
) -> None:
    for grace_s, expected in ((600.0, dict), (0.0, RequestCancelledError)):
        worker = make_worker(max_new_tokens=200, stop_token_ids=[])
        engine = serving(worker)
        found: list[Any] = []
        thread = in_background(worker, found)
        until(partial(has_live, engine, 3))
        worker.shutdown(drain_timeout_s=grace_s)
        thread.join(60)
        assert isinstance(found[0], expected), found
        assert engine.state() is EngineState.CLOSED


def test_every_part_is_ended_whatever_another_raises(make_worker: MakeWorker) -> None:
    before = set(threading.enumerate())
    with open_store("memory:") as store:
        worker = make_worker(store, megatron={"expose_http_server": True})
        engine = serving(worker)
        server: Any = worker._server
        stock = server.close

        def failing() -> None:
            stock()
            raise DeadlineError("the HTTP server did not stop", expected="within 0 s")

        server.close = failing
        with pytest.raises(DeadlineError, match="HTTP server did not stop"):
            worker.shutdown()
    assert engine.state() is EngineState.CLOSED
    until(lambda: set(threading.enumerate()) <= before)
    worker.shutdown()


def test_capture_over_a_url_opens_the_store_and_closes_it(
    make_worker: MakeWorker, tmp_path: Any
) -> None:
    worker = make_worker()
    worker.setup_token_capture(f"file://{tmp_path}", "staged")
    assert worker.capture is not None
    own = worker.capture.own_store
    assert own is not None
    serving(worker)
    assert own.keys("staged") == []
    worker.shutdown()
    with pytest.raises(Exception, match="closed"):
        own.keys("staged")


def test_the_model_that_is_run_is_the_one_given_for_it(make_worker: MakeWorker) -> None:
    worker = make_worker()
    assert worker._gen_model() is worker._loaded.model
    other = torch.nn.Linear(1, 1)
    given = MegatronGenerationWorker(worker._loaded, worker.config, model=other)
    assert given._gen_model() is other


def test_answers_of_a_batch_are_those_of_the_engine(make_worker: MakeWorker) -> None:
    worker = make_worker()
    engine = serving(worker)
    out = worker.generate(data=DATA, greedy=True)
    alone = asyncio.run(engine.generate(ask([33, 65, 7, 8], max_tokens=12, stop_token_ids=(0,))))
    count = int(out["generation_lengths"][1])
    assert out["output_ids"][1, 4 : 4 + count].tolist() == alone.generated_token_ids.tolist()
    gap = np.abs(out["logprobs"][1, 4 : 4 + count].numpy() - alone.generated_log_probs).max()
    assert gap < 1e-5
    with pytest.raises(TypeError):
        worker.generate(DATA)  # type: ignore[call-arg]


def test_a_follower_hosts_no_server(make_worker: MakeWorker) -> None:
    with open_store("memory:") as store:
        follower = make_worker(store, leader=False, megatron={"expose_http_server": True})
        assert serving(follower).state() is EngineState.RUNNING
        assert follower.report_dp_openai_server_base_url() is None


def test_a_second_engine_in_the_process_is_refused_and_the_first_answers_as_before(
    make_worker: MakeWorker,
) -> None:
    first, second = make_worker(), make_worker()
    first.prepare_for_generation()
    expected = first.generate(data=DATA, greedy=True)["output_ids"]
    for _ in range(2):
        with pytest.raises(EngineStateError, match="one at a time"):
            second.prepare_for_generation()
        assert second.engine is None
    second.shutdown()
    assert torch.equal(first.generate(data=DATA, greedy=True)["output_ids"], expected)
    first.shutdown()
    second.prepare_for_generation()
    assert torch.equal(second.generate(data=DATA, greedy=True)["output_ids"], expected)
