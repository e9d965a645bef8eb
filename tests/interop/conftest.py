"""The real NeMo-Gym, in the environment that ``make install-test`` makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import gym_env
import pytest

from tests.interop.gym_contract import GymContract
from tests.interop.gym_process import BACKENDS, GymModelServer
from tests.interop.gym_proxy import EngineProxy


@pytest.fixture(scope="session")
def gym_python() -> Path:
    """The Gym environment's interpreter; where it is missing the test fails and says what to do."""
    return gym_env.gym_python()


@pytest.fixture(scope="session")
def gym(gym_python: Path) -> Iterator[GymContract]:
    """Gym's capture library, one process for all tests of a worker."""
    with GymContract(gym_python) as contract:
        yield contract


@pytest.fixture(scope="session")
def proxy() -> Iterator[EngineProxy]:
    """What Gym's model servers take for their engine; a test routes it to its own."""
    with EngineProxy() as relay:
        yield relay


@pytest.fixture(scope="session")
def gym_servers(
    gym_python: Path, proxy: EngineProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, GymModelServer]]:
    """The real model server by backend, with Gym's own ledger; rollout ids must be unique."""
    folder = tmp_path_factory.mktemp("gym")
    with ExitStack() as stack:
        yield {
            backend: stack.enter_context(
                GymModelServer(
                    gym_python,
                    proxy.url,
                    folder,
                    backend=backend,
                    lineage_store_kwargs={"root": str(folder / backend)},
                )
            )
            for backend in BACKENDS
        }
