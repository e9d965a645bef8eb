"""From the generation configuration to Megatron's settings: routing, options, sampling."""

from __future__ import annotations

from typing import Any

from tokenplane.engine_adapter.dynamic.settings import DynamicSettings, parse_settings
from tokenplane.engine_adapter.worker.generation_config import (
    CoordinatorPolicyName,
    GenerationConfig,
    MegatronGenerationConfig,
)
from tokenplane.schemas.errors import ConfigError

OPTIONAL = (
    "prefix_caching_routing_alpha",
    "use_flashinfer_fused_rope",
    "cuda_graph_mixed_prefill_count",
    "cuda_graph_max_tokens",
    "cuda_graph_all_prefills",
    "cuda_graph_sizing_distribution",
    "use_cuda_graphs_for_non_decode_steps",
    "static_kv_memory_pointers",
    "unified_memory_level",
    "use_synchronous_zmq_collectives",
)
"""Options of ``MegatronGenerationConfig`` that Megatron knows by the same name."""


def resolve_coordinator_policy(
    mcore_generation_config: MegatronGenerationConfig,
) -> CoordinatorPolicyName:
    """The coordinator's routing policy, for the engine and every frontend alike.

    Resolved once: if the engine routed by prefix and the frontends did not hash, the coordinator
    would see no hashes and silently balance the load. Unset, it follows the prefix cache.

    Raises: ConfigError for a policy that needs prefix caching while that is off.
    """
    policy = mcore_generation_config.prefix_caching_coordinator_policy
    if policy is None:
        return (
            "first_prefix_block"
            if mcore_generation_config.enable_prefix_caching
            else "load_balanced"
        )
    if policy != "load_balanced" and not mcore_generation_config.enable_prefix_caching:
        raise ConfigError(
            "routing by prefix needs prefix caching",
            key="prefix_caching_coordinator_policy",
            got=policy,
        )
    return policy


def apply_optional_inference_config_kwargs(
    inference_config_kwargs: dict[str, Any], mcore_generation_config: MegatronGenerationConfig
) -> None:
    """Put the options that are set into the arguments of ``InferenceConfig``, in its own types;
    unset ones stay away, so that Megatron's defaults hold."""
    from megatron.core.inference.config import CudaGraphSizingDistribution

    for name in OPTIONAL:
        value = getattr(mcore_generation_config, name)
        if name == "cuda_graph_sizing_distribution" and value is not None:
            value = CudaGraphSizingDistribution(value)
        if value is not None:
            inference_config_kwargs[name] = value


def http_sampling_defaults(generation_cfg: GenerationConfig) -> dict[str, float | int]:
    """Temperature, top-p and top-k for HTTP requests that omit them.

    Training recomputes log-probabilities under the configured sampling; a server that fell back to
    its own defaults would sample off-policy. ``top_k`` 0 is off.
    """
    return {
        "temperature": generation_cfg.temperature,
        "top_p": generation_cfg.top_p,
        "top_k": 0 if generation_cfg.top_k is None else generation_cfg.top_k,
    }


def to_dynamic_settings(config: GenerationConfig) -> DynamicSettings:
    """The dynamic engine's settings. Raises: ConfigError."""
    own = config.megatron
    values: dict[str, Any] = {
        "max_sequence_length": own.max_sequence_length,
        "max_live_requests": own.max_requests,
        "max_step_tokens": own.max_tokens,
        "block_tokens": own.block_size_tokens,
        "chunked_prefill": own.enable_chunked_prefill,
        "prefix_caching": own.enable_prefix_caching,
        "prefix_eviction": own.prefix_caching_eviction_policy,
        "keep_prefixes_at_refit": own.keep_prefix_cache_after_weight_updates,
        "num_cuda_graphs": own.num_cuda_graphs,
        "start_timeout_s": config.start_timeout_s,
        "coordinator_timeout_s": config.control_timeout_s,
    }
    if own.buffer_size_gb is not None:
        values["max_kv_bytes"] = int(own.buffer_size_gb * 1024**3)
    return parse_settings(values)


def to_megatron_extra(config: GenerationConfig) -> dict[str, Any]:
    """Further fields of Megatron's ``InferenceConfig``: the routing policy and what is optional."""
    from megatron.core.inference.config import PrefixCachingCoordinatorPolicy

    extra: dict[str, Any] = {
        "prefix_caching_coordinator_policy": PrefixCachingCoordinatorPolicy(
            resolve_coordinator_policy(config.megatron)
        )
    }
    apply_optional_inference_config_kwargs(extra, config.megatron)
    return extra
