"""The engine contract on a CUDA device; `make gpu-check` names this file to pytest.

Its name keeps it out of other runs: where there is no GPU there is nothing to collect.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from megatron.core.inference.utils import InferenceMode

from tokenplane.engine_adapter.contract_suite.features import (
    CancelContract,
    SamplingContract,
    StopContract,
    StreamContract,
)
from tokenplane.engine_adapter.contract_suite.lifecycle import LifecycleContract
from tokenplane.engine_adapter.dynamic.attention import install_torch_attention
from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.dynamic.gpu_model import gpu_twin
from tokenplane.engine_adapter.dynamic.settings import DynamicSettings
from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.engine_adapter.testing import EngineContract

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


class GpuEngines:
    """Every engine gets a twin of the tiny CPU model."""

    spec: ClassVar[str] = "tiny"
    mode: ClassVar[Any] = "direct"
    settings: ClassVar[dict[str, Any]] = {}
    logprob_tolerance: ClassVar[float] = 1e-4
    loaded: LoadedModel
    model: torch.nn.Module

    def make_engine(self, **limits: int) -> Engine:
        self.loaded = load_model(self.spec)
        self.model = gpu_twin(self.loaded.model)
        given: dict[str, Any] = {"max_sequence_length": 1024, "max_live_requests": 32}
        given |= self.settings | limits
        return MegatronDynamicEngine(
            self.model,
            self.loaded.info,
            self.loaded.detokenize,
            settings=DynamicSettings(**given),
            mode=self.mode,
        )

    def reference_logits(self, engine: Engine, ids: np.ndarray) -> np.ndarray:
        return gpu_forward(self.model, ids)

    def detokenize(self, ids: Any) -> str:
        return self.loaded.detokenize(ids)


def gpu_forward(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """float32[n, V]: one forward over the whole sequence, no cache, no batch."""
    tokens = torch.from_numpy(np.array(ids, dtype=np.int64))[None].cuda()
    count = tokens.shape[1]
    masked = torch.ones(1, 1, count, count, device="cuda").tril() < 0.5
    active = InferenceMode.is_active()
    InferenceMode.unset_active()
    with torch.no_grad():
        logits = model(tokens, torch.arange(count, device="cuda")[None], masked)
    if active:
        InferenceMode.set_active()
    return np.asarray(logits[0].float().cpu().numpy())


class TestDynamicEngineOnTheGpu(
    GpuEngines, EngineContract, SamplingContract, StopContract, StreamContract, CancelContract
):
    spec = "tiny"


class TestDynamicEngineWithExpertsOnTheGpu(GpuEngines, EngineContract):
    spec = "tiny-moe"


class TestCoordinatedDynamicEngineOnTheGpu(GpuEngines, CancelContract, StreamContract):
    mode = "coordinator"


class TestDynamicEngineWithCachedPrefixesOnTheGpu(GpuEngines, LifecycleContract):
    settings: ClassVar[dict[str, Any]] = {
        "prefix_caching": True,
        # FlashAttention reads pages of multiples of 256 positions; the torch path any.
        "block_tokens": 16 if install_torch_attention() == "torch" else 256,
    }
