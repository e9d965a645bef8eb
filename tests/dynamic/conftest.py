"""Every test here runs Megatron's genuine dynamic engine on the CPU, under the facade."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.dynamic import cpu_facade
from tests.dynamic.dynamic_engines import fresh_model
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
from tokenplane.engine_adapter.worker.generation_config import parse_generation_config

MakeWorker = Callable[..., MegatronGenerationWorker]


@pytest.fixture(scope="module", autouse=True)
def facade() -> Iterator[None]:
    """CUDA's names answered on the CPU, for the tests of one file."""
    with pytest.MonkeyPatch.context() as patch:
        cpu_facade.install(patch.setattr)
        yield


@pytest.fixture(scope="session")
def coordinator() -> Iterator[CoordinatorProcess]:
    """One coordinator process for all engines of the run: starting one takes seconds."""
    process = CoordinatorProcess(vocab_size=512, max_requests=64, block_tokens=16)
    process.address(60)
    yield process
    process.close()


@pytest.fixture
def make_worker() -> Iterator[MakeWorker]:
    """Workers over the tiny model, in direct mode unless said otherwise; all are shut down."""
    made: list[MegatronGenerationWorker] = []
    small = {"max_sequence_length": 512, "block_size_tokens": 16, "use_coordinator": False}

    def make(store: Any = None, *, leader: bool = True, **values: Any) -> MegatronGenerationWorker:
        megatron = small | values.pop("megatron", {})
        given = {"max_new_tokens": 12, "stop_token_ids": [0], "megatron": megatron} | values
        config = parse_generation_config(given)
        worker = MegatronGenerationWorker(
            fresh_model("tiny"), config, store=store, is_leader=leader
        )
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.shutdown()
