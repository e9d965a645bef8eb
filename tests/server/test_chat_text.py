"""Streamed text is always a beginning of the whole text, and never holds half a character."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.serving import encode, tiny
from tokenplane.engine_adapter.chat.renderer import TokenizerChatRenderer
from tokenplane.engine_adapter.chat.text import AnswerText

IM_END = 2


def answer_text() -> AnswerText:
    renderer = TokenizerChatRenderer(tiny().tokenizer, [IM_END])
    return AnswerText(tiny().detokenize, renderer.special_token_ids, renderer.token_text)


TEXT = answer_text()


def pieces(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """``ids`` cut into parts of the given sizes, over and over."""
    parts, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        parts.append(ids[at : at + size])
        at, turn = at + size, turn + 1
    return parts


@given(
    st.lists(st.integers(0, len(tiny().tokenizer) - 1), max_size=40),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_any_ids_in_any_pieces(ids: list[int], sizes: list[int]) -> None:
    whole = TEXT.decode(ids)
    stream = TEXT.stream()
    for part in pieces(ids, sizes):
        fresh = stream.push(part)
        assert not fresh.endswith("\N{REPLACEMENT CHARACTER}")
        assert whole.startswith(stream.given)
    assert stream.given + stream.rest(whole) == whole


@given(st.text(max_size=40), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_texts_come_out_as_they_are(text: str, sizes: list[int]) -> None:
    ids = [i for i in encode(text) if i > IM_END]
    whole = TEXT.decode(ids)
    stream = TEXT.stream()
    given_out = "".join(stream.push(part) for part in pieces(ids, sizes))
    assert given_out + stream.rest(whole) == whole
    if "<|" not in text:
        assert whole == text


def test_a_long_answer_costs_each_id_a_bounded_number_of_decodes() -> None:
    decoded = 0

    def counting(ids: object) -> str:
        nonlocal decoded
        decoded += len(list(ids))  # type: ignore[call-overload]
        return tiny().detokenize(list(ids))  # type: ignore[call-overload]

    rng = random.Random(3)
    ids = encode("".join(rng.choice("abc é世🙂") for _ in range(4000)))
    stream = AnswerText(counting, [0, 1, 2], TEXT.token_text).stream()
    for token in ids:
        stream.push([token])
    assert decoded < 20 * len(ids)


@pytest.mark.parametrize(
    ("ids", "keep", "text"),
    [
        ("a<|im_start|>b<|im_end|>", (), "ab"),
        ("a<|im_start|>b<|im_end|>", ("<|im_start|>",), "a<|im_start|>b"),
        ("<|im_end|>", (), ""),
    ],
)
def test_special_tokens(ids: str, keep: tuple[str, ...], text: str) -> None:
    assert TEXT.decode(encode(ids), keep=keep) == text


def test_text_that_only_looks_special_stays() -> None:
    spelled = [encode(letter)[0] for letter in "<|im_end|>"]
    assert IM_END not in spelled
    assert TEXT.decode(spelled) == "<|im_end|>"


def test_a_stop_string_and_what_follows_are_cut() -> None:
    assert TEXT.decode(encode("one STOP two"), stop=" STOP") == "one"
    assert TEXT.decode(encode("one"), stop="absent") == "one"


def test_a_stream_that_the_whole_contradicts_adds_nothing() -> None:
    stream = TEXT.stream()
    stream.push(encode("abc"))
    assert stream.rest("xyz") == ""
