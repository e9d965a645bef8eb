"""CUDA graph managers: with the model, or made later for one that training shares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.enums import InferenceCudaGraphScope

from tokenplane.engine_adapter.models.source import load_model
from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
from tokenplane.engine_adapter.worker.generation_config import parse_generation_config
from tokenplane.engine_adapter.worker.graph_managers import (
    apply_inference_cuda_graph_scope,
    setup_colocated_cuda_graph_managers,
)
from tokenplane.schemas.errors import ConfigError

pytestmark = pytest.mark.engine


def config_of(**megatron: Any) -> Any:
    return parse_generation_config({"megatron": megatron})


BLOCK = {"inference_cuda_graph_scope": "block"}


def test_the_graph_scope_needs_a_model_with_graph_managers() -> None:
    model = SimpleNamespace(
        config=SimpleNamespace(cuda_graph_impl="local", inference_cuda_graph_scope="as it was")
    )
    apply_inference_cuda_graph_scope(model, config_of().megatron)
    assert model.config.inference_cuda_graph_scope == "as it was"
    block = config_of(inference_cuda_graph_scope="block").megatron
    apply_inference_cuda_graph_scope(model, block)
    assert model.config.inference_cuda_graph_scope is InferenceCudaGraphScope.block
    model.config.cuda_graph_impl = "none"
    with pytest.raises(ConfigError, match="without CUDA graph managers"):
        apply_inference_cuda_graph_scope(model, block)


class Recorded(torch.nn.Module):  # type: ignore[misc]
    """Stands for Megatron's manager, which needs a CUDA device."""

    def __init__(self, config: Any, **settings: Any) -> None:
        super().__init__()
        assert config.cuda_graph_impl == "local"
        self.settings = settings


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "CudaGraphManager", Recorded)


def test_a_shared_model_gets_a_manager_per_block_once(recorded: None) -> None:
    model: Any = load_model("tiny").model
    names = [name for name, _ in model.named_parameters()]
    assert setup_colocated_cuda_graph_managers(model, config_of().megatron) == 0
    assert setup_colocated_cuda_graph_managers(model, config_of(**BLOCK).megatron) == 1
    manager = model.decoder.cudagraph_manager
    assert manager.settings == {"need_backward": False}
    assert model.config.inference_cuda_graph_scope is InferenceCudaGraphScope.block
    assert not any(hasattr(layer, "cudagraph_manager") for layer in model.decoder.layers)
    assert [name for name, _ in model.named_parameters()] == names
    assert setup_colocated_cuda_graph_managers(model, config_of(**BLOCK).megatron) == 0
    assert model.decoder.cudagraph_manager is manager
    apply_inference_cuda_graph_scope(model, config_of(**BLOCK).megatron)


def test_the_manager_acts_in_inference_mode_alone(recorded: None) -> None:
    model: Any = load_model("tiny").model
    setup_colocated_cuda_graph_managers(model, config_of(**BLOCK).megatron)
    context = SimpleNamespace(
        is_static_batching=lambda: False, using_cuda_graph_this_step=lambda: True
    )
    asked = {"attention_mask": None, "inference_context": context}
    assert not InferenceMode.is_active()
    assert not model.decoder._should_call_local_cudagraph(**asked)
    InferenceMode.set_active()
    try:
        assert model.decoder._should_call_local_cudagraph(**asked)
        assert not model.decoder._should_call_local_cudagraph(
            **(asked | {"inference_context": None})
        )
    finally:
        InferenceMode.unset_active()


def test_a_colocated_worker_makes_them_before_its_engine(recorded: None) -> None:
    loaded = load_model("tiny")
    given = {"colocated": True, "megatron": BLOCK}
    MegatronGenerationWorker(loaded, parse_generation_config(given))
    model: Any = loaded.model
    assert isinstance(model.decoder.cudagraph_manager, Recorded)
    other: Any = load_model("tiny")
    MegatronGenerationWorker(other, parse_generation_config(given | {"colocated": False}))
    assert not hasattr(other.model.decoder, "cudagraph_manager")


@pytest.mark.parametrize(
    ("model", "scope", "message"),
    [
        ("tiny", "layer", "whole block only"),
        ("tiny", "block", "RNG tracker"),
        (None, "block", "no transformer block"),
    ],
)
def test_what_cannot_have_them_is_refused_and_left_as_it_was(
    model: str | None, scope: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real manager refuses the random state of training, which no graph can record."""
    monkeypatch.setattr(cuda_graphs, "get_cuda_rng_tracker", CudaRNGStatesTracker)
    if model is None:
        shared: Any = torch.nn.Linear(1, 1)
        shared.config = SimpleNamespace(cuda_graph_impl="none")
    else:
        shared = load_model(model).model
    with pytest.raises(ConfigError, match=message):
        setup_colocated_cuda_graph_managers(
            shared, config_of(inference_cuda_graph_scope=scope).megatron
        )
    assert shared.config.cuda_graph_impl == "none"
