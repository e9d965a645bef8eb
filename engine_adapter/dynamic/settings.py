"""How a dynamic engine is sized and scheduled: settings, and Megatron's config from them."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tokenplane.engine_adapter.config_errors import LONGEST_TIMEOUT_S, config_error
from tokenplane.engine_adapter.engine import EngineInfo
from tokenplane.schemas.errors import ConfigError


class DynamicSettings(BaseModel):
    """One engine's limits and policies."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    max_sequence_length: int | None = Field(default=None, ge=2)
    """Prompt and generation together; None takes the model's."""
    max_live_requests: int = Field(default=64, ge=1)
    """Computed together; more wait in order."""
    max_step_tokens: int = Field(default=8192, ge=2)
    """Most tokens of one forward. A prompt that is longer needs ``chunked_prefill``; without it the
    limit is raised to one longest sequence."""
    block_tokens: int = Field(default=256, ge=1)
    """Positions of one KV block; FlashAttention 2 wants a multiple of 256."""
    max_kv_bytes: int | None = Field(default=None, ge=1)
    """Memory for the KV cache; None takes what all live requests need at their longest."""
    chunked_prefill: bool = False
    """Compute long prompts in several steps."""
    prefix_caching: bool = False
    """Share KV blocks of equal prompt prefixes."""
    prefix_eviction: Literal["ref_zero", "lru"] = "lru"
    """When an unused cached block goes: at once, or when room is needed."""
    keep_prefixes_at_refit: bool = False
    """False: a weight update forgets cached prefixes, since their keys and values are of the old
    weights. True keeps them, and the rows' KV epochs show it."""
    scheduling: Literal["legacy"] = "legacy"
    """Megatron's other mode, async, moves the epoch boundary by one token, crashes in a
    recompute-suspend with live requests and refuses routing replay."""
    num_cuda_graphs: int | None = Field(default=None, ge=1)
    """Most CUDA graphs to capture, where the model was built for them; None lets Megatron say."""
    switch_interval_s: float = Field(default=0.0005, gt=0)
    """How long another thread may keep Python's interpreter lock while the engine waits for it;
    for the whole process. Python's own 5 ms is half a decoding step, several times a step."""
    start_timeout_s: float = Field(default=300.0, gt=0, le=LONGEST_TIMEOUT_S)
    """For building the engine, the capture of its CUDA graphs included."""

    coordinator_timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_TIMEOUT_S)
    """How long the coordinator may forward nothing while a request is under way."""

    @model_validator(mode="after")
    def _kept_prefixes_show(self) -> DynamicSettings:
        if self.keep_prefixes_at_refit and self.chunked_prefill:
            raise ValueError(
                "keep_prefixes_at_refit with chunked_prefill: a later chunk may find a stale "
                "block, which the KV epochs would not show"
            )
        return self

    @property
    def reason(self) -> str:
        """What the rows record about how weights and cached keys mix."""
        parts = [f"{self.scheduling} scheduling"]
        if self.prefix_caching:
            kept = "kept" if self.keep_prefixes_at_refit else "cleared"
            parts.append(f"prefix cache {kept} at refit")
        return ", ".join(parts)


def parse_settings(values: dict[str, Any]) -> DynamicSettings:
    """Checked settings. Raises: ConfigError, naming the first wrong key."""
    try:
        return DynamicSettings.model_validate(values)
    except ValidationError as error:
        raise config_error(error) from error


def inference_config(
    settings: DynamicSettings, info: EngineInfo, model_config: Any, extra: dict[str, Any]
) -> Any:
    """Megatron's ``InferenceConfig``.

    ``info`` must have the effective ``max_sequence_length``. ``extra``: further fields, already
    typed (see ``worker.generation_config``); they cannot change what this project relies on.

    Raises: ConfigError for an ``extra`` that does, or if the KV memory cannot hold one request.
    """
    from megatron.core.inference.config import InferenceConfig, PrefixCachingEvictionPolicy

    longest = info.max_sequence_length
    blocks = math.ceil(longest / settings.block_tokens)
    block_bytes = _block_bytes(settings.block_tokens, model_config)
    # One block more: Megatron keeps a dummy one.
    wanted = (settings.max_live_requests * blocks + 1) * block_bytes
    nbytes = settings.max_kv_bytes or wanted
    if nbytes < (blocks + 1) * block_bytes:
        raise ConfigError(
            "max_kv_bytes does not hold one request of the maximum length",
            expected=f">= {(blocks + 1) * block_bytes}",
            got=nbytes,
        )
    step_tokens = settings.max_step_tokens
    if not settings.chunked_prefill:
        step_tokens = max(step_tokens, longest)
    fixed: dict[str, Any] = {
        "max_sequence_length": longest,
        "max_requests": settings.max_live_requests,
        # Megatron pads a step to a multiple of 64 and fails where the limit is no such multiple.
        "max_tokens": -(-max(step_tokens, settings.max_live_requests) // 64) * 64,
        "block_size_tokens": settings.block_tokens,
        "buffer_size_gb": (nbytes + 1) / 1024**3,
        "enable_chunked_prefill": settings.chunked_prefill,
        "enable_prefix_caching": settings.prefix_caching,
        "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy(settings.prefix_eviction),
        "async_sched_mode": settings.scheduling,
        "num_cuda_graphs": settings.num_cuda_graphs,
        "materialize_only_last_token_logits": True,
        # Our sampling backend answers per request: raw or processed.
        "logprobs_mode": "processed_logprobs",
    }
    clash = fixed.keys() & extra.keys()
    if clash:
        raise ConfigError("an engine setting is given twice", key=min(clash))
    return InferenceConfig(**fixed, **extra)


def _block_bytes(block_tokens: int, config: Any) -> int:
    groups = config.num_query_groups or config.num_attention_heads
    size = config.params_dtype.itemsize
    return int(2 * config.num_layers * block_tokens * groups * config.kv_channels * size)
