"""Sampling of one token: parameters, distributions, seeds, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tokenplane.engine_adapter.engine import SamplingParams
from tokenplane.engine_adapter.sampling import (
    make_generator,
    processed_log_probs,
    resolve_seed,
    sample_token,
)
from tokenplane.schemas.errors import EngineError, RequestRejectedError

logits_lists = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12)


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1, "seed": 1} | settings))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop_token_ids", (-1,)),
        ("stop_strings", ("",)),
        ("logprobs_mode", "both"),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestRejectedError, match=field):
        params(**{field: value})


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 0])
def test_every_int64_seeds(seed: int) -> None:
    logits = torch.arange(50, dtype=torch.float32) / 10
    sampling = params(seed=seed)
    tokens = [sample_token(logits, sampling, make_generator(sampling))[0] for _ in range(2)]
    assert tokens[0] == tokens[1]


def test_a_missing_seed_is_drawn_and_kept() -> None:
    drawn = resolve_seed(params(seed=None))
    assert drawn.seed is not None
    assert resolve_seed(drawn) is drawn
    with pytest.raises(EngineError, match="seed"):
        make_generator(params(seed=None))


@given(logits_lists, st.floats(0.05, 4), st.integers(0, 14), st.floats(0.01, 1))
@example([0.0, 1.0, 1.0, 1.0, 1e-40], 1.0, 4, 1.0)
def test_processed_distribution(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    """It sums to one, keeps the most likely token, and keeps the smallest set that suffices."""
    row = torch.tensor(values, dtype=torch.float32)
    narrowed = processed_log_probs(
        row, params(temperature=temperature, top_k=top_k, top_p=top_p)
    ).exp()
    assert float(narrowed.sum()) == pytest.approx(1)
    assert narrowed[int(row.argmax())] > 0
    kept = narrowed > 0
    only_k = processed_log_probs(row, params(temperature=temperature, top_k=top_k)).exp()
    if top_k:
        scaled = (row.double() - row.max()) / temperature  # rounding may tie what was not tied
        ties = int((scaled == scaled.sort(descending=True).values[min(top_k, len(row)) - 1]).sum())
        assert int((only_k > 0).sum()) <= top_k + ties - 1
    mass = float(only_k[kept].sum())
    assert mass >= top_p - 1e-9
    assert mass - float(only_k[kept].min()) < top_p + 1e-9
    if int(kept.sum()) > 1:
        ratio = narrowed[kept] / only_k[kept]
        assert float(ratio.max() - ratio.min()) < 1e-6 * float(ratio.max())


@given(logits_lists, st.integers(0, 2**62))
def test_a_token_without_mass_is_never_drawn(values: list[float], seed: int) -> None:
    row = torch.tensor(values, dtype=torch.float32)
    sampling = params(top_k=1 + len(values) // 3, top_p=0.8, seed=seed)
    allowed = processed_log_probs(row, sampling).isfinite()
    generator = make_generator(sampling)
    for _ in range(5):
        token, log_prob = sample_token(row, sampling, generator)
        assert bool(allowed[token])
        assert log_prob <= 0


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampling = params(temperature=0.8, seed=7)
    generator = make_generator(sampling)
    counts = np.zeros(4)
    for _ in range(4000):
        counts[sample_token(row, sampling, generator)[0]] += 1
    expected = processed_log_probs(row, sampling).exp().numpy()
    assert np.abs(counts / 4000 - expected).max() < 0.025


def test_a_last_bit_does_not_move_a_draw() -> None:
    """Another batch size changes the logits in their last bit; the token must not follow."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(500, generator=generator)
    near = row + 1e-7 * torch.randn(500, generator=generator)
    for seed in range(200):
        sampling = params(seed=seed, top_p=0.9)
        tokens = [sample_token(r, sampling, make_generator(sampling))[0] for r in (row, near)]
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_tiny_temperatures_are_finite(mode: Any) -> None:
    row = torch.tensor([3.0, 30.0, -5.0])
    for temperature in (1e-300, 1e-30, 1e-6):
        sampling = params(temperature=temperature, logprobs_mode=mode)
        token, log_prob = sample_token(row, sampling, make_generator(sampling))
        assert token == 1
        assert log_prob == pytest.approx(0, abs=1e-6)


def test_excluded_tokens_may_be_minus_infinity() -> None:
    row = torch.tensor([-math.inf, 0.0, -math.inf])
    assert sample_token(row, params(temperature=1.0), make_generator(params())) == (1, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(EngineError, match="not finite"):
        sample_token(
            torch.tensor([0.0, bad, 1.0]),
            params(temperature=temperature),
            make_generator(params()),
        )


def test_nothing_but_minus_infinity_is_an_error() -> None:
    with pytest.raises(EngineError, match="not finite"):
        sample_token(torch.full((4,), -math.inf), params(), make_generator(params()))
