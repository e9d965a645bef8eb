"""``tokenplane audit``: versions, staleness, KV staleness, drift, failures, the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.stories import END, Story, encode, say
from tokenplane.tools.cli import main

Capture = pytest.CaptureFixture[str]


def audited(capsys: Capture, *argv: object, status: int = 0) -> dict[str, Any]:
    assert main(["audit", *map(str, argv), "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def by_id(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["rollout_id"]: one for one in found["rollouts"]}


def test_tokens_by_the_version_that_made_them(told: Path, capsys: Capture) -> None:
    alpha = by_id(audited(capsys, told))["alpha"]
    # 17 of turn 1, 6 of turn 2 under v0; the other 6 of turn 2 and 4 of turn 3 under v1.
    assert alpha["tokens_by_version"] == {"0": 23, "1": 10}
    assert alpha["spanning_calls"] == 1
    assert (alpha["calls"], alpha["sampled_tokens"], alpha["carried_tokens"]) == (3, 33, 50)
    assert alpha["trainable_tokens"] == 33
    assert alpha["published"]
    assert alpha["verified"]


def test_staleness_is_against_the_newest_version_or_the_one_given(
    told: Path, capsys: Capture
) -> None:
    found = audited(capsys, told)
    assert found["trainer_version"] == 1
    assert found["staleness"] == {"0": 10, "1": 48}
    alpha = by_id(found)["alpha"]
    assert alpha["mean_staleness"] == pytest.approx(23 / 33)
    assert alpha["max_staleness"] == 1
    later = audited(capsys, told, "--trainer-version", "4")
    assert later["trainer_version"] == 4
    assert later["staleness"] == {"3": 10, "4": 48}
    assert by_id(later)["alpha"]["max_staleness"] == 4


def test_tokens_on_top_of_older_kv_entries(told: Path, capsys: Capture) -> None:
    """In turn 2 the cache was kept over the change: all tokens after it saw older entries."""
    found = by_id(audited(capsys, told))
    assert found["alpha"]["kv_stale_tokens"] == 6
    assert found["alpha"]["kv_unknown_tokens"] == 0
    assert found["beta"]["kv_stale_tokens"] == 0


def test_drift_of_sampling_within_a_rollout(told: Path, capsys: Capture) -> None:
    found = by_id(audited(capsys, told))
    assert found["alpha"]["sampling"] == ["temperature 1"]
    assert found["beta"]["sampling"] == ["temperature 0.5", "temperature 1"]


def test_failures_by_code_and_unpublished_rollouts(told: Path, capsys: Capture) -> None:
    gamma = by_id(audited(capsys, told))["gamma"]
    assert gamma["failures"] == {"unresolved_parent": 1}
    assert not gamma["published"]
    assert gamma["trainable_tokens"] == 7


def test_a_branch_counts_as_sampled_but_not_as_trained(told: Path, capsys: Capture) -> None:
    beta = by_id(audited(capsys, told))["beta"]
    assert (beta["calls"], beta["sampled_tokens"], beta["trainable_tokens"]) == (4, 18, 12)


def test_totals_are_sums(told: Path, capsys: Capture) -> None:
    found = audited(capsys, told)
    for name in ("calls", "sampled_tokens", "trainable_tokens", "spanning_calls"):
        assert found["totals"][name] == sum(one[name] for one in found["rollouts"])
    assert found["totals"]["failures"] == 1
    assert found["totals"]["problems"] == 0


def test_only_the_rollouts_that_are_named(told: Path, capsys: Capture) -> None:
    assert list(by_id(audited(capsys, told, "beta", "gamma"))) == ["beta", "gamma"]
    assert main(["audit", str(told), "zeta"]) == 1
    assert "unknown_rollout" in capsys.readouterr().err


def test_a_rollout_that_only_failed(story: Story, capsys: Capture) -> None:
    story.fail("lost", "store_full")
    lost = by_id(audited(capsys, story.url, "lost"))["lost"]
    assert lost["calls"] == 0
    assert lost["mean_staleness"] is None
    assert main(["audit", story.url, "lost"]) == 0
    assert "trainer version none, 1 rollouts" in capsys.readouterr().out


def test_a_bad_row_turns_the_status(story: Story, capsys: Capture) -> None:
    story.store.discard("staged", [story.key("alpha", 0)])
    found = by_id(audited(capsys, story.url, status=1))
    assert not found["alpha"]["verified"]
    assert found["alpha"]["problems"] == {"missing_parent": 2, "staged_rows_removed": 1}
    assert found["beta"]["verified"]
    assert main(["audit", story.url]) == 1
    assert "does not verify (`tokenplane verify` names the rows): alpha: 2 x missing_parent" in (
        capsys.readouterr().out
    )


def test_the_table_says_the_same(told: Path, capsys: Capture) -> None:
    assert main(["audit", str(told)]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["alpha"] == [
        "3",
        "33",
        "33",
        "v0..v1",
        "0.70",
        "/",
        "1",
        "1",
        "6",
        "c2",
        "r1",
        "0",
        "yes",
    ]
    assert " ".join(rows["gamma"]) == "1 7 ~7 v0 1.00 / 1 0 0 r1 1 yes"
    assert rows["all"] == [
        "8",
        "58",
        "52",
        "v0..v1",
        "0.83",
        "/",
        "1",
        "1",
        "6",
        "c5",
        "r3",
        "1",
        "yes",
    ]
    assert "answered but not captured: gamma: 1 x unresolved_parent" in text
    assert "changed within: beta" in text
    bars = [line for line in text.splitlines() if "█" in line]
    assert [line.split()[0] for line in bars] == ["0", "1"]
    assert "48 (82.8%)" in bars[1]


def test_splits_that_were_avoided_are_counted(story: Story, capsys: Capture) -> None:
    """Two of three continued answers would be other tokens if a client sent their text; one of
    them is continued twice."""
    end = encode(END).tolist()
    spelled = [token for sign in END for token in encode(sign).tolist()]
    cut_character = encode("é").tolist()[:1]
    talk = say(story.call("split", say([], "a"), "plain"), "b")
    talk = say(story.call("split", talk, END, sampled_ids=[*spelled, *end]), "c")
    story.call("split", talk, "\N{REPLACEMENT CHARACTER}", sampled_ids=[*cut_character, *end])
    talk = say(story.call("split", talk, "x", sampled_ids=[*cut_character, *end]), "d")
    story.call("split", talk, "end")
    found = by_id(audited(capsys, story.url, "split"))["split"]
    assert (found["continuations"], found["splits_avoided"]) == (4, 3)
    assert audited(capsys, story.url)["totals"]["splits_avoided"] == 3
    assert main(["audit", story.url, "split"]) == 0
    assert "splits avoided: 3 of 4 continuations" in capsys.readouterr().out


def test_without_a_tokenizer_no_split_is_counted(story: Story, capsys: Capture) -> None:
    talk = say(story.call("bare", say([], "a"), "one", fingerprint=None), "b")
    story.call("bare", talk, "two", fingerprint=None)
    found = audited(capsys, story.url, "alpha", "bare")
    assert by_id(found)["alpha"]["splits_avoided"] == 0
    assert by_id(found)["bare"]["splits_avoided"] is None
    assert found["totals"]["splits_avoided"] is None
    assert main(["audit", story.url, "bare"]) == 0
    assert "splits avoided" not in capsys.readouterr().out


def test_an_empty_store(tmp_path: Path, capsys: Capture) -> None:
    story = Story(tmp_path / "empty")
    assert audited(capsys, story.url)["rollouts"] == []
    assert main(["audit", story.url]) == 0
    assert capsys.readouterr().out == "the store holds no rollout\n"


def test_it_works_while_a_server_writes(story: Story, capsys: Capture) -> None:
    talk = say([], "go on")
    for _ in range(3):
        talk = say(story.call("live", talk, "and on"), "more")
        audited(capsys, story.url)
    assert by_id(audited(capsys, story.url))["live"]["calls"] == 3
