"""CUDA graphs of the engine's model: their scope, and managers for a model that training shares."""

from __future__ import annotations

from typing import Any

import torch

from tokenplane.engine_adapter.models.megatron_process import quiet_imports
from tokenplane.engine_adapter.worker.generation_config import MegatronGenerationConfig
from tokenplane.schemas.errors import ConfigError


def apply_inference_cuda_graph_scope(
    engine_model: Any, mcore_generation_config: MegatronGenerationConfig
) -> None:
    """Give the engine's model the configured scope of CUDA graphs; None leaves it as it is.

    Raises: ConfigError if the model has no graph managers: they are made with it, or by
    ``setup_colocated_cuda_graph_managers``.
    """
    scope = mcore_generation_config.inference_cuda_graph_scope
    if scope is None:
        return
    from megatron.core.transformer.enums import InferenceCudaGraphScope

    settings = engine_model.config
    if scope != "none" and settings.cuda_graph_impl != "local":
        raise ConfigError(
            "the model was built without CUDA graph managers",
            key="inference_cuda_graph_scope",
            expected="cuda_graph_impl='local' when the model is built",
            got=settings.cuda_graph_impl,
        )
    settings.inference_cuda_graph_scope = InferenceCudaGraphScope[scope]


def setup_colocated_cuda_graph_managers(
    model: Any, mcore_generation_config: MegatronGenerationConfig
) -> int:
    """Make the graph managers of a model that was built, for training, without them; how many.

    0 if no graphs are wanted or the model has its managers: calling it again changes nothing. Only
    the block scope is offered: a block's manager acts in inference mode alone, while a layer's
    would record training steps too. Must run before the engine is made.

    Raises: ConfigError for the layer scope, for a model that has no transformer block, or if the
    process's random state cannot be recorded in graphs (Megatron's inference RNG tracker can).
    """
    scope = mcore_generation_config.inference_cuda_graph_scope
    settings = model.config
    if scope in (None, "none") or settings.cuda_graph_impl == "local":
        return 0
    if scope != "block":
        raise ConfigError(
            "a shared model gets graphs of the whole block only",
            key="inference_cuda_graph_scope",
            expected="block",
            got=scope,
        )
    with quiet_imports():
        from megatron.core.transformer import cuda_graphs
        from megatron.core.transformer.enums import InferenceCudaGraphScope
        from megatron.core.transformer.transformer_block import TransformerBlock

    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    if not blocks:
        raise ConfigError("the model has no transformer block", got=type(model).__name__)
    before = settings.cuda_graph_impl, settings.inference_cuda_graph_scope
    settings.cuda_graph_impl = "local"
    settings.inference_cuda_graph_scope = InferenceCudaGraphScope.block
    # The first manager moves this thread to a stream of its own; training shall stay where it is.
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    try:
        managers = [cuda_graphs.CudaGraphManager(settings, need_backward=False) for _ in blocks]
    except Exception as error:
        settings.cuda_graph_impl, settings.inference_cuda_graph_scope = before
        if not isinstance(error, AssertionError):
            raise
        raise ConfigError(
            f"CUDA graph managers cannot be made here: {error}",
            key="inference_cuda_graph_scope",
            expected="model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True) before",
        ) from error
    finally:
        if stream is not None:
            torch.cuda.set_stream(stream)
    for block, manager in zip(blocks, managers, strict=True):
        block.cudagraph_manager = manager
    return len(blocks)
