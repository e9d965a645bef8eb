"""The splice's memory: bounded, exact in its accounts, one renderer, and never trusted blindly."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.capture.splice_renderers import TextRenderer
from tokenplane.capture.splice import Message, SpliceCache, structural_suffix
from tokenplane.capture.splice.cache import ProvenHistory
from tokenplane.schemas.errors import ConfigError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def converse(renderer: TextRenderer, cache: SpliceCache, turns: int, said: str) -> list[int]:
    """Renders that each turn took."""
    messages: list[Message] = [{"role": "user", "content": said}]
    prompt = renderer.encode(
        renderer.render(messages, None, add_generation_prompt=True, template_kwargs=None)
    )
    taken = []
    for turn in range(turns):
        before = renderer.renders
        sampled = renderer.encode(f"{said} {turn}<|im_end|>")
        prefix = np.concatenate([prompt, sampled])
        assistant = {"role": "assistant", "content": f"{said} {turn}"}
        new = [{"role": "user", "content": f"{said}? {turn}"}]
        result = structural_suffix(
            renderer,
            prefix_token_ids=prefix,
            n_sampled=len(sampled),
            history=messages,
            assistant=assistant,
            new_messages=new,
            terminator_ids=[renderer.special("<|im_end|>")],
            cache=cache,
        )
        prompt = np.concatenate([prefix, result.suffix_token_ids])
        messages = [*messages, assistant, *new]
        taken.append(renderer.renders - before)
        text = renderer.render(messages, None, add_generation_prompt=True, template_kwargs=None)
        np.testing.assert_array_equal(prompt, renderer.encode(text))
    return taken


def test_a_growing_conversation_costs_one_render_a_turn() -> None:
    renderer, cache = TextRenderer(CHATML), SpliceCache()
    first = converse(renderer, cache, 6, "hello")
    assert first[2:] == [1, 1, 1, 1]
    # Another conversation of the same shape starts with the opening's proof only.
    assert converse(renderer, cache, 6, "bye") == [3, 1, 1, 1, 1, 1]


def test_only_what_is_new_is_encoded() -> None:
    renderer, cache = TextRenderer(CHATML), SpliceCache()
    converse(renderer, cache, 2, "a" * 10_000)
    messages: list[Message] = [{"role": "user", "content": "a" * 10_000}]
    text = renderer.render(messages, None, add_generation_prompt=True, template_kwargs=None)
    prompt = renderer.encode(text)
    for turn in range(3):
        sampled = renderer.encode("ok<|im_end|>")
        prefix = np.concatenate([prompt, sampled])
        renderer.encoded_signs = 0
        assistant, new = {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go"}
        result = structural_suffix(
            renderer,
            prefix_token_ids=prefix,
            n_sampled=len(sampled),
            history=messages,
            assistant=assistant,
            new_messages=[new],
            terminator_ids=[renderer.special("<|im_end|>")],
            cache=cache,
        )
        if turn:
            assert renderer.encoded_signs < 100
        prompt = np.concatenate([prefix, result.suffix_token_ids])
        messages = [*messages, assistant, new]


def test_a_skeleton_that_does_not_fit_is_read_anew() -> None:
    """The tail depends on how long the conversation is, which the shape does not tell."""
    odd = CHATML.replace("{% if add", "{{ '<odd>' if messages | length > 4 }}{% if add")
    renderer, cache = TextRenderer(odd), SpliceCache()
    opening: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for history in (opening, [opening[0], opening[1], opening[1]]):
        text = renderer.render(history, None, add_generation_prompt=True, template_kwargs=None)
        sampled = renderer.encode("ok<|im_end|>")
        result = structural_suffix(
            renderer,
            prefix_token_ids=np.concatenate([renderer.encode(text), sampled]),
            n_sampled=len(sampled),
            history=history,
            assistant={"role": "assistant", "content": "ok"},
            new_messages=[opening[1]],
            terminator_ids=[renderer.special("<|im_end|>")],
            cache=cache,
        )
        shown = "".join(map(renderer.token_text, result.suffix_token_ids.tolist()))
        assert ("<odd>" in shown) == (len(history) == 3)
    assert cache.stats().skeleton_hits == 1


def test_a_cache_serves_one_renderer() -> None:
    cache = SpliceCache()
    converse(TextRenderer(CHATML), cache, 1, "x")
    with pytest.raises(ConfigError, match="one renderer"):
        converse(TextRenderer(CHATML), cache, 1, "x")


def test_shared_segments_count_once_and_are_given_back() -> None:
    cache = SpliceCache(max_bytes=100_000)
    first = ProvenHistory("a" * 1000, None)
    cache.put_history("1", first)
    one = cache.stats().held_bytes
    cache.put_history("2", ProvenHistory("b" * 1000, first))
    two = cache.stats().held_bytes
    assert one < two < 2 * one + 100
    for number in range(200):
        cache.put_history(f"other {number}", ProvenHistory("c" * 1000, None))
        assert cache.stats().held_bytes <= 100_000
    assert cache.history("2") is None
    del first
    gc.collect()
    assert cache.stats().held_bytes <= 100_000
    assert cache.history("other 199") is not None


def test_segments_stay_counted_while_a_longer_conversation_shares_them() -> None:
    cache = SpliceCache(max_bytes=5000)
    chain: ProvenHistory | None = None
    for number in range(3):
        chain = ProvenHistory(str(number) * 1000, chain)
        cache.put_history(str(number), chain)
    held = cache.stats().held_bytes
    del chain
    cache.put_history("big", ProvenHistory("d" * 3500, None))
    assert cache.history("2") is None
    assert cache.stats().held_bytes < held


def test_bounds_of_skeletons() -> None:
    cache = SpliceCache(max_skeletons=1)
    renderer = TextRenderer(CHATML)
    converse(renderer, cache, 2, "x")
    misses = cache.stats().skeleton_misses
    converse(renderer, cache, 1, "x")
    assert cache.stats().skeleton_misses == misses + 1
