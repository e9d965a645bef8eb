"""The CPU engine keeps the whole contract, over a dense model and over a mixture of experts."""

from __future__ import annotations

import pytest

from tests.engine.tiny_models import TinyEngines
from tokenplane.engine_adapter.contract_suite.features import (
    CancelContract,
    SamplingContract,
    StopContract,
    StreamContract,
)
from tokenplane.engine_adapter.testing import EngineContract

pytestmark = pytest.mark.engine


class TestMegatronCpuEngine(
    TinyEngines, EngineContract, SamplingContract, StopContract, StreamContract, CancelContract
):
    spec = "tiny"


class TestMegatronCpuEngineWithExperts(TinyEngines, EngineContract, StreamContract, CancelContract):
    spec = "tiny-moe"
