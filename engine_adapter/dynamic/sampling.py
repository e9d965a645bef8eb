"""Sampling for Megatron's dynamic engine: per-request seeds, top-k with top-p, both log-prob modes.

Megatron's own backend draws for the whole batch from one generator, so an answer depends on what
else is in the batch, and it refuses top-k together with top-p. This one is a ``Sampling`` of
Megatron's like its own two. It draws as ``sampling`` does on the CPU engine (invert the cumulative
distribution in vocabulary order with one float64 uniform of the request's own generator), for all
rows at once on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tokenplane.engine_adapter.engine import SamplingParams
from tokenplane.engine_adapter.models.megatron_process import quiet_imports
from tokenplane.schemas.errors import ConfigError

with quiet_imports():
    from megatron.core.inference.sampling.base import Sampling


class SampledRow(Protocol):
    """What the backend needs of the request behind a row of logits."""

    sampling: SamplingParams
    greedy: bool

    def draw(self) -> float: ...


class RowSource(Protocol):
    """Tells which request is behind each active row of a context."""

    def rows(self, context: Any) -> Sequence[SampledRow | None]:
        """In the context's order; None for a row whose sample is not used."""
        ...


class RequestSampling(Sampling):
    """Samples each row by its own request's parameters and generator."""

    def __init__(self, source: RowSource) -> None:
        self._source = source

    def sample_kernel(
        self,
        logits: torch.Tensor,
        n: int,
        context: Any,
        *,
        no_top_k: bool,
        no_top_p: bool,
        gather_indices: torch.Tensor | None = None,
        token_to_request_index: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        eager: bool = False,
        cache_key: Any = None,
    ) -> torch.Tensor:
        """int64[n] ids, -1 where the logits are not finite. The signature is Megatron's."""
        if token_to_request_index is not None:
            raise ConfigError("speculative decoding is not offered with per-request sampling")
        rows = logits[:n] if gather_indices is None else logits[gather_indices[:n]]
        sources = self._source.rows(context)[:n]
        tokens = rows.argmax(dim=-1)
        drawn = [i for i, source in enumerate(sources) if source is not None and not source.greedy]
        if drawn:
            index = torch.tensor(drawn, device=rows.device)
            chosen = [source for source in sources if source is not None and not source.greedy]
            log_probs = processed_rows(rows[index], [source.sampling for source in chosen])
            uniforms = torch.tensor([source.draw() for source in chosen], dtype=torch.float64)
            tokens[index] = _draw(log_probs, uniforms.to(rows.device))
        finite = torch.logsumexp(rows.float(), dim=-1).isfinite()
        tokens = torch.where(finite, tokens, torch.full_like(tokens, -1))
        if output is None:
            return tokens
        output.copy_(tokens)
        return output

    def log_probs_kernel(
        self,
        logits: torch.Tensor,
        context: Any,
        *,
        token_to_request_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32[rows, V]: raw or processed, as each row's request asks."""
        sources = list(self._source.rows(context))
        if token_to_request_index is not None:
            sources = [sources[i] for i in token_to_request_index.tolist()]
        result = torch.log_softmax(logits.float(), dim=-1)
        processed = [
            (row, source)
            for row, source in enumerate(sources)
            if source is not None and source.sampling.logprobs_mode == "processed"
        ]
        if processed:
            index = torch.tensor([row for row, _ in processed], device=logits.device)
            settings = [source.sampling for _, source in processed]
            result[index] = processed_rows(logits[index], settings).float()
        return result


def processed_rows(logits: torch.Tensor, settings: Sequence[SamplingParams]) -> torch.Tensor:
    """float64[n, V]: log-probabilities after temperature, then top-k, then top-p, row by row.

    ``-inf`` is excluded; a temperature of 0 leaves the most likely token alone.
    """
    device, vocab = logits.device, logits.shape[-1]
    rows = logits.to(torch.float64)
    rows = rows - rows.max(dim=-1, keepdim=True).values
    divisor = [s.temperature or 1.0 for s in settings]
    rows = rows / torch.tensor(divisor, dtype=torch.float64, device=device)[:, None]
    top_k = [s.top_k if 0 < s.top_k < vocab else vocab for s in settings]
    if min(top_k) < vocab:
        best = rows.topk(max(k for k in top_k if k < vocab), dim=-1).values
        last = torch.tensor([min(k, best.shape[-1]) - 1 for k in top_k], device=device)
        limit = best.gather(-1, last[:, None])
        cut = torch.tensor([k < vocab for k in top_k], device=device)[:, None]
        rows = rows.masked_fill(cut & (rows < limit), -math.inf)
    top_p = [s.top_p for s in settings]
    if min(top_p) < 1:
        ordered, order = rows.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        limit = torch.tensor(
            [p if p < 1 else math.inf for p in top_p], dtype=torch.float64, device=device
        )
        keep = torch.zeros_like(rows, dtype=torch.bool)
        keep.scatter_(-1, order, before < limit[:, None])
        rows = rows.masked_fill(~keep, -math.inf)
    if any(s.temperature == 0 for s in settings):
        greedy = torch.tensor([s.temperature == 0 for s in settings], device=device)[:, None]
        only = torch.full_like(rows, -math.inf)
        only.scatter_(-1, rows.argmax(dim=-1, keepdim=True), 0.0)
        rows = torch.where(greedy, only, rows)
    return torch.log_softmax(rows, dim=-1)


def _draw(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64[n]: the first id of each row whose cumulative mass exceeds its point."""
    cumulative = log_probs.exp().cumsum(dim=-1)
    points = uniforms[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, points, right=True)[:, 0]
    # Rounding may put a point on the total; the last id with any mass is meant then.
    ids = torch.arange(log_probs.shape[-1], device=log_probs.device)
    last = torch.where(log_probs.isfinite(), ids, ids.new_zeros(())).amax(dim=-1)
    return torch.minimum(found, last)
