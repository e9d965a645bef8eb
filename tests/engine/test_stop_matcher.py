"""Stop strings against the decoded text, and which ids may be shown meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.engine_adapter.sampling_stops import Stop, StopMatcher


def bytes_text(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: id = byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def drive(
    matcher: StopMatcher, ids: Sequence[int]
) -> tuple[Stop | None, list[int], list[list[int]]]:
    """Feed until it stops: (stop, ids fed, released after each)."""
    fed: list[int] = []
    released: list[list[int]] = []
    stop = None
    for token in ids:
        fed.append(token)
        stop = matcher.push(token)
        if stop is not None:
            break
        released.append(matcher.take_released())
    matcher.finish(stop)
    released.append(matcher.take_released())
    return stop, fed, released


words = st.text(alphabet="abé☃", min_size=1, max_size=4)


@given(st.text(alphabet="abé☃", max_size=24), st.lists(words, min_size=1, max_size=3))
def test_against_a_plain_search(text: str, stops: list[str]) -> None:
    """It stops at the first byte after which some stop string is in the text, and shows nothing
    of it before, and everything that no stop string can reach."""
    ids = list(text.encode())
    matcher = StopMatcher(frozenset(), tuple(stops), bytes_text)
    stop, fed, released = drive(matcher, ids)
    hits = [n for n in range(len(ids) + 1) if any(s in bytes_text(ids[:n]) for s in stops)]
    shown = [token for batch in released for token in batch]
    if not hits:
        assert stop is None
        assert fed == ids
        assert shown == ids
        return
    assert stop is not None
    assert len(fed) == hits[0]
    whole = bytes_text(fed)
    starts = [whole.find(s) for s in stops if s in whole]
    assert whole.startswith(str(stop.reason), min(starts))
    assert shown == list(whole[: min(starts)].encode())


@given(st.text(alphabet="ab☃", max_size=24), st.lists(words, min_size=1, max_size=3))
def test_only_possible_matches_are_held_back(text: str, stops: list[str]) -> None:
    ids = list(text.encode())
    matcher = StopMatcher(frozenset(), tuple(stops), bytes_text)
    shown = 0
    for count, token in enumerate(ids, start=1):
        if matcher.push(token) is not None:
            return
        shown += len(matcher.take_released())
        known = bytes_text(ids[:count]).rstrip("\N{REPLACEMENT CHARACTER}")
        held = max((n for s in stops for n in range(len(s)) if known.endswith(s[:n])), default=0)
        assert shown == len(known[: len(known) - held].encode())


def test_a_stop_id_releases_everything_and_itself() -> None:
    matcher = StopMatcher(frozenset({7}), ("xyz",), lambda ids: "".join("xy"[i % 2] for i in ids))
    assert matcher.push(0) is None
    assert matcher.take_released() == []
    stop = matcher.push(7)
    assert stop == Stop(7)
    matcher.finish(stop)
    assert matcher.take_released() == [0, 7]


def test_a_token_that_reaches_into_a_stop_string_is_never_released() -> None:
    pieces = ["He", "llo <", "end", "> more"]
    matcher = StopMatcher(frozenset(), ("<end>",), lambda ids: "".join(pieces[i] for i in ids))
    stop, fed, released = drive(matcher, range(4))
    assert stop == Stop("<end>")
    assert fed == [0, 1, 2, 3]
    assert [token for batch in released for token in batch] == [0]


def test_the_string_that_starts_first_wins() -> None:
    matcher = StopMatcher(frozenset(), ("c", "bc"), lambda ids: "".join("abc"[i] for i in ids))
    stop, _, released = drive(matcher, [0, 1, 2])
    assert stop == Stop("bc")
    assert [token for batch in released for token in batch] == [0]


def test_tokens_that_print_otherwise_at_the_start_of_a_text() -> None:
    """A tokenizer that drops the first space: the window must not lose it within the answer."""
    pieces = [" stop", " here", "now"]

    def detokenize(ids: Sequence[int]) -> str:
        return "".join(pieces[i] for i in ids).removeprefix(" ")

    matcher = StopMatcher(frozenset(), ("stop here",), detokenize)
    assert drive(matcher, [2, 0, 1])[0] == Stop("stop here")
    matcher = StopMatcher(frozenset(), ("stophere",), detokenize)
    assert drive(matcher, [2, 0, 1])[0] is None


def test_invalid_text_does_not_hold_ids_for_ever() -> None:
    matcher = StopMatcher(frozenset(), ("zz",), bytes_text)
    shown = 0
    for _ in range(200):
        assert matcher.push(0x80) is None
        shown += len(matcher.take_released())
    assert shown >= 180
    assert matcher.push(ord("z")) is None
    assert matcher.push(ord("z")) == Stop("zz")


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_without_stops_everything_is_released_in_order(stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(frozenset(), stops, bytes_text)
    stop, _, released = drive(matcher, list(b"plain text"))
    assert stop is None
    assert bytes(t for batch in released for t in batch) == b"plain text"
