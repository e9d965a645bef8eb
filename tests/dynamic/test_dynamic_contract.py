"""Megatron's dynamic engine keeps the whole engine contract: direct, with experts, coordinated."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tests.dynamic.dynamic_engines import DynamicEngines
from tokenplane.engine_adapter.contract_suite.features import (
    CancelContract,
    SamplingContract,
    StopContract,
    StreamContract,
)
from tokenplane.engine_adapter.contract_suite.lifecycle import LifecycleContract
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.testing import EngineContract

pytestmark = pytest.mark.engine


class TestMegatronDynamicEngine(
    DynamicEngines, EngineContract, SamplingContract, StopContract, StreamContract, CancelContract
):
    spec = "tiny"


@pytest.mark.slow
class TestMegatronDynamicEngineWithExperts(DynamicEngines, EngineContract):
    spec = "tiny-moe"


@pytest.mark.slow
class TestMegatronDynamicEngineWithCachedPrefixes(DynamicEngines, LifecycleContract):
    settings: ClassVar[dict[str, Any]] = {"prefix_caching": True}


@pytest.mark.slow
class TestMegatronDynamicEngineBehindItsCoordinator(
    DynamicEngines, EngineContract, SamplingContract, StopContract, StreamContract, CancelContract
):
    mode = "coordinator"

    @pytest.fixture(autouse=True)
    def shared_coordinator(self, coordinator: CoordinatorProcess) -> None:
        self.coordinator = coordinator
