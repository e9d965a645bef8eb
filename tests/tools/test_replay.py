"""``tokenplane replay``: the text, the marks, branches, failures, ids, JSON, and the check."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.tools.stories import END, Story, encode, say
from tokenplane.schemas.artifact_row import ARTIFACT_PARTITION
from tokenplane.staging import open_store
from tokenplane.tools.cli import main
from tokenplane.tools.replay_screen import ReplayScreen, printable
from tokenplane.tools.replay_segments import SegmentTexts, segments_of
from tokenplane.tools.rollout_view import load_rollout
from tokenplane.tools.store_reading import find_rollout

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *argv: object, status: int = 0) -> str:
    assert main([str(arg) for arg in argv]) == status
    return capsys.readouterr().out


def test_each_turn_shows_what_was_given_and_what_was_sampled(told: Path, capsys: Capture) -> None:
    lines = shown(capsys, "replay", told, "alpha").splitlines()
    text = [line for line in lines if line.startswith(("  | ", "  > ", "  ~ "))][2:]
    assert text == [
        "  | user: two plus two?",
        f"  > 4, naïve friend{END}",
        "  | user: times ten?",
        "  > about ",
        "  ~ weights v1 from here on",
        f"  > forty{END}",
        "  | user: thanks",
        f"  > bye{END}",
    ]
    assert "  3 model calls, every row verified" in lines
    assert [line.split(",")[0] for line in lines if line.startswith("turn ")] == [
        "turn 1",
        "turn 2",
        "turn 3",
    ]


def test_the_header_of_a_turn_counts_tokens_and_versions(told: Path, capsys: Capture) -> None:
    text = shown(capsys, "replay", told, "alpha")
    assert (
        "  weights v0 to v1, 37 tokens carried over, 17 new, 12 sampled, ended by stop, "
        "prefix from cache, temperature 1\n"
    ) in text
    assert (
        "training row alpha: 83 tokens, 33 of them trained on, sampled by weights v0 to v1" in text
    )


def test_a_branch_shows_as_a_tree(told: Path, capsys: Capture) -> None:
    text = shown(capsys, "replay", told, "beta")
    tree = text[text.index("how the calls") :].split("\n\n")[0].splitlines()[1:]
    assert [line.partition(", call")[0] for line in tree] == [
        "  * turn 1",
        "       turn 2",
        "  *    turn 2",
        "  *       turn 3",
    ]
    assert "oh no" in text
    assert "not on the way to the final call" in text


def test_a_straight_rollout_needs_no_tree(told: Path, capsys: Capture) -> None:
    assert "how the calls" not in shown(capsys, "replay", told, "alpha")


def test_failures_and_missing_publication_are_told(told: Path, capsys: Capture) -> None:
    text = shown(capsys, "replay", told, "gamma")
    assert "not captured: call lost-call: unresolved_parent: says why" in text
    assert "no training row published yet" in text


def test_unlikely_tokens_are_marked(story: Story, capsys: Capture) -> None:
    log_probs = [-0.1, -3.0, -0.1]
    story.call("mark", say([], "x"), "ab", log_probs=log_probs)
    story.store.close()
    assert f"  > a⟦b 5.0%⟧{END}\n" in shown(capsys, "replay", story.url, "mark", "--logprobs")
    assert f"  > ab{END}\n" in shown(capsys, "replay", story.url, "mark", "--logprobs", "0.04")


def test_ids_instead_of_text(told: Path, capsys: Capture) -> None:
    lines = shown(capsys, "replay", told, "gamma", "--ids").splitlines()
    ids = " ".join(map(str, encode(f"indeed{END}").tolist()))
    assert f"  > {ids}" in lines


def test_without_the_tokenizer_ids_are_shown_and_it_says_so(story: Story, capsys: Capture) -> None:
    story.store.discard(ARTIFACT_PARTITION, story.store.keys(ARTIFACT_PARTITION))
    story.store.close()
    text = shown(capsys, "replay", story.url, "gamma")
    assert "note: no text, token ids instead: missing_row" in text
    assert f"  > {encode('indeed')[0]} " in text


def test_rows_that_name_no_tokenizer_are_shown_as_ids(story: Story, capsys: Capture) -> None:
    story.call("anon", say([], "x"), "y", fingerprint=None)
    story.store.close()
    assert "the rows do not name their tokenizer" in shown(capsys, "replay", story.url, "anon")


def test_a_terminal_is_not_obeyed_to(story: Story, capsys: Capture) -> None:
    story.call("evil", say([], "x"), "a\x1b[31mb\rc\x9bd")
    story.store.close()
    text = shown(capsys, "replay", story.url, "evil")
    assert "\x1b" not in text
    assert "\r" not in text
    assert "a\\x1b[31mb\\x0dc\\x9bd" in text


def test_printable_keeps_line_feeds_and_tabs() -> None:
    assert printable("a\n\tb\x00\x7f ü") == "a\n\tb\\x00\\x7f ü"


def test_colours_on_a_terminal(told: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=100)
    with open_store(str(told)) as store:
        view = load_rollout(store, "gamma", find_rollout(store, "gamma"))
        ReplayScreen(console, SegmentTexts(store)).show(view)
    assert "\x1b[1;32m  > " in out.getvalue()
    assert "\x1b[2m  | " in out.getvalue()


def test_json_has_segments_and_ids_on_demand(told: Path, capsys: Capture) -> None:
    [rollout] = json.loads(shown(capsys, "replay", told, "alpha", "--json"))["rollouts"]
    assert rollout["verified"]
    second = rollout["calls"][1]["segments"]
    assert [(s["kind"], s["weight_version"], s["text"]) for s in second] == [
        ("given", None, "user: times ten?\n"),
        ("sampled", 0, "about "),
        ("sampled", 1, f"forty{END}"),
    ]
    assert "token_ids" not in second[0]
    [rollout] = json.loads(shown(capsys, "replay", told, "alpha", "--json", "--ids"))["rollouts"]
    assert rollout["calls"][1]["segments"][2]["token_ids"] == encode(f"forty{END}").tolist()
    assert len(rollout["calls"][1]["segments"][2]["log_probs"]) == 6


def test_segments_cover_the_whole_rollout(told: Path) -> None:
    with open_store(str(told)) as store:
        view = load_rollout(store, "alpha", find_rollout(store, "alpha"))
        segments = [segment for call in view.calls for segment in segments_of(call)]
        ids = [token for segment in segments for token in segment.token_ids.tolist()]
        assert ids == view.calls[-1].token_ids.tolist()
        assert ids == view.training[0].token_ids.tolist()
        for segment in segments:
            assert len(segment.log_probs) == len(segment.token_ids)


def test_an_unknown_rollout_or_store_is_named_in_one_line(
    told: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["replay", str(told), "zeta"]) == 1
    assert capsys.readouterr().err == (
        "tokenplane replay: unknown_rollout: the store has no such rollout; "
        "expected one of alpha, beta, gamma; key 'zeta'\n"
    )
    assert main(["replay", str(tmp_path / "nowhere"), "alpha"]) == 1
    assert "unsupported_store: no tokenplane store" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
    assert main(["replay", "memory:", "alpha"]) == 2
    assert "bad_config" in capsys.readouterr().err


def test_a_rollout_is_not_mistaken_for_one_whose_name_it_begins(
    story: Story, capsys: Capture
) -> None:
    story.call("al", say([], "short"), "name")
    story.publish("al")
    story.store.close()
    text = shown(capsys, "replay", story.url, "al")
    assert "1 model call," in text
    assert text.count("training row ") == 1


def test_check_makes_every_published_row_anew(told: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "2 published rows: identical" in shown(capsys, "replay", told, "--check")
    out = tmp_path / "rows.parquet"
    assert main(["export", str(told), str(out)]) == 0
    text = shown(capsys, "replay", told, "--check", "--parquet", out)
    assert "identical to their replay from 8 staged rows" in text
    report = json.loads(shown(capsys, "replay", told, "beta", "--check", "--json"))
    assert report["identical"]
    assert report["published"] == 1


def test_check_of_nothing_is_no_success(told: Path, capsys: Capture) -> None:
    assert main(["replay", str(told), "gamma", "--check"]) == 1
    assert "nothing_published" in capsys.readouterr().err


def test_check_says_that_cleaned_rows_cannot_be_replayed(story: Story, capsys: Capture) -> None:
    story.store.discard("staged", story.store.keys("staged", "alpha/"))
    story.store.close()
    assert main(["replay", story.url, "alpha", "--check"]) == 1
    assert "staged_rows_removed" in capsys.readouterr().err
