"""The seams through which a stock Megatron GPTModel runs batched, with a KV cache, on the CPU.

Nothing of Megatron is patched. Three modules are put where Megatron's own layer spec and model
attributes let them be put, because the stock ones call CUDA on the way:

=====================  =====================================  ================================
seam                   stock module                           why it cannot run here
=====================  =====================================  ================================
``core_attention``     ``DotProductAttention``                score buffer and RNG on CUDA
``rotary_pos_emb``     ``RotaryEmbedding.get_emb``            moves its table to CUDA
``MoESubmodules``      ``TopKRouter.gating``                  moves its weights to CUDA
=====================  =====================================  ================================

The first two also read the step's plan, which makes the flattened batch: rotary angles are taken
at each token's own position, and attention runs per request over that request's KV cache.
Embedding, norms, projections, MLP and output layer see one long row. Without a plan the same
modules compute an ordinary causal forward over ``[batch, sequence]``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional

from tokenplane.engine_adapter.models.megatron_process import quiet_imports

with quiet_imports():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_utils import router_gating_linear
    from megatron.core.transformer.moe.router import TopKRouter

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tokenplane.engine_adapter.cpu.batch import StepPlan, StepSlice

_ROUTER_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}


class _ActivePlan(threading.local):
    """The plan of the step that this thread is computing, if any.

    Per thread, so that a forward elsewhere (a check, a reference) is never taken for a step.
    """

    plan: StepPlan | None = None


_active = _ActivePlan()


@contextmanager
def step_plan(plan: StepPlan) -> Iterator[None]:
    """Within this block, forwards on this thread compute ``plan``."""
    _active.plan = plan
    try:
        yield
    finally:
        _active.plan = None


class StepAttention(MegatronModule):
    """Causal grouped-query attention by SDPA: per request in a step, per row otherwise."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object = None,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: object = None,
    ) -> None:
        """The signature is Megatron's ``CoreAttentionBuilder``; ``layer_number`` counts from 1."""
        super().__init__(config=config)
        self.layer = layer_number - 1
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: object = None,
    ) -> torch.Tensor:
        """``query`` [s, b, heads, d], ``key`` and ``value`` [s, b, groups, d] -> [s, b, heads * d].

        ``attention_mask`` is ignored: the attention is causal.
        """
        plan = _active.plan
        if plan is None:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True
            )
            return out.permute(2, 0, 1, 3).flatten(2)
        result = torch.empty_like(query)
        for part in plan.slices:
            columns = slice(part.start, part.end)
            keys, values = part.cache.append(self.layer, key[columns, 0], value[columns, 0])
            result[columns, 0] = self._attend(query[columns, 0], keys, values, part)
        return result.flatten(2)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: StepSlice
    ) -> torch.Tensor:
        """[t, heads, d] over [groups, n, d]: the t last of the n positions attend causally."""
        count, heads, dim = query.shape
        groups, total, _ = keys.shape
        if count == 1:
            # The heads of a group share its keys: they are that group's queries, without a mask.
            grouped = query.view(1, groups, heads // groups, dim)
            out = functional.scaled_dot_product_attention(
                grouped, keys[None], values[None], scale=self.softmax_scale
            )
            return out.view(1, heads, dim)
        mask = None
        if total > count:
            mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


class StepRotary(torch.nn.Module):
    """Rotary angles at the positions of the step's tokens, or at 0..n-1 without a plan.

    Put at ``model.rotary_pos_emb``; takes its frequencies from the module that stood there.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.get_rotary_seq_len = stock.get_rotary_seq_len
        self.register_buffer("inv_freq", stock.inv_freq.detach().cpu(), persistent=False)
        self._interleaved: bool = stock.rotary_interleaved
        self._interpolation: float | None = stock.seq_len_interpolation_factor

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: object = None
    ) -> torch.Tensor:
        """float32[T, 1, 1, d]: the angle of every token and channel."""
        plan = _active.plan
        inv_freq: torch.Tensor = self.get_buffer("inv_freq")
        if plan is None:
            positions = torch.arange(offset, offset + max_seq_len, dtype=inv_freq.dtype)
        else:
            positions = plan.positions.to(inv_freq.dtype)
        if self._interpolation is not None:
            positions = positions / self._interpolation
        angles = torch.outer(positions, inv_freq)
        if self._interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]


class CpuTopKRouter(TopKRouter):
    """Megatron's router with its gating computed where the weights are."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Router logits [..., experts] in the configured dtype."""
        dtype = _ROUTER_DTYPES[self.config.moe_router_dtype] or input.dtype
        logits: torch.Tensor = router_gating_linear(input, self.weight, self.bias, dtype)
        return logits


def cpu_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local layer spec with the seams of this file in place."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )
    spec.submodules.self_attention.submodules.core_attention = StepAttention
    if config.num_moe_experts:
        spec.submodules.mlp.keywords["submodules"].router = CpuTopKRouter
    return spec


def install_rotary(model: Any) -> None:
    """Put ``StepRotary`` in the place of the model's own rotary embedding."""
    if not isinstance(model.rotary_pos_emb, StepRotary):
        model.rotary_pos_emb = StepRotary(model.rotary_pos_emb)
