"""Structural splices of templates that change what they printed before."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from tests.capture.splice_conversations import (
    ANSWER,
    BASE,
    HISTORY,
    LAST,
    NEW,
    PROMPT,
    TURN,
    code_of,
    each,
    prefix_of,
    splice,
    text_of,
)
from tests.capture.splice_renderers import TextRenderer
from tokenplane.capture.splice import (
    SpliceCache,
    structural_suffix,
)
from tokenplane.capture.splice.shapes import TOOLS
from tokenplane.schemas.errors import SpliceError


@pytest.mark.parametrize(
    ("template", "code"),
    [
        (BASE + LAST + "<len {{ a.content | length }}>" + PROMPT, "tail_depends_on_text"),
        (BASE + LAST + "[{{ a.content }}]" + PROMPT, "sentinel_repeated"),
        (
            BASE + LAST + "{% if '4' in a.content %}<num>{% endif %}" + PROMPT,
            "tail_depends_on_text",
        ),
        (
            BASE + "{% if 'And' in messages[-1].content %}<and>{% endif %}" + PROMPT,
            "tail_depends_on_text",
        ),
        (
            each(
                "<|im_start|>{{ m.role }}\n{{ m.content[:20] if m.role == 'user' else "
                "m.content }}<|im_end|>\n"
            ),
            "tail_depends_on_text",
        ),
        (BASE + "{{ range(99999) | random }}" + PROMPT, "tail_depends_on_text"),
        (
            each(
                "<|im_start|>{{ m.role }}\n{{ m.content | upper if m.role == 'user' else "
                "m.content }}<|im_end|>\n"
            ),
            "new_text_lost_or_moved",
        ),
        (
            each(
                "<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.content if m.role == 'user' }}"
                "<|im_end|>\n"
            ),
            "new_text_lost_or_moved",
        ),
        (
            "{% for m in messages[:-1] %}" + TURN + "{% endfor %}" + PROMPT,
            "new_text_lost_or_moved",
        ),
        ("{% for m in messages[-2:] %}" + TURN + "{% endfor %}" + PROMPT, "opening_changed"),
        ("{% for m in messages[-1:] %}" + TURN + "{% endfor %}" + PROMPT, "sentinel_missing"),
        ("<n={{ messages | length }}>" + BASE + PROMPT, "opening_changed"),
        (BASE + "{{ messages[0].content }}" + PROMPT, "old_text_in_tail"),
        (
            "{{ messages[-1].content if messages | length > 2 }}" + BASE + PROMPT,
            "new_text_in_head",
        ),
        (
            each(
                "<|im_start|>{{ m.role }}\n{{ m.content }}"
                "{{ '<|im_end|>' if m.role != 'assistant' }}\n"
            ),
            "no_terminator",
        ),
        (
            each(
                "<|im_start|>{{ m.role }}\n{{ m.content }}"
                "{{ ' (end)' if m.role == 'assistant' }}<|im_end|>\n"
            ),
            "text_before_terminator",
        ),
        (
            BASE
            + "{% if messages[-1].role == 'user' and messages | length > 3 %}"
            + "{{ raise_exception('no more') }}{% endif %}"
            + PROMPT,
            "template_raises",
        ),
    ],
)
def test_a_template_that_cannot_be_spliced(template: str, code: str) -> None:
    assert code_of(TextRenderer(template)) == code


def test_tools_behind_the_last_turn() -> None:
    template = BASE + "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + PROMPT
    assert code_of(TextRenderer(template), tools=TOOLS) == "tools_in_tail"


def test_reasoning_behind_the_answer_or_behind_everything() -> None:
    own = each(
        "<|im_start|>{{ m.role }}\n{{ m.content }}<think>{{ m.reasoning_content }}</think>"
        "<|im_end|>\n"
    )
    assistant = {**ANSWER, "reasoning_content": "two and two"}
    assert code_of(TextRenderer(own), assistant=assistant) == "own_text_in_tail"
    old = BASE + "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}" + PROMPT
    history = [*HISTORY, assistant, {"role": "user", "content": "More."}]
    assert code_of(TextRenderer(old), history=history) == "old_text_in_tail"


def test_a_call_that_is_not_printed_behind_a_text_that_is() -> None:
    template = each(
        "<|im_start|>{{ m.role }}\n{{ m.content }}{{ '<called>' if m.tool_calls }}<|im_end|>\n"
    )
    call = {"id": "callaaaa1", "type": "function", "function": {"name": "add", "arguments": {}}}
    new = [{"role": "tool", "content": "3", "tool_call_id": "callaaaa1"}]
    assistant = {**ANSWER, "tool_calls": [call]}
    assert code_of(TextRenderer(template), assistant=assistant, new=new) == "call_not_rendered"


def test_an_earlier_result_that_is_shortened_later_on() -> None:
    """The probes are short, so only the real head shows it."""
    template = each(
        "<|im_start|>{{ m.role }}\n{{ '[...]' if m.role == 'tool' and m.content | length > 30 "
        "and loop.index0 < messages | length - 4 else m.content }}<|im_end|>\n"
    )
    asked = [
        *HISTORY,
        ANSWER,
        {"role": "tool", "content": "x" * 40, "tool_call_id": "a"},
        ANSWER,
        {"role": "user", "content": "Go on."},
    ]
    new = [*NEW, {"role": "user", "content": "Well?"}]
    assert code_of(TextRenderer(template), history=asked, new=new) == "history_changed"
    dropped = template.replace(" and m.content | length > 30 ", " ").replace("> 30 ", "")
    assert code_of(TextRenderer(dropped), history=asked, new=new) == "history_reordered"


def test_a_count_behind_the_last_message_is_the_templates_own_until_it_changes() -> None:
    count = "{% if messages | length > 3 %}<n={{ messages | length }}>{% endif %}"
    renderer = TextRenderer(BASE + count + PROMPT)
    cache = SpliceCache()
    result = splice(renderer, cache=cache)
    assert text_of(renderer, result).endswith("<n=4><|im_start|>assistant\n")
    prefix, _ = prefix_of(renderer, HISTORY, "It is 4.")
    prompt = np.concatenate([prefix, result.suffix_token_ids])
    sampled = renderer.encode("It is 6.<|im_end|>")
    with pytest.raises(SpliceError) as caught:
        structural_suffix(
            renderer,
            prefix_token_ids=np.concatenate([prompt, sampled]),
            n_sampled=len(sampled),
            history=[*HISTORY, ANSWER, *NEW],
            assistant={"role": "assistant", "content": "It is 6."},
            new_messages=NEW,
            terminator_ids=[renderer.special("<|im_end|>")],
            cache=cache,
        )
    assert caught.value.code == "history_changed"


class Clock:
    """A clock that moves by ``step`` each time it is read."""

    def __init__(self, step: datetime.timedelta) -> None:
        self.now, self.step = datetime.datetime(2026, 1, 31, 23, 59, 59, tzinfo=datetime.UTC), step

    def __call__(self) -> datetime.datetime:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ strftime_now('%H:%M:%S') }}" + BASE + PROMPT, "opening_changed"),
        (BASE + "{{ strftime_now('%H:%M:%S') }}" + PROMPT, "tail_depends_on_text"),
    ],
)
def test_a_ticking_clock_is_refused(template: str, code: str) -> None:
    clock = Clock(datetime.timedelta(seconds=1))
    assert code_of(TextRenderer(template, clock=clock)) == code


def test_a_date_is_no_obstacle_until_it_changes() -> None:
    clock = Clock(datetime.timedelta(0))
    renderer = TextRenderer("Today: {{ strftime_now('%d %b %Y') }}\n" + BASE + PROMPT, clock=clock)
    cache = SpliceCache()
    first = splice(renderer, cache=cache)
    prefix, _ = prefix_of(renderer, HISTORY, "It is 4.")
    sampled = renderer.encode("It is 6.<|im_end|>")
    clock.step = datetime.timedelta(days=1)
    clock()
    clock.step = datetime.timedelta(0)
    with pytest.raises(SpliceError) as caught:
        structural_suffix(
            renderer,
            prefix_token_ids=np.concatenate([prefix, first.suffix_token_ids, sampled]),
            n_sampled=len(sampled),
            history=[*HISTORY, ANSWER, *NEW],
            assistant={"role": "assistant", "content": "It is 6."},
            new_messages=NEW,
            terminator_ids=[renderer.special("<|im_end|>")],
            cache=cache,
        )
    assert caught.value.code == "opening_changed"
