"""GPTModels on a GPU, of Megatron's stock parts: from a shape, or the twin of a CPU model.

TransformerEngine is not needed. The CPU's seams (``cpu.attention``) have no parameters, so a CPU
model and its twin have the same names and shapes, and the same weights give the same answers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from tokenplane.engine_adapter.models.megatron_build import GptShape
from tokenplane.engine_adapter.models.megatron_process import quiet_imports, require_process
from tokenplane.schemas.errors import ConfigError

GraphScope = Literal["none", "layer", "block"]


def require_gpu_process(seed: int = 1234) -> None:
    """Make this process a Megatron world of one rank with a GPU; idempotent.

    NCCL beside gloo over an in-memory store, and Megatron's inference RNG tracker, which CUDA
    graphs need. Raises: ConfigError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available")
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    require_process()
    with quiet_imports():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)


def build_gpu_gpt(
    shape: GptShape, *, dtype: torch.dtype = torch.bfloat16, graphs: GraphScope = "none"
) -> torch.nn.Module:
    """A GPTModel of ``shape`` on the current GPU, in evaluation mode, randomly initialized.

    ``graphs``: who owns its CUDA graphs; the engine captures them when it is built. Not with
    experts: their graphs need padding that loses routes.

    Raises: ConfigError.
    """
    require_gpu_process()
    if shape.num_experts is not None and graphs != "none":
        raise ConfigError("CUDA graphs are not offered with experts", expected="none", got=graphs)
    with quiet_imports():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        settings: dict[str, Any] = {}
        if graphs != "none":
            settings = {"cuda_graph_impl": "local", "inference_cuda_graph_scope": graphs}
        if shape.num_experts is not None:
            settings |= {
                "num_moe_experts": shape.num_experts,
                "moe_router_topk": shape.experts_per_token,
                "moe_ffn_hidden_size": shape.ffn_hidden_size,
                "moe_token_dispatcher_type": "allgather",
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
                "moe_enable_routing_replay": True,
            }
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
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # These fusions are parts of TransformerEngine or Apex.
            apply_rope_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            **settings,
        )
        spec = get_gpt_layer_local_spec(
            num_experts=shape.num_experts,
            moe_grouped_gemm=False,
            normalization="RMSNorm",
            qk_layernorm=False,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_sequence_length,
            position_embedding_type="rope",
            rotary_base=shape.rotary_base,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            parallel_output=True,
        )
    model = model.cuda().to(dtype).eval()
    torch.cuda.synchronize()  # the engine's thread has another stream
    return model


def shape_of(model: Any) -> GptShape:
    """The shape of a GPTModel that ``models.megatron_build.build_gpt`` made."""
    config = model.config
    inv_freq = model.rotary_pos_emb.inv_freq.double()
    # inv_freq[1] is base ** (-2 / channels).
    base = float(inv_freq[1] ** (-config.kv_channels / 2))
    return GptShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        layernorm_epsilon=config.layernorm_epsilon,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        rotary_base=round(base),
        tied_embeddings=model.share_embeddings_and_output_weights,
        num_experts=config.num_moe_experts,
        experts_per_token=config.moe_router_topk or 2,
    )


def gpu_twin(
    model: torch.nn.Module, *, dtype: torch.dtype = torch.float32, graphs: GraphScope = "none"
) -> torch.nn.Module:
    """A model on the GPU with the shape and the weights of a CPU model.

    Raises: ConfigError if their parameters do not correspond.
    """
    twin = build_gpu_gpt(shape_of(model), dtype=dtype, graphs=graphs)
    source, target = dict(model.named_parameters()), dict(twin.named_parameters())
    if source.keys() != target.keys():
        name = min(source.keys() ^ target.keys())
        raise ConfigError("the GPU model has other parameters than the CPU model", key=name)
    with torch.no_grad():
        for name, parameter in target.items():
            parameter.copy_(source[name])
    torch.cuda.synchronize()
    return twin
