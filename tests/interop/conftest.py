"""The real NeMo-Gym, in the environment that ``make install-test`` makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gym_env
import pytest

from tests.interop.gym_contract import GymContract


@pytest.fixture(scope="session")
def gym_python() -> Path:
    """The Gym environment's interpreter; where it is missing the test fails and says what to do."""
    return gym_env.gym_python()


@pytest.fixture(scope="session")
def gym(gym_python: Path) -> Iterator[GymContract]:
    """Gym's capture library, one process for all tests of a worker."""
    with GymContract(gym_python) as contract:
        yield contract
