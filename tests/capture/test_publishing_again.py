"""A rollout that is collected again, after its staged rows are gone, changes nothing published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.capture.test_collector import Rig, record_of
from tokenplane.capture.collect.published import published_rows
from tokenplane.schemas.errors import KeyConflictError
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.schemas.row_message import encode_message


def messages(rig: Rig) -> dict[str, bytes]:
    return {key: encode_message(row) for key, row in rig.store.scan("rows")}


@pytest.mark.parametrize("salvage", [False, True])
def test_a_cleaned_rollout_is_already_there(salvage: bool) -> None:
    rig = Rig()
    collector = rig.collector(salvage=salvage)
    collector.publish(collector.finalize(rig.outcome), rig.store, clean_partition="staged")
    before = messages(rig)
    again = collector.finalize(rig.outcome)
    assert [row.sample_mask for row in again] == [0]
    report = collector.publish(again, rig.store, clean_partition="staged")
    assert (report.published, report.already_there, report.cleaned_rows) == (0, 1, 0)
    assert report.clean_error is None
    assert messages(rig) == before


def test_what_an_interrupted_clean_up_left_is_cleaned() -> None:
    """The published row names its staged rows; the placeholder that comes now names none."""
    rig = Rig()
    collector = rig.collector(salvage=True)
    collector.publish(collector.finalize(rig.outcome), rig.store)
    rig.store.discard("staged", [rig.chain[-1].key])
    again = collector.finalize(rig.outcome)
    assert [row.salvaged for row in again] == [True]
    report = collector.publish(again, rig.store, clean_partition="staged")
    assert (report.published, report.already_there, report.cleaned_rows) == (0, 1, 2)
    assert list(messages(rig)) == ["roll-1"]


def test_all_segments_of_a_cleaned_rollout_stand() -> None:
    rig = Rig()
    other = rig.maker.stage(carry=2, generate=3)[1]
    manifest = RolloutManifest(
        rollout_id="roll-1", records=[record_of(c) for c in (*rig.chain, other)]
    )
    collector = rig.collector(manifest, segments="roots")
    report = collector.publish(collector.finalize(rig.outcome), rig.store, clean_partition="staged")
    assert (report.published, report.cleaned_rows) == (2, 4)
    report = collector.publish(collector.finalize(rig.outcome), rig.store)
    assert (report.published, report.already_there) == (0, 1)
    assert [row.row_id for row in published_rows(rig.store, "roll-1")] == ["roll-1", "roll-1#1"]


def test_a_salvaged_row_keeps_the_rollouts_place() -> None:
    rig = Rig()
    rig.store.discard("staged", [rig.chain[-1].key])
    collector = rig.collector(salvage=True)
    collector.publish(collector.finalize(rig.outcome), rig.store, clean_partition="staged")
    assert list(messages(rig)) == ["roll-1~salvaged"]
    again = collector.finalize(rig.outcome)
    assert [row.sample_mask for row in again] == [0]
    report = collector.publish(again, rig.store)
    assert (report.published, report.already_there) == (0, 1)
    assert list(messages(rig)) == ["roll-1~salvaged"]


def test_a_placeholder_of_another_reason_changes_nothing() -> None:
    rig = Rig()
    rig.store.discard("staged", [rig.chain[0].key])
    collector = rig.collector()
    (first,) = collector.finalize(rig.outcome)
    collector.publish([first], rig.store)
    before = messages(rig)
    report = collector.publish([replace(first, reason="stage_failed")], rig.store)
    assert (report.published, report.already_there) == (0, 1)
    assert messages(rig) == before


@pytest.mark.parametrize("change", [{"reward": 0.0}, {"reward": None}, {"group_id": "g"}])
def test_another_outcome_is_a_conflict_after_a_clean_up_too(change: dict[str, Any]) -> None:
    rig = Rig()
    collector = rig.collector()
    collector.publish(collector.finalize(rig.outcome), rig.store, clean_partition="staged")
    other = collector.finalize(replace(rig.outcome, **change))
    with pytest.raises(KeyConflictError):
        collector.publish(other, rig.store)


def test_rollouts_of_like_names_do_not_stand_for_each_other() -> None:
    rig = Rig()
    collector = rig.collector()
    (row,) = collector.finalize(rig.outcome)
    for name in ("roll-1#1x", "roll-10", "roll-1~salvaged2"):
        other = replace(row, row_id=name, rollout_id=name)
        collector.publish([other], rig.store)
    assert published_rows(rig.store, "roll-1") == []


def test_a_verified_row_never_gives_way() -> None:
    rig = Rig()
    collector = rig.collector()
    (verified,) = collector.finalize(rig.outcome)
    rig.store.discard("staged", [rig.chain[0].key])
    (damaged,) = collector.finalize(rig.outcome)
    collector.publish([damaged], rig.store)
    with pytest.raises(KeyConflictError):
        collector.publish([verified], rig.store)
