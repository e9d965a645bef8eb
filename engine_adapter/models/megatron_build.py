"""Builds a dense or mixture-of-experts GPTModel on the CPU, with the seams of ``cpu.attention``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenplane.engine_adapter.models.megatron_process import quiet_imports, require_process

CPU_SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Every fusion is a CUDA kernel or a compilation that a CPU start would pay for.
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
"""TransformerConfig fields without which a forward leaves the CPU."""


@dataclass(frozen=True, slots=True)
class GptShape:
    """The shape of a Llama-like model: RMSNorm, SwiGLU, rotary, no biases, grouped queries."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    layernorm_epsilon: float
    vocab_size: int
    max_sequence_length: int
    rotary_base: float
    tied_embeddings: bool
    num_experts: int | None = None
    experts_per_token: int = 2


def build_gpt(shape: GptShape) -> torch.nn.Module:
    """A GPTModel of ``shape`` in float32 and evaluation mode; its weights are not initialized."""
    require_process()
    with quiet_imports():
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        from tokenplane.engine_adapter.cpu.attention import cpu_layer_spec, install_rotary

        config = TransformerConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_query_groups,
            kv_channels=shape.kv_channels,
            ffn_hidden_size=shape.ffn_hidden_size,
            layernorm_epsilon=shape.layernorm_epsilon,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            perform_initialization=False,
            **CPU_SETTINGS,
            **_expert_settings(shape),
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=cpu_layer_spec(config),
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_sequence_length,
            position_embedding_type="rope",
            rotary_base=shape.rotary_base,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            parallel_output=True,
        )
    install_rotary(model)
    return model.eval()


def _expert_settings(shape: GptShape) -> dict[str, Any]:
    if shape.num_experts is None:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn_hidden_size,
        "moe_token_dispatcher_type": "allgather",  # alltoall opens a CUDA stream
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_enable_routing_replay": True,
    }
