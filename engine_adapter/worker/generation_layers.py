"""Megatron's inference-optimized layers, and the MXFP8 storage that their experts need."""

from __future__ import annotations

import inspect
from typing import Any

from tokenplane.schemas.errors import ConfigError

_STORAGE = {"torch": "triton", "flashinfer": "flashinfer"}
"""MXFP8 storage by grouped-GEMM backend: torch's scaled GEMM reads what the Triton kernel
swizzles."""


def inference_optimized_transformer_layer_spec(config: Any) -> Any:
    """The generic GPT layer spec of Megatron's inference linears, for ``config``.

    Raises: what Megatron raises without TransformerEngine (AssertionError).
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_inference_spec

    return get_gpt_layer_with_inference_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        qk_l2_norm=config.qk_l2_norm,
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )


def configure_inference_optimized_layer_spec(model_provider: Any) -> None:
    """Select the inference layers on a Bridge provider, if it is the generic one that needs it.

    Left alone: a provider without ``transformer_impl='inference_optimized'``; one that is no
    ``GPTModelProvider`` (hybrid stacks resolve it in their own spec); and one with a spec of its
    own, since model-specific providers already dispatch it and give dense and expert layers
    different specs, which the uniform one would turn into experts everywhere.
    """
    from tokenplane.engine_adapter.cpu.megatron_cpu_shim import importable_bridge

    if getattr(model_provider, "transformer_impl", None) != "inference_optimized":
        return
    with importable_bridge():
        from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec
    if not isinstance(model_provider, GPTModelProvider):
        return
    if inspect.unwrap(model_provider.transformer_layer_spec) is not default_layer_spec:
        return
    model_provider.transformer_layer_spec = inference_optimized_transformer_layer_spec


def resolve_mxfp8_refit_backend(model_config: Any) -> str:
    """The MXFP8 storage ("triton" or "flashinfer") that the grouped-GEMM backend reads.

    Raises: ConfigError for a backend that knows bf16 only, or an unknown one.
    """
    backend = model_config.inference_grouped_gemm_backend
    name = str(getattr(backend, "value", backend))
    if name not in _STORAGE:
        raise ConfigError(
            "this grouped-GEMM backend has no MXFP8 storage",
            key="inference_grouped_gemm_backend",
            expected=" or ".join(_STORAGE),
            got=name,
        )
    return _STORAGE[name]
