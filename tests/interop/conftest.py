"""The real NeMo-Gym, in the environment that ``make install-test`` makes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import gym_env
import pytest

from tests.interop.gym_contract import GymContract
from tests.interop.gym_process import BACKENDS, Backend, GymModelServer
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

    def start(backend: Backend) -> GymModelServer:
        kwargs = {"root": str(folder / backend)}
        return GymModelServer(
            gym_python, proxy.url, folder, backend=backend, lineage_store_kwargs=kwargs
        )

    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:  # most of a start is waiting for imports
            servers = list(pool.map(start, BACKENDS))
        yield {
            backend: stack.enter_context(server)
            for backend, server in zip(BACKENDS, servers, strict=True)
        }
