"""The generation configuration of a training run: typed, frozen, every key known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tokenplane.engine_adapter.config_errors import LONGEST_TIMEOUT_S, config_error

CoordinatorPolicyName = Literal["load_balanced", "first_prefix_block", "longest_prefix"]


class _Section(BaseModel):
    # Strict: "64" is no number of requests, and 1 no switch.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class MegatronGenerationConfig(_Section):
    """The part of the configuration that only Megatron's engine reads."""

    buffer_size_gb: float | None = Field(default=None, gt=0)
    """KV memory; None takes what all live requests need at their longest."""
    block_size_tokens: int = Field(default=256, ge=1)
    """Positions of one KV block."""
    max_requests: int = Field(default=64, ge=1)
    """Computed together."""
    max_tokens: int = Field(default=8192, ge=2)
    """Of one forward."""
    max_sequence_length: int | None = Field(default=None, ge=2)
    """None takes the model's."""
    enable_chunked_prefill: bool = False
    """Compute long prompts in several steps."""
    enable_prefix_caching: bool = False
    """Share KV blocks of equal prompt prefixes."""
    prefix_caching_eviction_policy: Literal["ref_zero", "lru"] = "lru"
    """When an unused cached block goes."""
    prefix_caching_coordinator_policy: CoordinatorPolicyName | None = None
    """How the coordinator picks an engine; None: by prefix if prefixes are cached, else by load."""
    prefix_caching_routing_alpha: float | None = Field(default=None, ge=0, le=1)
    """Weight of the prefix against the load. Optional: Megatron's default where None. Likewise:"""
    use_flashinfer_fused_rope: bool | None = None
    """Rotary embedding by flashinfer."""
    cuda_graph_mixed_prefill_count: int | None = Field(default=None, ge=0)
    """Mixed prefill graphs to capture."""
    cuda_graph_max_tokens: int | None = Field(default=None, ge=1)
    """Of the largest prefill graph."""
    cuda_graph_all_prefills: bool | None = None
    """Whether prefill graphs reach up to ``max_tokens``."""
    cuda_graph_sizing_distribution: Literal["exponential", "linear"] | None = None
    """How the sizes of the graphs are spaced."""
    use_cuda_graphs_for_non_decode_steps: bool | None = None
    """Whether prefill steps use graphs."""
    static_kv_memory_pointers: bool | None = None
    """Keep the KV cache's address across a suspend (needs unified memory or a memory saver)."""
    unified_memory_level: int | None = Field(default=None, ge=0, le=1)
    """1 puts the KV cache into unified memory."""
    use_synchronous_zmq_collectives: bool | None = None
    """For experts over several ranks."""
    num_cuda_graphs: int | None = Field(default=None, ge=1)
    """Most graphs to capture."""
    inference_cuda_graph_scope: Literal["none", "layer", "block"] | None = None
    """Who owns the graphs; None leaves the model's own setting."""
    recompute_kv_cache_after_weight_updates: bool = False
    """Drop live requests' KV cache round a refit, instead of keeping it and recording its epoch."""
    keep_prefix_cache_after_weight_updates: bool = False
    """Keep cached prefixes of the old weights; the rows' KV epochs show them."""
    expose_http_server: bool = False
    """Serve the OpenAI API on each leader."""
    use_coordinator: bool = True
    """Send requests through Megatron's coordinator; False steps the engine directly."""

    @model_validator(mode="after")
    def _kept_prefixes_show(self) -> MegatronGenerationConfig:
        if self.keep_prefix_cache_after_weight_updates and self.enable_chunked_prefill:
            raise ValueError(
                "keep_prefix_cache_after_weight_updates with enable_chunked_prefill: a later chunk "
                "may find a stale block, which the KV epochs would not show"
            )
        return self


class GenerationConfig(_Section):
    """How answers are generated during a run."""

    backend: Literal["megatron"] = "megatron"
    """The engine family."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Of one answer."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """1 keeps all."""
    top_k: int | None = Field(default=None, ge=1)
    """None keeps all."""
    stop_token_ids: tuple[int, ...] | None = Field(default=None, strict=False)
    """None: the tokenizer's end of sequence."""
    stop_strings: tuple[str, ...] = Field(default=(), strict=False)
    """Of every sample, beside its own."""
    pad_token_id: int | None = Field(default=None, ge=0)
    """None: the tokenizer's."""
    colocated: bool = False
    """The engine shares its GPUs with training."""
    load_weights: Literal["real", "placeholder"] | None = None
    """What the engine starts with; see ``configure_generation_config``."""
    speculative_decoding: bool = False
    """The trainer's policy has a drafter. It decides what ``load_weights`` becomes, no more: this
    engine proposes no tokens."""
    control_timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_TIMEOUT_S)
    """For pause, suspend, resume and the like."""
    start_timeout_s: float = Field(default=300.0, gt=0, le=LONGEST_TIMEOUT_S)
    """For the engine with its CUDA graphs, and for the HTTP server."""
    request_timeout_s: float = Field(default=1800.0, gt=0, le=LONGEST_TIMEOUT_S)
    """For one batch of answers. The time that a colocated engine stands down is not counted."""
    megatron: MegatronGenerationConfig = MegatronGenerationConfig()
    """The engine's own part."""


def parse_generation_config(values: Mapping[str, Any]) -> GenerationConfig:
    """Checked configuration. Raises: ConfigError for an unknown key or value; names the first."""
    try:
        return GenerationConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error) from error
