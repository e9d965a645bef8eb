"""The generation worker: batches, deadlines, sleep and wake under load, refits, HTTP, shutdown."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import httpx
import pytest
import torch

from tests.dynamic.conftest import MakeWorker
from tests.dynamic.dynamic_engines import fresh_model
from tests.dynamic.dynamic_requests import change_weights
from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.worker.batches import build_sampling_params, merge_stop_strings
from tokenplane.engine_adapter.worker.generation_config import parse_generation_config
from tokenplane.schemas.errors import (
    ConfigError,
    DeadlineError,
    EngineStateError,
    RequestRejectedError,
)
from tokenplane.staging import open_store

pytestmark = pytest.mark.engine

DATA = {
    "input_ids": torch.tensor([[5, 9, 17, 0], [33, 65, 7, 8], [40, 0, 0, 0]]),
    "input_lengths": torch.tensor([3, 4, 1]),
}


def test_a_batch_comes_back_padded_and_in_order(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.prepare_for_generation()
    out = worker.generate(data=DATA, greedy=True)
    assert set(out) == {
        "output_ids", "logprobs", "generation_lengths", "unpadded_sequence_lengths", "truncated",
    }  # fmt: skip
    lengths = out["generation_lengths"].tolist()
    assert out["unpadded_sequence_lengths"].tolist() == [
        n + g for n, g in zip([3, 4, 1], lengths, strict=True)
    ]
    for row, (count, total) in enumerate(
        zip([3, 4, 1], out["unpadded_sequence_lengths"].tolist(), strict=True)
    ):
        ids, logs = out["output_ids"][row], out["logprobs"][row]
        assert ids[:count].tolist() == DATA["input_ids"][row, :count].tolist()
        assert (ids[total:] == worker.config.pad_token_id).all()
        assert (logs[:count] == 0).all()
        assert (logs[count:total] < 0).all()
        assert (logs[total:] == 0).all()
    again = worker.generate(data=DATA, greedy=True)
    assert torch.equal(again["output_ids"], out["output_ids"])

    async def stream() -> dict[int, Any]:
        return {i: batch async for i, batch in worker.generate_async(DATA, greedy=True)}

    singles = asyncio.run(stream())
    assert sorted(singles) == [0, 1, 2]
    for row, single in singles.items():
        total = int(single["unpadded_sequence_lengths"][0])
        assert single["output_ids"][0].tolist() == out["output_ids"][row, :total].tolist()


def test_sampling_and_stops_come_from_the_configuration() -> None:
    config = parse_generation_config(
        {"temperature": 0.7, "top_k": 9, "stop_strings": ["\n\n"], "max_new_tokens": 3}
    )
    merged = merge_stop_strings(config, [["END"], None, ["END", "STOP"]])
    assert merged == ("\n\n", "END", "STOP")
    assert merge_stop_strings(config, None) == ("\n\n",)
    sampling = build_sampling_params(config, greedy=False, stop_strings=merged)
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.7, 9, 3)
    assert sampling.stop_strings == merged
    greedy = build_sampling_params(config, greedy=True)
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (0, 0, 1)


def test_stop_strings_of_a_sample_end_its_answer(make_worker: MakeWorker) -> None:
    worker = make_worker(max_new_tokens=60)
    worker.prepare_for_generation()
    whole = worker.generate(data=DATA, greedy=True)
    detokenize = fresh_model("tiny").detokenize
    text = detokenize(whole["output_ids"][0, 3 : int(whole["unpadded_sequence_lengths"][0])])
    stop = next(text[i : i + 2] for i in range(10, len(text)) if text[i : i + 2].isascii())
    cut = worker.generate(data=DATA | {"stop_strings": [[stop], None, None]}, greedy=True)
    count = int(cut["generation_lengths"][0])
    assert count < int(whole["generation_lengths"][0])
    assert not bool(cut["truncated"][0])
    assert stop in detokenize(cut["output_ids"][0, 3 : 3 + count])
    assert stop not in detokenize(cut["output_ids"][0, 3 : 2 + count])


@pytest.mark.parametrize(
    "data",
    [
        {"input_ids": torch.ones(2, 3), "input_lengths": torch.tensor([3])},
        {"input_ids": torch.ones(1, 3), "input_lengths": torch.tensor([4])},
        {"input_ids": torch.ones(1, 3), "input_lengths": torch.tensor([0])},
    ],
)
def test_malformed_batches_are_refused(make_worker: MakeWorker, data: Any) -> None:
    worker = make_worker()
    worker.prepare_for_generation()
    with pytest.raises(RequestRejectedError):
        worker.generate(data=data)


def test_everything_is_idempotent_and_refusals_name_the_state(make_worker: MakeWorker) -> None:
    worker = make_worker(colocated=True)
    for call in (worker.finish_generation, worker.suspend_for_refit, worker.resume_after_refit):
        call()
    assert worker.engine is None
    assert worker.get_inference_cuda_graph_capture_count() == 0
    with pytest.raises(EngineStateError, match="not prepared"):
        worker.generate(data=DATA)
    worker.prepare_for_generation(tags=["weights"])
    assert worker.engine is None
    worker.prepare_for_generation()
    engine = worker.engine
    assert engine is not None
    worker.prepare_for_generation()
    assert worker.engine is engine
    worker.finish_generation(release_gpu=False)
    assert engine.state() is EngineState.RUNNING
    worker.finish_generation()
    worker.finish_generation()
    assert engine.state() is EngineState.SUSPENDED
    assert engine.stats().kv_bytes == 0
    worker.prepare_for_generation(tags=["weights"])
    assert engine.state() is EngineState.SUSPENDED
    worker.suspend_for_refit()
    worker.resume_after_refit()
    assert engine.state() is EngineState.SUSPENDED
    worker.prepare_for_generation(tags=["kv_cache"])
    assert engine.state() is EngineState.RUNNING
    worker.suspend_for_refit()
    worker.suspend_for_refit()
    assert engine.state() is EngineState.SUSPENDED
    worker.resume_after_refit()
    worker.resume_after_refit()
    assert engine.state() is EngineState.RUNNING
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(EngineStateError, match="not prepared"):
        worker.generate(data=DATA)


def test_sleep_and_wake_under_load_lose_no_request(make_worker: MakeWorker) -> None:
    worker = make_worker(colocated=True, max_new_tokens=150)
    worker.prepare_for_generation()
    expected = worker.generate(data=DATA, greedy=True)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(worker.generate(data=DATA, greedy=True)))
    thread.start()
    for _ in range(4):
        worker.finish_generation()
        worker.prepare_for_generation()
    thread.join(60)
    assert torch.equal(found[0]["output_ids"], expected["output_ids"])


def test_time_asleep_does_not_count_against_a_deadline(make_worker: MakeWorker) -> None:
    worker = make_worker(colocated=True, request_timeout_s=2.0)
    worker.prepare_for_generation()
    worker.finish_generation()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(worker.generate(data=DATA)))
    thread.start()
    thread.join(2.5)
    assert thread.is_alive()
    worker.prepare_for_generation()
    thread.join(30)
    assert len(found) == 1


def test_a_batch_out_of_time_fails_and_is_cancelled(make_worker: MakeWorker) -> None:
    worker = make_worker(max_new_tokens=500, request_timeout_s=0.2, stop_token_ids=[])
    worker.prepare_for_generation()
    with pytest.raises(DeadlineError, match=r"3 of 3 answers"):
        worker.generate(data=DATA)
    engine = worker.engine
    assert engine is not None
    ended = threading.Event()
    for _ in range(200):
        if engine.stats().cancelled_requests == 3:
            ended.set()
            break
        ended.wait(0.02)
    assert ended.is_set()
    assert engine.stats().live_requests == 0


def test_a_version_set_early_is_the_engines_first(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.set_rollout_weight_version(6)
    worker.prepare_for_generation()
    engine = worker.engine
    assert engine is not None
    assert engine.weight_version() == 6
    before = worker.generate(data=DATA, greedy=True)
    worker.suspend_for_refit()
    worker.update_weights(change_weights, version=7)
    worker.resume_after_refit()
    assert engine.weight_version() == 7
    after = worker.generate(data=DATA, greedy=True)
    assert not torch.equal(before["logprobs"][0, 3:5], after["logprobs"][0, 3:5])


def test_capture_hooks_are_for_leaders_and_for_text(make_worker: MakeWorker) -> None:
    with open_store("memory:") as store:
        follower = make_worker(leader=False)
        follower.setup_token_capture(store, "staged")
        assert follower.capture is None
        leader = make_worker()
        with pytest.raises(ConfigError, match="media"):
            leader.setup_token_capture(store, "staged", capture_media=True)
        leader.setup_token_capture(store, "staged")
        with pytest.raises(ConfigError, match="already"):
            leader.setup_token_capture(store, "staged")
        leader.prepare_for_generation()
        loop: Any = leader.engine._loop if leader.engine else None
        assert leader.capture is not None
        assert loop.core.hooks.stager is leader.capture.stager


def test_http_serves_captured_rollouts_and_leaves_no_port(make_worker: MakeWorker) -> None:
    with open_store("memory:") as store:
        worker = make_worker(
            store, temperature=0.0, megatron={"expose_http_server": True}, stop_token_ids=None
        )
        worker.set_rollout_weight_version(1)
        assert worker.report_dp_openai_server_base_url() is None
        worker.prepare_for_generation()
        url = worker.report_dp_openai_server_base_url()
        assert url is not None
        root = url.removesuffix("/v1")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        reply = httpx.post(f"{root}/rollouts/r1/v1/chat/completions", json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        assert len(store.keys("staged")) == 1
        again = httpx.post(f"{url}/chat/completions", json=body, timeout=30)
        content = reply.json()["choices"][0]["message"]["content"]
        assert again.json()["choices"][0]["message"]["content"] == content
        worker.shutdown()
        assert worker.report_dp_openai_server_base_url() is None
        port = int(root.rsplit(":", 1)[1])
        socket.create_server(("127.0.0.1", port)).close()


def test_a_server_without_a_store_is_refused(make_worker: MakeWorker) -> None:
    with pytest.raises(ConfigError, match="staging store"):
        make_worker(megatron={"expose_http_server": True})


def test_a_failed_start_leaves_nothing_and_can_be_repeated(make_worker: MakeWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, open_store("memory:") as store:
        worker = make_worker(store, megatron={"expose_http_server": True})
        worker._port = taken.getsockname()[1]
        before = set(threading.enumerate())
        with pytest.raises(OSError, match="in use"):
            worker.prepare_for_generation()
        assert worker.engine is None
        assert set(threading.enumerate()) == before
        worker._port = None
        worker.prepare_for_generation()
        assert worker.report_dp_openai_server_base_url() is not None
