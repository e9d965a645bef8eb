"""Paged attention in plain torch, for Megatron's dynamic batching where FlashAttention is absent.

Dynamic batching has no unfused path: ``Attention.flash_decode_and_prefill`` calls FlashAttention 2,
3 or 4 and refuses to run without one of them. On a GPU without such a package, and on the CPU in
tests, ``install_torch_attention`` puts the two functions of this file where Megatron looks for
FlashAttention 2. They are exact (scaled dot product over the gathered pages), work on any device,
synchronize nothing with the host, so CUDA graphs can record them, and are slower: they read the
whole block table of every request.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from tokenplane.engine_adapter.models.megatron_process import quiet_imports
from tokenplane.schemas.errors import ConfigError

_FULL_WINDOW = (-1, -1)


def install_torch_attention() -> str:
    """Make dynamic batching possible here; says which attention it will use.

    Returns "flash" where an installed FlashAttention serves, else "torch". Idempotent. It sets
    three names of ``megatron.core.transformer.attention`` for the whole process.
    """
    with quiet_imports():
        from megatron.core.transformer import attention
    if attention.HAVE_FA4 or attention.HAVE_FA3:
        return "flash"
    if attention.flash_attn_varlen_func not in (None, paged_prefill):
        return "flash"
    attention.flash_attn_varlen_func = paged_prefill
    attention.flash_attn_with_kvcache = paged_decode
    attention.is_fa_min_version = _any_version
    return "torch"


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] = _FULL_WINDOW,
    **unused: Any,
) -> torch.Tensor:
    """FlashAttention 2's ``flash_attn_with_kvcache`` for keys that are in the cache already.

    ``q`` [B, S, heads, d]: the last S positions of each request; ``k_cache`` and ``v_cache``
    [pages, page_size, groups, d]; ``cache_seqlens`` int[B], lengths with those S included;
    ``block_table`` int[B, n] of page numbers. Gives [B, S, heads, d]; rows of padding (length 0)
    hold no meaning.

    Raises: ConfigError for what is not offered: sliding windows, non-causal, log-sum-exp.
    """
    _require_plain(causal, window_size, unused.get("return_softmax_lse", False))
    count = q.shape[1]
    total = block_table.shape[1] * k_cache.shape[1]
    if q.device.type == "cpu":  # on a GPU asking for the longest would wait for the device
        total = min(total, max(int(cache_seqlens.max()), count))
    lengths = cache_seqlens.long()
    position = torch.arange(total, device=q.device)
    query_at = (
        lengths.clamp_min(count)[:, None] - count + torch.arange(count, device=q.device)[None]
    )
    mask = position[None, None] <= query_at[:, :, None]
    known = position[None] < lengths[:, None]
    return _attend(q, k_cache, v_cache, block_table, total, mask, known, softmax_scale)


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] = _FULL_WINDOW,
    block_table: torch.Tensor | None = None,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """FlashAttention 2's ``flash_attn_varlen_func`` over paged keys and values.

    ``q`` [T, heads, d] holds the queries of all requests one after another, ``cu_seqlens_q`` int
    [B+1] their bounds; the rest as in ``paged_decode``. Tokens behind the last bound (padding of a
    CUDA graph) give zeros.

    Raises: ConfigError for what is not offered.
    """
    _require_plain(causal, window_size, return_attn_probs)
    if block_table is None:
        raise ConfigError("paged attention needs a block table")
    batch = cu_seqlens_q.shape[0] - 1
    longest, total = int(max_seqlen_q), int(max_seqlen_k)
    starts, ends = cu_seqlens_q[:-1].long(), cu_seqlens_q[1:].long()
    lengths = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).long()
    token = torch.arange(q.shape[0], device=q.device)
    row = torch.searchsorted(ends, token, right=True)
    real = row < batch
    row = row.clamp_max(batch - 1)
    column = (token - starts[row]).clamp(0, longest - 1)
    # Padding goes to a scratch row: selecting it away would need its number on the host.
    padded = q.new_zeros(batch + 1, longest, *q.shape[1:])
    padded[torch.where(real, row, batch), column] = q
    position = torch.arange(total, device=q.device)
    offset = lengths - (ends - starts)
    query_at = torch.arange(longest, device=q.device)[None] + offset[:, None]
    mask = position[None, None] <= query_at[:, :, None]
    known = position[None] < lengths[:, None]
    out = _attend(padded[:batch], k, v, block_table, total, mask, known, softmax_scale)
    return torch.where(real[:, None, None], out[row, column], torch.zeros_like(q))


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    total: int,
    mask: torch.Tensor,
    known: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[B, S, heads, d] under ``mask`` bool[B, S, total]; ``known`` bool[B, total] has data."""
    keys = _gather(k_cache, block_table, total, known)
    values = _gather(v_cache, block_table, total, known)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys,
        values,
        attn_mask=mask[:, None],
        scale=scale,
        enable_gqa=q.shape[2] != keys.shape[1],
    )
    return out.transpose(1, 2)


def _gather(
    cache: torch.Tensor, block_table: torch.Tensor, total: int, known: torch.Tensor
) -> torch.Tensor:
    """[B, groups, total, d]: the pages of each request in order, unwritten positions zero.

    Unwritten memory may hold NaN, which a mask of minus infinity would let through.
    """
    size = cache.shape[1]
    pages = block_table[:, : -(-total // size)].long().clamp_min(0)
    taken = cache[pages].flatten(1, 2)[:, :total]
    taken = taken.masked_fill(~known[:, : taken.shape[1], None, None], 0)
    return taken.transpose(1, 2)


def _require_plain(causal: bool, window_size: tuple[int, int], wants_lse: bool) -> None:
    if not causal or tuple(window_size) != _FULL_WINDOW or wants_lse:
        raise ConfigError(
            "torch attention offers causal attention over the full window only",
            expected="causal, no window, no sinks",
            got=f"causal={causal}, window={window_size}, log-sum-exp={wants_lse}",
        )


def _any_version(version: str, check_equality: bool = True) -> bool:
    """Stands for Megatron's check of the FlashAttention version: these functions are ours."""
    return True
