"""How the engine tests make an engine over a tiny model, and the reference to hold it against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine
from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.models.source import load_model


class TinyEngines:
    """Mixed into a contract suite: every engine gets a model of its own."""

    spec = "tiny"
    loaded: LoadedModel

    def make_engine(self, **limits: int) -> Engine:
        self.loaded = load_model(self.spec)
        return MegatronCpuEngine(
            self.loaded.model, self.loaded.info, self.loaded.detokenize, **limits
        )

    def reference_logits(self, engine: Engine, ids: np.ndarray) -> np.ndarray:
        return full_forward(self.loaded.model, ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.loaded.detokenize(ids)


def full_forward(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """float32[n, V]: one forward over the whole sequence, no cache, no batch."""
    tokens = torch.from_numpy(np.array(ids, dtype=np.int64))[None]
    with torch.no_grad():
        logits = model(tokens, torch.arange(tokens.shape[1])[None], None)
    return np.asarray(logits[0].numpy())
