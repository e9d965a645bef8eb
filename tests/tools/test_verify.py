"""``tokenplane verify``: what is damaged is found and named; what is whole passes."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.stories import Story, say
from tokenplane.schemas.digests import cumulative_hash, staging_digest
from tokenplane.schemas.staged_call import StagedCall
from tokenplane.schemas.staged_row import StagedRow, parse_staged_row
from tokenplane.schemas.tokens import frozen
from tokenplane.schemas.training_row import TrainingRow, parse_training_row
from tokenplane.schemas.wire import SIGNED_FIELDS
from tokenplane.tools.cli import main

Capture = pytest.CaptureFixture[str]


def report(url: str, capsys: Capture, *more: str, status: int) -> dict[str, Any]:
    assert main(["verify", url, "--json", *more]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["verified"] == (status == 0)
    return found


def codes(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(p["partition"], p["key"], p["code"]) for p in found["problems"]]


def staged(story: Story, key: str) -> StagedRow:
    return parse_staged_row(story.store.get("staged", [key])[0])


def signed(call: StagedCall, **changes: Any) -> StagedCall:
    """The call with other values and a digest that fits them."""
    changed = dataclasses.replace(call, **changes)
    digest = staging_digest(**{name: getattr(changed, name) for name in SIGNED_FIELDS})
    return dataclasses.replace(changed, digest=digest)


def replace_staged(story: Story, key: str, row: StagedRow) -> None:
    story.store.discard("staged", [key])
    story.store.put("staged", key, row.to_batch())


def test_a_whole_store_passes(told: Path, capsys: Capture) -> None:
    found = report(str(told), capsys, status=0)
    assert {name: found[name] for name in ("rollouts", "staged", "published", "failures")} == {
        "rollouts": 3,
        "staged": 8,
        "published": 2,
        "failures": 1,
    }
    assert main(["verify", str(told)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 staged rows and 2 published rows of 3 rollouts checked"
    assert lines[-1] == "everything verifies"


def test_it_works_while_a_server_has_the_store_open(story: Story, capsys: Capture) -> None:
    story.call("late", say([], "one more"), "yes")
    assert report(story.url, capsys, status=0)["staged"] == 9


def _weight_version(row: StagedRow) -> StagedRow:
    return dataclasses.replace(row, call=dataclasses.replace(row.call, weight_version=9))


def _token(row: StagedRow) -> StagedRow:
    ids = row.call.token_ids_delta.copy()
    ids[-1] += 1
    return dataclasses.replace(row, call=signed(row.call, token_ids_delta=frozen(ids)))


def _hash(row: StagedRow) -> StagedRow:
    return dataclasses.replace(row, call=signed(row.call, cumulative_hash="0" * 64))


def _length(row: StagedRow) -> StagedRow:
    call = row.call
    longer = signed(call, prev_len=call.prev_len + 1, cum_len=call.cum_len + 1)
    return dataclasses.replace(row, call=longer)


def _mask(row: StagedRow) -> StagedRow:
    mask = row.call.token_mask_delta[::-1]
    log_probs = row.call.generation_log_probs_delta[::-1]
    call = signed(
        row.call,
        token_mask_delta=frozen(mask),
        generation_log_probs_delta=frozen(log_probs),
    )
    return dataclasses.replace(row, call=call)


def _nothing_sampled(row: StagedRow) -> StagedRow:
    call = signed(
        row.call,
        token_mask_delta=frozen(np.zeros_like(row.call.token_mask_delta)),
        generation_log_probs_delta=frozen(np.zeros_like(row.call.generation_log_probs_delta)),
    )
    return dataclasses.replace(row, call=call)


def _extras(row: StagedRow) -> StagedRow:
    return dataclasses.replace(row, call=dataclasses.replace(row.call, extras={"more": 1}))


def _evidence(**changes: Any) -> Callable[[StagedRow], StagedRow]:
    def change(row: StagedRow) -> StagedRow:
        return dataclasses.replace(row, evidence=dataclasses.replace(row.evidence, **changes))

    return change


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_weight_version, "corrupt_digest"),
        (_extras, "corrupt_extras"),
        (_token, "chain_hash_mismatch"),
        (_hash, "cumulative_hash_mismatch"),
        (_length, "parent_length_mismatch"),
        (_mask, "invalid_mask_order"),
        (_nothing_sampled, "empty_generation"),
        (_evidence(policy_epochs=()), "no_policy_epoch"),
        (_evidence(policy_epochs=((0, 5),)), "wrong_policy_epoch"),
        (_evidence(policy_epochs=((0, 1), (9999, 2))), "epoch_out_of_range"),
        (_evidence(kv_cache_epochs=((0, 1), (9999, 2))), "epoch_out_of_range"),
    ],
)
def test_a_changed_row_is_named_with_its_code(
    damage: Callable[[StagedRow], StagedRow], code: str, story: Story, capsys: Capture
) -> None:
    key = story.key("alpha", 2)
    replace_staged(story, key, damage(staged(story, key)))
    story.store.close()
    found = report(story.url, capsys, status=1)
    assert codes(found) == [
        ("staged", key, code),
        ("rows", "alpha", "missing_staged_row"),
    ]
    assert found["staged"] == 8


def test_a_bad_row_takes_its_descendants_with_it(story: Story, capsys: Capture) -> None:
    keys = [story.key("alpha", at) for at in range(3)]
    replace_staged(story, keys[1], _weight_version(staged(story, keys[1])))
    story.store.close()
    found = codes(report(story.url, capsys, "--partition", "staged", status=1))
    assert ("staged", keys[1], "corrupt_digest") in found
    assert ("staged", keys[2], "missing_parent") in found


def test_a_removed_parent_is_missed(story: Story, capsys: Capture) -> None:
    keys = [story.key("alpha", at) for at in range(3)]
    story.store.discard("staged", keys[:1])
    story.store.close()
    found = codes(report(story.url, capsys, "--partition", "staged", status=1))
    assert found == [
        ("staged", keys[1], "missing_parent"),
        ("staged", keys[2], "missing_parent"),
    ]


@pytest.mark.parametrize("partition", ["staged", "rows"])
def test_a_flipped_byte_on_disk_is_found_and_hides_nothing_else(
    partition: str, story: Story, capsys: Capture
) -> None:
    keys = story.store.keys(partition)
    story.store.close()
    with sqlite3.connect(story.path / "rows.sqlite") as db:
        db.execute(
            "UPDATE rows SET message = CAST(substr(message, 1, 99) || x'5A' || substr(message, 101)"
            " AS BLOB) WHERE key = ?",
            (keys[0],),
        )
    db.close()
    found = report(story.url, capsys, status=1)
    assert (partition, keys[0], "corrupt_row") in codes(found)
    assert (found["staged"], found["published"]) == (8, 2)
    assert not [key for where, key, _ in codes(found) if where == partition and key in keys[3:]]


def _published(story: Story, rollout: str) -> TrainingRow:
    return parse_training_row(story.store.get("rows", [rollout])[0])


def _republish(story: Story, row: TrainingRow) -> None:
    story.store.discard("rows", [row.row_id])
    story.store.put("rows", row.row_id, row.to_batch())


def _flip_sign_of_zero(row: TrainingRow) -> TrainingRow:
    log_probs = row.log_probs.copy()
    log_probs[0] = -0.0
    return dataclasses.replace(row, log_probs=frozen(log_probs))


def _other_version(row: TrainingRow) -> TrainingRow:
    versions = np.where(row.weight_versions == 1, 2, row.weight_versions)
    return dataclasses.replace(row, weight_versions=frozen(versions))


def _other_token(row: TrainingRow) -> TrainingRow:
    ids = row.token_ids.copy()
    ids[-1] += 1
    return dataclasses.replace(
        row, token_ids=frozen(ids), cumulative_hash=cumulative_hash(frozen(ids))
    )


def _wrong_hash(row: TrainingRow) -> TrainingRow:
    return dataclasses.replace(row, cumulative_hash="0" * 64)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_flip_sign_of_zero, "replay_differs"),
        (_other_version, "replay_differs"),
        (_other_token, "replay_differs"),
        (_wrong_hash, "row_hash"),
    ],
)
def test_a_published_row_that_does_not_follow_is_found(
    damage: Callable[[TrainingRow], TrainingRow], code: str, story: Story, capsys: Capture
) -> None:
    _republish(story, damage(_published(story, "alpha")))
    story.store.close()
    assert codes(report(story.url, capsys, status=1)) == [("rows", "alpha", code)]
    assert main(["replay", story.url, "--check"]) == 1
    assert "NOT identical" in capsys.readouterr().out


def test_loss_has_one_owner(story: Story, capsys: Capture) -> None:
    row = _published(story, "alpha")
    _republish(story, dataclasses.replace(row, row_id="alpha#1", segment=1))
    story.store.close()
    found = codes(report(story.url, capsys, status=1))
    assert found == [("rows", "alpha#1", "loss_owned_twice")] * 3


def test_segments_and_salvaged_rows_replay_too(story: Story, capsys: Capture) -> None:
    talk = story.call("delta", say([], "a"), "b")
    story.call("delta", say(talk, "dead end"), "c")
    story.call("delta", say(story.call("delta", say(talk, "way"), "d"), "further"), "e")
    story.call("delta", say([], "second root"), "f")
    story.publish("delta", segments="all")
    story.fail("gamma", "store_full")
    story.publish("gamma", salvage=True)
    found = report(story.url, capsys, status=0)
    assert found["published"] == 2 + 3 + 1
    assert _published(story, "gamma~salvaged").salvaged


def test_a_placeholder_replays(story: Story, capsys: Capture) -> None:
    story.fail("lost", "store_full")
    story.publish("lost")
    assert _published(story, "lost").sample_mask == 0
    report(story.url, capsys, status=0)


def test_cleaned_rows_are_counted_and_held_to_their_hash(story: Story, capsys: Capture) -> None:
    story.store.discard("staged", story.store.keys("staged", "alpha/"))
    found = report(story.url, capsys, status=0)
    assert found["cleaned"] == 1
    _republish(story, _wrong_hash(_published(story, "alpha")))
    assert codes(report(story.url, capsys, status=1)) == [("rows", "alpha", "row_hash")]


def test_only_the_rollouts_that_are_named(story: Story, capsys: Capture) -> None:
    key = story.key("alpha", 0)
    replace_staged(story, key, _weight_version(staged(story, key)))
    report(story.url, capsys, "--rollout", "beta", "--rollout", "gamma", status=0)
    report(story.url, capsys, "--rollout", "alpha", status=1)
    assert main(["verify", story.url, "--rollout", "zeta"]) == 1
    assert "unknown_rollout" in capsys.readouterr().err


def test_an_export_must_hold_exactly_the_published_rows(
    story: Story, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "rows.parquet"
    assert main(["export", story.url, str(out), "--rollout", "alpha"]) == 0
    found = report(story.url, capsys, "--parquet", str(out), status=1)
    assert codes(found) == [("rows.parquet", "beta", "row_not_exported")]
    story.publish("gamma")
    assert main(["export", story.url, str(out)]) == 0
    _republish(story, _flip_sign_of_zero(_published(story, "beta")))
    story.store.discard("rows", ["alpha"])
    assert codes(report(story.url, capsys, "--parquet", str(out), status=1)) == [
        ("rows", "beta", "replay_differs"),
        ("rows.parquet", "alpha", "row_not_published"),
        ("rows.parquet", "beta", "export_differs"),
    ]


def test_an_export_that_is_none_is_wrong_usage(told: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "no.parquet").write_text("nothing of the kind")
    assert main(["verify", str(told), "--parquet", str(tmp_path / "no.parquet")]) == 2
    assert "cannot be read as Parquet" in capsys.readouterr().err
