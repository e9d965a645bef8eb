"""The collector: verified rows, masked placeholders, idempotent publishing, late clean-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.capture.rollouts import Call, RolloutMaker
from tokenplane.capture.collect.collector import Collector
from tokenplane.capture.collect.training_rows import RolloutOutcome
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.schemas.errors import (
    ConfigError,
    InvalidRecordError,
    KeyConflictError,
    SealedPartitionError,
    StoreUnavailableError,
)
from tokenplane.schemas.manifest import CallRecord, ManifestFailure, RolloutManifest
from tokenplane.schemas.training_row import parse_training_row
from tokenplane.staging import StagingStore, TokenSink, TokenSource, open_store


def record_of(call: Call) -> CallRecord:
    values: Any = call.coords.model_dump(exclude={"rollout_id", "disposition"})
    values["mode"] = "text" if call.coords.parent_call_id is None else "token_in"
    return CallRecord(**values, response_id=f"resp-{call.coords.model_call_id}")


class Rig:
    """A store with one rollout: root, two continuations (the second spans versions), a branch."""

    def __init__(self) -> None:
        self.store: StagingStore = open_store("memory:")
        self.maker = RolloutMaker(TQMegatronTokenStager(TokenSink(self.store)))
        root = self.maker.stage(carry=3, generate=2)[1]
        middle = self.maker.stage(root, carry=2, generate=3, epochs=[(0, 4)])[1]
        # prompt 12 tokens, generated 12..15; the boundary at input 12 makes tokens 13.. new
        last = self.maker.stage(middle, carry=2, generate=4, epochs=[(0, 4), (12, 5)])[1]
        self.branch = self.maker.stage(root)[1]
        self.chain = [root, middle, last]
        self.manifest = RolloutManifest(
            rollout_id="roll-1", records=[record_of(c) for c in (*self.chain, self.branch)]
        )
        self.outcome = RolloutOutcome("roll-1", reward=1.0, declared=f"resp-{self.last_id}")

    @property
    def last_id(self) -> str:
        return self.chain[-1].coords.model_call_id

    def collector(self, manifest: Any = None, **options: Any) -> Collector:
        return Collector(TokenSource(self.store), manifest or self.manifest, **options)


def test_a_rollout_becomes_one_row_with_per_token_versions() -> None:
    rig = Rig()
    [row] = rig.collector().finalize(rig.outcome)
    assert row.token_ids.tolist() == rig.chain[-1].tokens.tolist()
    assert row.token_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert row.weight_versions.tolist() == [
        -1, -1, -1, 3, 3, -1, -1, 4, 4, 4, -1, -1, 4, 5, 5, 5,
    ]  # fmt: skip
    assert (row.min_weight_version, row.max_weight_version, row.reward) == (3, 5, 1.0)
    assert (
        row.log_probs[row.token_mask == 1].tobytes()
        == np.concatenate([c.log_probs for c in rig.chain]).tobytes()
    )
    assert [span.carry_len for span in row.call_spans] == [3, 2, 2]
    assert (row.trainable_tokens, row.prompt_len, row.sample_mask) == (9, 3, 1)
    again = parse_training_row(row.to_batch(), key="roll-1")
    assert again.to_batch().equals(row.to_batch())


def test_a_lost_side_branch_matters_only_to_the_strict_reading() -> None:
    rig = Rig()
    rig.store.discard("staged", [rig.branch.key])
    [row] = rig.collector().finalize(rig.outcome)
    assert row.sample_mask == 1
    [strict] = rig.collector(strictness="gym").finalize(rig.outcome)
    assert (strict.sample_mask, strict.reason) == (0, "missing_row")


def test_a_lost_row_of_the_chain_gives_a_placeholder() -> None:
    rig = Rig()
    rig.store.discard("staged", [rig.chain[1].key])
    [row] = rig.collector().finalize(rig.outcome)
    assert (row.sample_mask, row.reason, row.reward) == (0, "missing_row", 1.0)
    assert (row.token_mask.tolist(), row.trainable_tokens) == ([0], 0)


@pytest.mark.parametrize(
    ("outcome", "failures", "reason"),
    [
        (RolloutOutcome("roll-1", declared="nobody"), [], "declared_terminal_not_captured"),
        (RolloutOutcome("unknown"), [], "no_records"),
        (
            RolloutOutcome("roll-1"),
            [ManifestFailure(model_call_id="z", reason="stage_failed")],
            "stage_failed",
        ),
    ],
)
def test_reasons_of_placeholders(outcome: RolloutOutcome, failures: Any, reason: str) -> None:
    rig = Rig()
    manifest = rig.manifest.model_copy(update={"failures": failures})
    [row] = rig.collector({"roll-1": manifest}).finalize(outcome)
    assert row.reason == reason


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 10**400, "1", [1.0]], ids=repr)
def test_a_reward_that_is_no_finite_number_is_no_outcome(reward: Any) -> None:
    with pytest.raises(InvalidRecordError, match="reward"):
        RolloutOutcome("roll-1", reward=reward)
    scalar: Any = np.float32(0.5)
    assert RolloutOutcome("roll-1", reward=scalar).reward == 0.5


def test_a_group_always_has_its_size() -> None:
    rig = Rig()
    group = [
        RolloutOutcome("roll-1", 1.0, "g", declared=f"resp-{rig.last_id}"),
        RolloutOutcome("lost", 0.0, "g"),
        RolloutOutcome("also-lost", None, "g"),
    ]
    rows = rig.collector({"roll-1": rig.manifest}).finalize_group(group)
    assert [r.sample_mask for r in rows] == [1, 0, 0]
    assert [r.reward for r in rows] == [1.0, 0.0, None]
    assert {r.group_id for r in rows} == {"g"}


def test_publishing_twice_adds_nothing_and_cleans_once() -> None:
    rig = Rig()
    collector = rig.collector()
    rows = collector.finalize(rig.outcome)
    first = collector.publish(rows, rig.store)
    second = collector.publish(collector.finalize(rig.outcome), rig.store, clean_partition="staged")
    assert (first.published, second.published, second.already_there) == (1, 0, 1)
    assert second.cleaned_rows == 3
    assert rig.store.keys("rows") == ["roll-1"]
    assert rig.store.keys("staged") == [rig.branch.key]
    third = collector.publish(rows, rig.store, clean_partition="staged")
    assert (third.already_there, third.cleaned_rows) == (1, 0)


def test_another_row_under_the_same_id_is_refused() -> None:
    rig = Rig()
    collector = rig.collector()
    collector.publish(collector.finalize(rig.outcome), rig.store)
    other = RolloutOutcome("roll-1", reward=0.0, declared=rig.outcome.declared)
    with pytest.raises(KeyConflictError):
        collector.publish(collector.finalize(other), rig.store)


@pytest.mark.parametrize("refusal", ["conflict", "sealed"])
def test_nothing_is_cleaned_before_every_row_is_published(refusal: str) -> None:
    """The store refuses a row of the group, the first or a later one: all staged rows stay."""
    rig = Rig()
    staged = rig.store.keys("staged")
    collector = rig.collector({"roll-1": rig.manifest})
    rows = collector.finalize_group([rig.outcome, RolloutOutcome("lost", 0.0)])
    collector.publish(collector.finalize(RolloutOutcome("lost", 1.0)), rig.store)
    if refusal == "sealed":
        rig.store.seal("rows")
    with pytest.raises(SealedPartitionError if refusal == "sealed" else KeyConflictError):
        collector.publish(rows, rig.store, clean_partition="staged")
    assert ("roll-1" in rig.store.keys("rows")) == (refusal == "conflict")
    assert rig.store.keys("staged") == staged


def test_a_failed_clean_up_is_reported_and_undoes_nothing(monkeypatch: Any) -> None:
    rig = Rig()
    collector = rig.collector()

    def down(*_: Any) -> int:
        raise StoreUnavailableError("down")

    monkeypatch.setattr(rig.store, "discard", down)
    report = collector.publish(collector.finalize(rig.outcome), rig.store, clean_partition="staged")
    assert report.clean_error is not None
    assert report.clean_error.startswith("store_unavailable")
    assert rig.store.keys("rows") == ["roll-1"]


def test_a_manifest_that_lies_about_a_row_is_caught() -> None:
    rig = Rig()
    lie = rig.manifest.records[2].model_copy(update={"weight_version": 9})
    manifest = rig.manifest.model_copy(update={"records": [*rig.manifest.records[:2], lie]})
    [row] = rig.collector(manifest).finalize(rig.outcome)
    assert row.reason == "wrong_weight_version"


def test_segments_give_each_sampled_token_one_loss_owner() -> None:
    rig = Rig()
    other_root = rig.maker.stage(carry=2, generate=3)[1]
    other_leaf = rig.maker.stage(other_root, carry=1, generate=1)[1]
    calls = (*rig.chain, rig.branch, other_root, other_leaf)
    manifest = RolloutManifest(rollout_id="roll-1", records=[record_of(c) for c in calls])
    rows = rig.collector(manifest, segments="roots").finalize(rig.outcome)
    assert [row.row_id for row in rows] == ["roll-1", "roll-1#1"]
    assert rows[1].token_ids.tolist() == other_leaf.tokens.tolist()
    rows = rig.collector(manifest, segments="all").finalize(rig.outcome)
    assert [row.row_id for row in rows] == ["roll-1", "roll-1#1", "roll-1#2"]
    # The branch repeats the root call as context: its two sampled tokens belong to the first row.
    assert rows[1].token_mask.tolist() == [0] * 10 + [1] * 4
    assert rows[1].log_probs[:10].tolist() == [0.0] * 10
    owned = sum(row.trainable_tokens for row in rows)
    assert owned == sum(len(call.generated) for call in calls)


def test_a_segment_with_an_ambiguous_end_is_no_guess() -> None:
    rig = Rig()
    root = rig.maker.stage()[1]
    twins = [rig.maker.stage(root)[1] for _ in range(2)]
    calls = (*rig.chain, root, *twins)
    manifest = RolloutManifest(rollout_id="roll-1", records=[record_of(c) for c in calls])
    [row] = rig.collector(manifest, segments="roots").finalize(rig.outcome)
    assert row.reason == "ambiguous_terminal"


def test_salvage_offers_the_verified_part_and_never_mixes() -> None:
    rig = Rig()
    rig.store.discard("staged", [rig.chain[2].key])
    [row] = rig.collector(salvage=True).finalize(rig.outcome)
    assert (row.salvaged, row.reason, row.row_id) == (True, "missing_row", "roll-1~salvaged")
    assert row.token_ids.tolist() == rig.chain[1].tokens.tolist()
    assert row.sample_mask == 1
    rig.store.discard("staged", [rig.chain[0].key])
    [lost] = rig.collector(salvage=True).finalize(rig.outcome)
    assert (lost.salvaged, lost.sample_mask, lost.row_id) == (False, 0, "roll-1")


def test_salvage_of_a_strict_reading_that_lost_a_side_branch() -> None:
    rig = Rig()
    rig.store.discard("staged", [rig.branch.key])
    [row] = rig.collector(strictness="gym", salvage=True).finalize(rig.outcome)
    assert (row.salvaged, row.reason, row.row_id) == (True, "missing_row", "roll-1~salvaged")
    assert row.token_ids.tolist() == rig.chain[-1].tokens.tolist()


def test_salvage_of_a_rollout_whose_last_call_failed() -> None:
    rig = Rig()
    failures = [ManifestFailure(model_call_id="z", reason="stage_failed")]
    manifest = rig.manifest.model_copy(
        update={"records": rig.manifest.records[:3], "failures": failures}
    )
    outcome = RolloutOutcome("roll-1", declared="resp-of-the-failed-call")
    [strict] = rig.collector(manifest).finalize(outcome)
    assert strict.sample_mask == 0
    [row] = rig.collector(manifest, salvage=True).finalize(outcome)
    assert row.token_ids.tolist() == rig.chain[-1].tokens.tolist()
    assert row.reason == "stage_failed"


@pytest.mark.parametrize("salvage", [False, True])
def test_what_another_try_may_settle_is_no_placeholder(salvage: bool) -> None:
    """A store that is down says nothing about the rollout; neither does a refused secret."""
    rig = Rig()

    class Down:
        def fetch_rows(self, keys: Any) -> Any:
            raise StoreUnavailableError("down")

    class Refused:
        def manifest(self, rollout_id: str) -> Any:
            raise ConfigError("the control secret")

    with pytest.raises(StoreUnavailableError):
        Collector(Down(), rig.manifest, salvage=salvage).finalize(rig.outcome)
    with pytest.raises(ConfigError):
        Collector(TokenSource(rig.store), Refused(), salvage=salvage).finalize(rig.outcome)
