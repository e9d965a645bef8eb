"""Verification and linearization against the real NeMo-Gym: one result, or one code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from tests.interop.gym_contract import Both, GymContract, as_binary32, ask_both
from tests.interop.gym_contract_rollouts import Rollout, damaged, fixed_rollout, rollouts


def verify(gym: GymContract, rollout: Rollout) -> Both:
    """Both verdicts, compared: every field, or the class and code of the error."""
    both = ask_both(gym, "linearize", receipt=rollout.receipt, snapshots=rollout.snapshots)
    if both.accepted:
        for side in (both.gym["value"], both.ours["value"]):
            side["logprobs"] = as_binary32(side["logprobs"])
        return both.agree()
    assert (both.ours["rejected"], both.ours["code"]) == (both.gym["rejected"], both.gym["code"])
    return both


@given(rollouts())
def test_an_intact_rollout_gives_the_same_row(gym: GymContract, rollout: Rollout) -> None:
    assert verify(gym, rollout).accepted


@settings(max_examples=400)
@given(damaged())
def test_a_damaged_rollout_gives_the_same_verdict(gym: GymContract, rollout: Rollout) -> None:
    verify(gym, rollout)


ROOT, MIDDLE, DEAD, END = range(4)
type Damage = Callable[[Rollout], object]


def receipt(**change: Any) -> Damage:
    return lambda rollout: rollout.receipt.update(change)


def record(at: int, **change: Any) -> Damage:
    return lambda rollout: rollout.manifest[at].update(change)


def snapshot(at: int, **change: Any) -> Damage:
    return lambda rollout: rollout.snapshots[at].update(change)


def signed(at: int, **change: Any) -> Damage:
    """A change that the writer signed, so that row and manifest agree on it."""

    def damage(rollout: Rollout) -> None:
        rollout.snapshots[at].update(change)
        rollout.resign(at)

    return damage


def swapped(rollout: Rollout) -> None:
    rows = rollout.snapshots
    rows[MIDDLE], rows[DEAD] = rows[DEAD], rows[MIDDLE]


def cycle(rollout: Rollout) -> None:
    """root and middle name each other; root comes first and its lengths fit."""
    signed(ROOT, parent_call_id="middle", mode="token_in", prev_len=4, cum_len=6)(rollout)


OTHER = "cd" * 32
CASES: list[tuple[str, Damage]] = [
    ("unsupported_schema", receipt(schema_version=3)),
    ("unsupported_digest", receipt(digest_version=1)),
    ("unsupported_extras_digest", receipt(extras_digest_version=2)),
    ("rollout_failed", receipt(failure_reason="unresolved_parent", capture_poisoned=True)),
    ("capture_poisoned", receipt(capture_poisoned=True)),
    ("empty_manifest", lambda rollout: rollout.manifest.clear()),
    ("duplicate_manifest_row", record(DEAD, model_call_id="middle")),
    ("duplicate_staging_key", record(DEAD, staging_key="key/root")),
    ("row_count_mismatch", lambda rollout: rollout.snapshots.pop()),
    (
        "duplicate_snapshot",
        lambda rollout: rollout.snapshots.__setitem__(MIDDLE, rollout.snapshots[ROOT]),
    ),
    ("snapshot_identity_mismatch", snapshot(MIDDLE, model_call_id="other")),
    ("snapshot_order_mismatch", swapped),
    ("wrong_rollout", snapshot(DEAD, rollout_id="other")),
    ("wrong_parent_call_id", snapshot(MIDDLE, parent_call_id="dead")),
    ("wrong_mode", snapshot(MIDDLE, mode="text")),
    ("wrong_prev_len", snapshot(MIDDLE, prev_len=3)),
    ("wrong_delta_len", snapshot(MIDDLE, delta_len=3)),
    ("wrong_cum_len", snapshot(MIDDLE, cum_len=9)),
    ("wrong_weight_version", snapshot(DEAD, weight_version=9)),
    ("wrong_digest", snapshot(DEAD, digest=OTHER)),
    ("wrong_extras_digest", snapshot(DEAD, extras_digest=OTHER)),
    ("wrong_chain_hash", snapshot(DEAD, chain_hash=OTHER)),
    ("wrong_cumulative_hash", snapshot(DEAD, cumulative_hash=OTHER)),
    ("wrong_schema_version", snapshot(DEAD, schema_version=3)),
    ("wrong_digest_version", record(DEAD, digest_version=3)),
    ("wrong_extras_digest_version", snapshot(DEAD, extras_digest_version=0)),
    ("invalid_snapshot", snapshot(DEAD, token_mask_delta=[0.0, 0.5])),
    ("corrupt_digest", snapshot(DEAD, token_ids_delta=[12, 99])),
    ("missing_parent", signed(DEAD, parent_call_id="gone")),
    ("parent_length_mismatch", signed(DEAD, prev_len=1, cum_len=3)),
    ("lineage_cycle", cycle),
    ("missing_terminal", receipt(terminal_model_call_id=None)),
    ("missing_terminal", receipt(terminal_model_call_id="gone")),
    ("chain_hash_mismatch", signed(MIDDLE, chain_hash=OTHER)),
    (
        "invalid_mask_order",
        signed(END, token_mask_delta=[1.0, 0.0], generation_log_probs_delta=[-0.5, 0.0]),
    ),
    (
        "empty_generation",
        signed(END, token_mask_delta=[0.0, 0.0], generation_log_probs_delta=[0.0, 0.0]),
    ),
    ("cumulative_hash_mismatch", signed(END, cumulative_hash=OTHER)),
]


@pytest.mark.parametrize(("code", "damage"), CASES, ids=[code for code, _ in CASES])
def test_each_code(gym: GymContract, code: str, damage: Damage) -> None:
    rollout = fixed_rollout()
    assert verify(gym, rollout).accepted
    damage(rollout)
    both = verify(gym, rollout)
    assert not both.accepted
    assert both.ours["code"] == code


@pytest.mark.parametrize(
    "damage",
    [
        signed(DEAD, chain_hash=OTHER),
        signed(DEAD, cumulative_hash=OTHER),
        signed(MIDDLE, cumulative_hash=OTHER),
        signed(DEAD, token_mask_delta=[0.0, 0.0], generation_log_probs_delta=[0.0, 0.0]),
    ],
    ids=["dead chain", "dead sequence", "middle sequence", "dead mask"],
)
def test_what_is_not_checked_off_the_chain(gym: GymContract, damage: Damage) -> None:
    rollout = fixed_rollout()
    before = copy.deepcopy(verify(gym, rollout).ours)
    damage(rollout)
    assert verify(gym, rollout).ours == before


def test_an_id_beyond_int32_is_verified_there_and_refused_here(gym: GymContract) -> None:
    """A deliberate difference: training rows hold int32 ids."""
    rollout = fixed_rollout()
    signed(DEAD, token_ids_delta=[12, 2**31])(rollout)
    both = ask_both(gym, "linearize", receipt=rollout.receipt, snapshots=rollout.snapshots)
    assert both.gym["value"]["model_call_ids"] == ["root", "middle", "end"]
    assert both.ours == {"rejected": "TokenIdRangeError", "code": "token_id_out_of_range"}
