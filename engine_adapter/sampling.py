"""Sampling of one token from one row of logits, with its raw or processed log-probability.

A token is drawn by inverting the cumulative distribution in vocabulary order with one float64
uniform from the request's own generator. The order does not depend on the values, so that a
last-bit difference of the logits (another batch size) moves the result only if the uniform falls
on a boundary, and each token costs exactly one draw whatever the settings.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import replace

import torch

from tokenplane.engine_adapter.engine import SamplingParams
from tokenplane.schemas.errors import EngineError


def resolve_seed(sampling: SamplingParams) -> SamplingParams:
    """The same parameters with a seed: the given one, or one drawn from the system."""
    if sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbits(63))


def make_generator(sampling: SamplingParams) -> torch.Generator:
    """A CPU generator for one request. ``sampling.seed`` must be resolved."""
    if sampling.seed is None:
        raise EngineError("the seed must be resolved before sampling")
    return torch.Generator(device="cpu").manual_seed(sampling.seed)


def sample_token(
    logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator
) -> tuple[int, float]:
    """``(token id, log-probability)`` from ``logits`` float[V] of one position.

    Raises: EngineError if the logits hold NaN or +inf, or no finite value (the request fails
    rather than receive an invented token).
    """
    row = logits.to(torch.float32)
    log_total = float(torch.logsumexp(row, dim=-1))
    if not math.isfinite(log_total):
        raise EngineError("the model gave logits that are not finite", got=log_total)
    if sampling.temperature == 0:
        token = int(row.argmax())
        if sampling.logprobs_mode == "processed":
            return token, 0.0
        return token, _raw_log_prob(row, token, log_total)
    log_probs = processed_log_probs(row, sampling)
    token = _draw(log_probs, generator)
    if sampling.logprobs_mode == "processed":
        return token, float(log_probs[token])
    return token, _raw_log_prob(row, token, log_total)


def _raw_log_prob(row: torch.Tensor, token: int, log_total: float) -> float:
    return min(0.0, float(row[token]) - log_total)  # rounding may leave a probability above one


def processed_log_probs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """float64[V]: log-probabilities after temperature, then top-k, then top-p; -inf is excluded.

    ``sampling.temperature`` must be > 0. At least the most likely token is kept.
    """
    row = logits.to(torch.float64)
    row = (row - row.max()) / sampling.temperature
    if 0 < sampling.top_k < row.numel():
        kth = row.topk(sampling.top_k).values[-1]
        row = row.masked_fill(row < kth, -math.inf)
    if sampling.top_p < 1:
        row = row.masked_fill(~_nucleus(row, sampling.top_p), -math.inf)
    return torch.log_softmax(row, dim=-1)


def _nucleus(row: torch.Tensor, top_p: float) -> torch.Tensor:
    """bool[V]: the smallest set of most likely tokens whose mass reaches ``top_p``."""
    ordered, index = row.sort(descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    keep = torch.zeros_like(row, dtype=torch.bool)
    keep[index] = mass_before < top_p
    return keep


def _draw(log_probs: torch.Tensor, generator: torch.Generator) -> int:
    cumulative = log_probs.exp().cumsum(dim=-1)
    uniform = torch.rand((), dtype=torch.float64, generator=generator)
    # right=True: the first index whose cumulative mass exceeds the point, so a token without mass
    # is never drawn; the clamp catches a point that rounding put on the total.
    point = uniform * cumulative[-1]
    index = int(torch.searchsorted(cumulative, point, right=True))
    if index < cumulative.numel():
        return index
    return int(log_probs.isfinite().nonzero()[-1])
