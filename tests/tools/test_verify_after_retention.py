"""``tokenplane verify`` on a store from which rows were removed, rightly or not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools.stories import Story
from tokenplane.capture import Collector
from tokenplane.capture.collect.training_rows import RolloutOutcome
from tokenplane.tools.cli import main

Capture = pytest.CaptureFixture[str]


def verify(story: Story, capsys: Capture, status: int) -> dict[str, Any]:
    assert main(["verify", story.url, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def clean(story: Story, rollout: str) -> None:
    collector = Collector(story.source, story.ledger)
    rows = collector.finalize(RolloutOutcome(rollout, reward=0.5, group_id="g"))
    report = collector.publish(rows, story.store, clean_partition="staged")
    assert report.already_there == 1


def test_what_a_clean_up_leaves_over_is_no_defect(story: Story, capsys: Capture) -> None:
    """beta had a branch that came to nothing: its parent went with the published chain."""
    clean(story, "beta")
    (left,) = story.store.keys("staged", "beta/")
    found = verify(story, capsys, 0)
    assert (found["cleaned"], found["leftovers"], found["problems"]) == (1, 1, [])
    assert found["staged"] == 8 - 4
    assert main(["verify", story.url]) == 0
    said = capsys.readouterr().out
    assert "1 published rows: staged rows removed, own hash checked only" in said
    assert "1 staged rows left over: their parents were published, removed" in said
    story.store.discard("staged", [left])
    assert verify(story, capsys, 0)["leftovers"] == 0


def test_a_rollout_that_lost_a_part_is_named_as_that(story: Story, capsys: Capture) -> None:
    keys = story.store.keys("staged", "alpha/")
    story.store.discard("staged", keys[:2])
    found = verify(story, capsys, 1)
    assert [(p["partition"], p["key"], p["code"]) for p in found["problems"]] == [
        ("staged", keys[2], "missing_parent"),
        ("rows", "alpha", "staged_rows_removed"),
    ]
    assert "the parent was removed from the store" in found["problems"][0]["message"]
    assert "2 of its 3 staged rows were removed" in found["problems"][1]["message"]
    assert (found["cleaned"], found["leftovers"]) == (0, 0)


def test_a_rollout_that_lost_its_root_unpublished_is_no_leftover(
    story: Story, capsys: Capture
) -> None:
    story.store.discard("rows", ["alpha"])
    keys = story.store.keys("staged", "alpha/")
    story.store.discard("staged", keys[:1])
    found = verify(story, capsys, 1)
    assert [(p["key"], p["code"]) for p in found["problems"]] == [
        (key, "missing_parent") for key in keys[1:]
    ]
    assert "removed from the store" in found["problems"][0]["message"]


def test_a_whole_rollout_that_retention_took_leaves_nothing_to_say(
    story: Story, capsys: Capture
) -> None:
    assert main(["gc", story.url, "--older-than", "0s", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [part["rows"] for part in report["partitions"]] == [8, 1]
    assert main(["verify", story.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["staged"], found["published"], found["cleaned"]) == (0, 2, 2)
