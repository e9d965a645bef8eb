"""How these tests make a dynamic engine over a tiny model, and the reference to hold it against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.core.inference.utils import InferenceMode

from tests.engine.tiny_models import full_forward
from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.dynamic.settings import DynamicSettings
from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.models.source import load_model

_loaded: dict[str, tuple[LoadedModel, dict[str, torch.Tensor]]] = {}


def fresh_model(spec: str) -> LoadedModel:
    """The tiny model with its first weights: built once, put back for each test."""
    if spec not in _loaded:
        loaded = load_model(spec)
        _loaded[spec] = (loaded, {n: p.clone() for n, p in loaded.model.named_parameters()})
    loaded, weights = _loaded[spec]
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            parameter.copy_(weights[name])
    return loaded


def open_engine(
    spec: str = "tiny", *, mode: Any = "direct", coordinator: Any = None, **settings: Any
) -> MegatronDynamicEngine:
    """A running engine with small KV blocks."""
    loaded = fresh_model(spec)
    given = {"max_sequence_length": 512, "max_live_requests": 16, "block_tokens": 16} | settings
    return MegatronDynamicEngine(
        loaded.model,
        loaded.info,
        loaded.detokenize,
        settings=DynamicSettings(**given),
        mode=mode,
        coordinator=coordinator,
    )


class DynamicEngines:
    """Mixed into a contract suite."""

    spec: ClassVar[str] = "tiny"
    mode: ClassVar[str] = "direct"
    settings: ClassVar[dict[str, Any]] = {}
    coordinator: Any = None

    def make_engine(self, **limits: int) -> Engine:
        given = self.settings | limits
        return open_engine(self.spec, mode=self.mode, coordinator=self.coordinator, **given)

    def reference_logits(self, engine: Engine, ids: np.ndarray) -> np.ndarray:
        InferenceMode.unset_active()  # the engine is idle; its mode changes what a forward gives
        try:
            return full_forward(fresh_or_changed(self.spec), ids)
        finally:
            InferenceMode.set_active()

    def detokenize(self, ids: Sequence[int]) -> str:
        return _loaded[self.spec][0].detokenize(ids)


def fresh_or_changed(spec: str) -> torch.nn.Module:
    """The model as the engine has it now."""
    return _loaded[spec][0].model
