"""Step plans and KV caches: who computes how much, and what is kept where."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.engine_adapter.cpu.batch import KVCache, make_plan, share_step


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(12, 60))
def test_shares(wanted: list[int], budget: int) -> None:
    """Never above the budget or the need; nobody who decodes waits; nothing is left unused."""
    shares = share_step(wanted, budget)
    assert sum(shares) == min(sum(wanted), budget)
    assert all(0 <= share <= need for share, need in zip(shares, wanted, strict=True))
    assert all(share == 1 for share, need in zip(shares, wanted, strict=True) if need == 1)
    partial = [i for i, need in enumerate(wanted) if 0 < shares[i] < need]
    assert len(partial) <= 1
    if partial:
        assert all(shares[i] == 0 for i in range(partial[0] + 1, len(wanted)) if wanted[i] > 1)


def test_plan_lays_requests_side_by_side() -> None:
    fresh, old = KVCache(100), KVCache(100)
    old.commit(7)
    plan = make_plan([([1, 2, 3], fresh, False), ([9], old, True), ([4, 5], KVCache(9), True)])
    assert plan.token_ids.tolist() == [[1, 2, 3, 9, 4, 5]]
    assert plan.positions.tolist() == [0, 1, 2, 7, 0, 1]
    assert [(s.start, s.end, s.count) for s in plan.slices] == [(0, 3, 3), (3, 4, 1), (4, 6, 2)]
    assert plan.logit_rows.tolist() == [3, 5]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6))
def test_cache_returns_all_that_was_committed(chunks: list[int]) -> None:
    total = sum(chunks)
    cache = KVCache(total)
    keys = torch.randn(2, total, 3, 4)
    values = torch.randn(2, total, 3, 4)
    for count in chunks:
        start, end = cache.length, cache.length + count
        for layer in (0, 1):
            got_k, got_v = cache.append(layer, keys[layer, start:end], values[layer, start:end])
            assert torch.equal(got_k.transpose(0, 1), keys[layer, :end])
            assert torch.equal(got_v.transpose(0, 1), values[layer, :end])
        cache.commit(count)
    assert cache.length == total
    # Never more than it was told it would ever need: that is what admission reserves.
    assert cache.nbytes <= 2 * 2 * total * 3 * 4 * 4
    cache.clear()
    assert (cache.length, cache.nbytes) == (0, 0)


def test_an_uncommitted_step_leaves_the_cache_as_it_was() -> None:
    cache = KVCache(10)
    good = torch.ones(2, 1, 2)
    cache.append(0, good, good)
    cache.commit(2)
    cache.append(0, 5 * good, 5 * good)
    keys, _ = cache.append(0, 7 * good[:1], 7 * good[:1])
    assert keys[0, :, 0].tolist() == [1, 1, 7]
