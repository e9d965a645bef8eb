"""A worker used wrongly: wrong batches, versions, tags and ports, calls that come too late."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
import torch

from tests.dynamic.conftest import MakeWorker
from tests.dynamic.dynamic_engines import fresh_model
from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
from tokenplane.engine_adapter.worker.generation_config import parse_generation_config
from tokenplane.engine_adapter.worker.thread import LoopThread
from tokenplane.schemas.errors import ConfigError, EngineStateError, RequestRejectedError
from tokenplane.staging import open_store

pytestmark = pytest.mark.engine

IDS = torch.tensor([[5, 9, 17], [33, 65, 0]])
DATA = {"input_ids": IDS, "input_lengths": torch.tensor([3, 2])}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input_ids": IDS.float()}, "expected integers; got torch.float32; key 'input_ids'"),
        ({"input_ids": IDS.bool()}, "expected integers; got bool"),
        ({"input_ids": [[5, 9, 17], [33]]}, "expected integers; got list"),
        ({"input_ids": None}, "expected integers; got nothing"),
        ({"input_lengths": None}, "key 'input_lengths'"),
        ({"input_lengths": torch.tensor([3.0, 2.0])}, "key 'input_lengths'"),
        # As int32 this id would be 7.
        ({"input_ids": IDS + 2**32}, "outside the vocabulary"),
        ({"input_ids": torch.tensor([[5, 9, 17], [0, 33, 65]])}, "left; .* got sample 1"),
        ({"stop_strings": "END"}, "each of 2 samples; got 'END'"),
        ({"stop_strings": ["END", "X"]}, "stop_strings does not fit"),
        ({"stop_strings": [["END"]]}, "stop_strings does not fit"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(
    make_worker: MakeWorker, changes: dict[str, Any], said: str
) -> None:
    worker = make_worker(pad_token_id=0)
    worker.prepare_for_generation()
    with pytest.raises(RequestRejectedError, match=said):
        worker.generate(data=DATA | changes)


def test_an_empty_batch_gives_empty_columns_of_the_same_types(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.prepare_for_generation()
    some = worker.generate(data=DATA)
    none = worker.generate(data={"input_ids": IDS[:0], "input_lengths": torch.tensor([]).long()})
    assert {k: v.dtype for k, v in none.items()} == {k: v.dtype for k, v in some.items()}
    assert {len(column) for column in none.values()} == {0}


def test_versions_and_tags_are_checked_before_an_engine_is_there(make_worker: MakeWorker) -> None:
    worker = make_worker()
    for version in ("7", -1, True, 2**63):
        with pytest.raises(RequestRejectedError, match="weight version"):
            worker.set_rollout_weight_version(version)  # type: ignore[arg-type]
    for tags in ("kv_cache", ["kv_cahce"], ["weights", "kv"]):
        with pytest.raises(RequestRejectedError, match="kv_cache"):
            worker.prepare_for_generation(tags=tags)
    worker.prepare_for_generation()
    engine = worker.engine
    assert engine is not None
    assert engine.weight_version() is None


def test_a_server_on_ipv6_and_a_port_that_is_none(make_worker: MakeWorker) -> None:
    small = {"max_sequence_length": 512, "use_coordinator": False, "expose_http_server": True}
    config = parse_generation_config({"megatron": small})
    with open_store("memory:") as store:
        for port in (70000, -1, "80"):
            with pytest.raises(ConfigError, match="reserved_http_server_port"):
                MegatronGenerationWorker(
                    fresh_model("tiny"),
                    config,
                    store=store,
                    reserved_http_server_port=port,  # type: ignore[arg-type]
                )
        worker = MegatronGenerationWorker(fresh_model("tiny"), config, store=store, http_host="::1")
        try:
            worker.prepare_for_generation()
            url = worker.report_dp_openai_server_base_url()
            assert url is not None
            assert url.startswith("http://[::1]:")
            assert httpx.get(f"{url}/models", timeout=30).status_code == 200
        finally:
            worker.shutdown()


def test_a_call_that_comes_while_the_thread_ends_is_refused_and_does_not_wait() -> None:
    thread = LoopThread("ending")
    begun, ending, over = threading.Event(), threading.Event(), threading.Event()

    async def slow_to_cancel() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ending.set()
            await asyncio.to_thread(over.wait, 30)

    def cut_off() -> None:
        with pytest.raises(EngineStateError, match="cut off"):
            thread.call(slow_to_cancel(), what="it", timeout_s=600)

    caller = threading.Thread(target=cut_off)
    caller.start()
    assert begun.wait(30)
    closer = threading.Thread(target=thread.close)
    closer.start()
    assert ending.wait(30)
    try:
        with pytest.raises(EngineStateError, match="shut down"):
            thread.call(asyncio.sleep(600), what="this", timeout_s=20)
    finally:
        over.set()
        closer.join(30)
        caller.join(30)
    assert thread.close()
