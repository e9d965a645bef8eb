"""Epoch boundaries of one request through admission, refits and recomputes."""

from __future__ import annotations

from tokenplane.engine_adapter.cpu.request import EpochTrack


def test_admission() -> None:
    track = EpochTrack(4)
    assert track.policy == track.kv == ((0, 4),)
    assert EpochTrack(None).policy == EpochTrack(None).kv == ()


def test_change_while_decoding() -> None:
    """10 prompt + 3 generated ids, the last of them not yet an input: both boundaries at 12."""
    track = EpochTrack(4)
    track.change(5, total=13, computed=12, generated=3)
    assert track.policy == track.kv == ((0, 4), (12, 5))


def test_change_during_prefill_splits_the_cache_where_it_stood() -> None:
    """The first token will be sampled by the new weights; positions 0-5 are from the old."""
    track = EpochTrack(4)
    track.change(5, total=10, computed=6, generated=0)
    assert track.policy == ((0, 4), (9, 5))
    assert track.kv == ((0, 4), (6, 5))


def test_change_before_anything_is_computed() -> None:
    track = EpochTrack(4)
    track.change(5, total=10, computed=0, generated=0)
    assert track.policy == ((0, 4), (9, 5))
    assert track.kv == ((0, 5),)


def test_recompute_starts_the_cache_anew() -> None:
    track = EpochTrack(4)
    track.change(5, total=13, computed=12, generated=3)
    track.restart_kv(5)
    assert track.kv == ((0, 5),)
    track.change(6, total=13, computed=0, generated=3)
    assert track.policy == ((0, 4), (12, 5), (12, 6))
    assert track.kv == ((0, 6),)


def test_a_version_is_never_claimed_for_earlier_tokens() -> None:
    begun = EpochTrack(None)
    begun.change(1, total=13, computed=12, generated=3)
    assert begun.policy == begun.kv == ()
    begun.restart_kv(1)
    assert begun.kv == ()
    untouched = EpochTrack(None)
    untouched.change(1, total=10, computed=0, generated=0)
    assert untouched.policy == untouched.kv == ((0, 1),)
