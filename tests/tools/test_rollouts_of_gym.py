"""Rows that another ledger admitted: no response ids, and a call that was delivered twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.capture.rollouts import Call, RolloutMaker
from tokenplane.capture import Collector, RolloutOutcome, TQMegatronTokenStager
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.staging import TokenSink, TokenSource, open_store
from tokenplane.tools.cli import main
from tokenplane.tools.rollout_view import RolloutView, load_rollout, to_call_record
from tokenplane.tools.store_reading import find_rollout, find_rollouts, open_for_reading

Capture = pytest.CaptureFixture[str]
ROLLOUT = "task/7"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Root, then one call delivered twice, then a continuation of its second delivery."""
    with open_store(f"file://{tmp_path}/store?durability=process") as store:
        maker = RolloutMaker(TQMegatronTokenStager(TokenSink(store)), ROLLOUT)
        _, root = maker.stage(call_id="root")
        maker.stage(root, call_id="twice")
        _, second = maker.stage(root, call_id="twice")
        _, last = maker.stage(second, call_id="last")
        publish(store_path=tmp_path / "store", chain=[root, second, last])
    return tmp_path / "store"


def publish(store_path: Path, chain: list[Call]) -> None:
    with open_store(str(store_path)) as store:
        source = TokenSource(store)
        rows = source.fetch_rows([call.key for call in chain])
        manifest = RolloutManifest(
            rollout_id=ROLLOUT, records=[to_call_record(row) for row in rows]
        )
        collector = Collector(source, manifest)
        collector.publish(collector.finalize(RolloutOutcome(ROLLOUT, reward=1.0)), store)


def view_of(path: Path) -> RolloutView:
    with open_for_reading(str(path)) as store:
        return load_rollout(store, ROLLOUT, find_rollout(store, ROLLOUT))


def test_a_rollout_id_may_hold_a_slash(path: Path) -> None:
    with open_for_reading(str(path)) as store:
        assert list(find_rollouts(store)) == [ROLLOUT]
        assert find_rollout(store, ROLLOUT) == find_rollouts(store)[ROLLOUT]


def test_the_child_of_a_call_delivered_twice_finds_the_right_one(path: Path) -> None:
    view = view_of(path)
    assert view.verified
    assert [call.call_id for call in view.calls] == ["root", "twice", "twice", "last"]
    assert view.calls[3].parent is view.calls[2]
    assert view.terminal_calls() == (view.calls[0], view.calls[2], view.calls[3])


def test_without_a_published_row_the_terminal_is_open(path: Path) -> None:
    with open_store(str(path)) as store:
        store.discard("rows", [ROLLOUT])
    view = view_of(path)
    assert view.terminal().model_call_id is None
    assert view.terminal().reason == "duplicate_call_id"
    assert view.terminal_calls() == ()


def test_it_verifies_replays_and_audits(path: Path, capsys: Capture) -> None:
    assert main(["replay", str(path), "--check"]) == 0
    assert "1 published rows: identical to their replay from 4 staged rows" in (
        capsys.readouterr().out
    )
    assert main(["replay", str(path), ROLLOUT]) == 0
    text = capsys.readouterr().out
    assert "the rows do not name their tokenizer" in text
    assert text.count("not on the way to the final call") == 1
    assert main(["audit", str(path), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["rollouts"]
    assert (found["calls"], found["sampled_tokens"], found["trainable_tokens"]) == (4, 16, 12)
