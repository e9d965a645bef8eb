"""Every test here runs Megatron's genuine dynamic engine on the CPU, under the facade."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dynamic import cpu_facade
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess


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
