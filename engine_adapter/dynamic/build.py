"""Assembles a dynamic engine: the tokenizer that it need not have, context, controller, engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tokenplane.engine_adapter.dynamic.attention import install_torch_attention
from tokenplane.engine_adapter.dynamic.core import HookedEngine, StepController
from tokenplane.engine_adapter.dynamic.settings import DynamicSettings, inference_config
from tokenplane.engine_adapter.engine import EngineInfo
from tokenplane.engine_adapter.models.megatron_process import quiet_imports
from tokenplane.engine_adapter.sampling_stops import Detokenize
from tokenplane.schemas.errors import ConfigError

_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
)


class IdTokenizer:
    """What Megatron calls its tokenizer, for an engine that is given ids and asked for ids.

    Picklable, since the coordinator's process gets a copy.
    """

    eod = -1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Raises: ConfigError; texts are rendered and encoded before they reach the engine."""
        raise ConfigError("this engine takes token ids, not text", got=f"{len(text)} characters")

    def detokenize(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """Always "": text is made from the ids elsewhere, and decoding it twice costs time."""
        return ""


def effective_info(info: EngineInfo, settings: DynamicSettings, device: torch.device) -> EngineInfo:
    """``info`` of a dynamic engine under ``settings``.

    Raises: ConfigError if the settings allow longer sequences than the model.
    """
    longest = settings.max_sequence_length or info.max_sequence_length
    if longest > info.max_sequence_length:
        raise ConfigError(
            "max_sequence_length is out of range",
            expected=f"2 to {info.max_sequence_length}",
            got=longest,
        )
    version = importlib.metadata.version("megatron-core")
    return replace(
        info,
        max_sequence_length=longest,
        engine=f"megatron-core {version} dynamic {device.type} ({settings.reason})",
    )


def core_builder(
    model: torch.nn.Module,
    info: EngineInfo,
    settings: DynamicSettings,
    detokenize: Detokenize | None,
    extra: dict[str, Any],
) -> Callable[[], HookedEngine]:
    """A function that builds the engine; call it on the engine thread, in its event loop.

    ``info`` is the effective one; ``extra`` goes into Megatron's ``InferenceConfig``.

    Raises: ConfigError for a model that is split over ranks: commands reach this process only.
    """
    config: Any = model.config
    for name in _PARALLEL:
        if getattr(config, name, 1) != 1:
            raise ConfigError("the model is split over ranks", key=name, expected=1)
    megatron_config = inference_config(settings, info, config, extra)

    def build() -> HookedEngine:
        install_torch_attention()
        with quiet_imports():
            from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
            from megatron.core.inference.model_inference_wrappers.gpt import gpt_inference_wrapper

            _own_routers(model)
            context = DynamicInferenceContext(config, megatron_config)
            wrapped = gpt_inference_wrapper.GPTInferenceWrapper(model, context)
            controller = StepController(wrapped, IdTokenizer(info.vocab_size))
            return HookedEngine(controller, context, info, detokenize)

    return build


def _own_routers(model: torch.nn.Module) -> None:
    """Make this model's routers the ones that Megatron records.

    Megatron keeps every router ever built in one global list and takes its length for the number of
    layers, so a second model in the process would spoil the routes of the first.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay

    routers = [getattr(module, "router_replay", None) for module in model.modules()]
    RouterReplay.global_router_replay_instances[:] = [r for r in routers if r is not None]
