"""Templates that do what breaks a splice: each is refused with the code that names it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.capture.splice_renderers import TextRenderer
from tokenplane.capture.splice import (
    EXPLANATIONS,
    Message,
    SpliceCache,
    SpliceCode,
    SpliceResult,
    Tool,
    conformance_report,
    structural_suffix,
)
from tokenplane.capture.splice.shapes import TOOLS
from tokenplane.schemas.errors import SpliceError
from tokenplane.schemas.tokens import Int32Array

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
BASE = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST = (
    "{% set a = (messages | selectattr('role', 'equalto', 'assistant') | list)[-1:] %}"
    "{% set a = a[0] if a else {'content': ''} %}"
)
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

HISTORY: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2, tell me in many words?"},
]
ANSWER: Message = {"role": "assistant", "content": "It is 4."}
NEW: list[Message] = [{"role": "user", "content": "And 3+3, what is this?"}]


def each(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}" + PROMPT


def prefix_of(
    renderer: TextRenderer,
    history: Sequence[Message],
    written: str,
    tools: Sequence[Tool] | None = None,
    end: str = "<|im_end|>",
) -> tuple[Int32Array, int]:
    """(Staged prefix, number of sampled ids)."""
    prompt = renderer.render(history, tools, add_generation_prompt=True, template_kwargs=None)
    sampled = renderer.encode(written + end)
    return np.concatenate([renderer.encode(prompt), sampled]), len(sampled)


def splice(
    renderer: TextRenderer,
    history: Sequence[Message] = HISTORY,
    assistant: Message = ANSWER,
    new: Sequence[Message] = NEW,
    *,
    tools: Sequence[Tool] | None = None,
    end: str = "<|im_end|>",
    terminators: Sequence[str] = ("<|im_end|>",),
    cache: SpliceCache | None = None,
) -> SpliceResult:
    prefix, n_sampled = prefix_of(renderer, history, str(assistant["content"]), tools, end)
    return structural_suffix(
        renderer,
        prefix_token_ids=prefix,
        n_sampled=n_sampled,
        history=history,
        assistant=assistant,
        new_messages=new,
        tools=tools,
        terminator_ids=[renderer.special(t) for t in terminators],
        cache=cache,
    )


def code_of(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(SpliceError) as caught:
        splice(*args, **kwargs)
    return caught.value.code


def text_of(renderer: TextRenderer, result: SpliceResult) -> str:
    return "".join(renderer.token_text(i) for i in result.suffix_token_ids.tolist())


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


def test_texts_that_the_template_trims_or_escapes() -> None:
    renderer = TextRenderer(each("<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"))
    new = [{"role": "user", "content": "  so?\n"}]
    result = splice(renderer, new=new)
    assert result.notes == ("trimmed",)
    assert text_of(renderer, result) == "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    quoting = TextRenderer(
        each(
            "<|im_start|>{{ m.role }}\n"
            "{{ m.content | tojson if m.role == 'user' else m.content }}<|im_end|>\n"
        )
    )
    result = splice(quoting, new=[{"role": "user", "content": '"é"\n'}])
    assert result.notes == ("json_escaped",)


def test_a_terminator_that_is_the_next_header() -> None:
    specials = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
    renderer = TextRenderer(GLM, specials)
    ends = ["<|user|>", "<|observation|>"]
    result = splice(renderer, end="<|user|>", terminators=ends)
    assert result.notes == ("terminator_is_header",)
    assert text_of(renderer, result) == f"\n{NEW[0]['content']}<|assistant|>\n"
    cut = splice(renderer, end="", terminators=ends)
    assert text_of(renderer, cut) == f"<|user|>\n{NEW[0]['content']}<|assistant|>\n"
    code = code_of(renderer, end="<|observation|>", terminators=ends)
    assert code == "header_terminator_mismatch"


def test_history_that_closes_turns_with_a_token_on_which_no_model_stops() -> None:
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    renderer = TextRenderer(template, ["<|start|>", "<|message|>", "<|end|>", "<|return|>"])
    answer = {"role": "assistant", "content": "It is 4."}
    result = splice(renderer, assistant=answer, end="<|return|>", terminators=["<|return|>"])
    assert result.notes == ("other_terminator",)
    assert text_of(renderer, result) == (
        f"<|start|>user<|message|>{NEW[0]['content']}<|end|><|start|>assistant"
    )


def test_a_terminator_that_does_not_stand_apart() -> None:
    class Merging(TextRenderer):
        def encode(self, text: str) -> Int32Array:
            return super().encode(text.replace("x<|im_end|>", "\N{FULL BLOCK}"))

    assert code_of(Merging(BASE + PROMPT)) == "terminator_not_one_token"


def test_the_conformance_report_says_wrong_where_it_is() -> None:
    """A vocabulary whose ids depend on how a text begins: no suffix fits the whole render."""

    class Drifting(TextRenderer):
        def encode(self, text: str) -> Int32Array:
            ids = super().encode(text)
            return ids if text.startswith("<") else np.where(ids == ord("?"), ord("!"), ids)

    renderer = Drifting(BASE + PROMPT)
    report = conformance_report(renderer, [renderer.special("<|im_end|>")])
    outcomes = {row.shape: row.outcome for row in report}
    assert outcomes["plain"] == "wrong"
    assert outcomes["not ASCII"] == "exact"


def test_texts_that_hold_the_marker() -> None:
    renderer = TextRenderer(BASE + PROMPT)
    new = [{"role": "user", "content": "zqvend00000zqv and jxknew00000jxk"}]
    assert "jxknew00000jxk" in text_of(renderer, splice(renderer, new=new))
    new = [{"role": "user", "content": "zqv jxk wvz"}]
    assert code_of(renderer, new=new) == "marker_collision"


def test_requests_that_are_no_continuation() -> None:
    renderer = TextRenderer(BASE + PROMPT)
    assert code_of(renderer, new=[]) == "nothing_new"
    assert code_of(renderer, new=[ANSWER, *NEW]) == "assistant_in_new"
    for prefix, n_sampled in (([], 0), ([1, 2], 3), ([1, 2], -1)):
        with pytest.raises(SpliceError) as caught:
            structural_suffix(
                renderer,
                prefix_token_ids=prefix,
                n_sampled=n_sampled,
                history=HISTORY,
                assistant=ANSWER,
                new_messages=NEW,
                terminator_ids=[renderer.special("<|im_end|>")],
            )
        assert caught.value.code == "bad_prefix"


@pytest.mark.parametrize(
    ("assistant", "opened"),
    [
        ({"role": "assistant", "content": "<think>\nhm"}, ""),
        ({"role": "assistant", "content": "hm"}, "<think>\n"),
        ({"role": "assistant", "content": "", "reasoning_content": "hm"}, ""),
    ],
)
def test_a_turn_that_was_cut_off_while_thinking(assistant: Message, opened: str) -> None:
    renderer = TextRenderer(BASE + PROMPT.replace("assistant\n", f"assistant\n{opened}"))
    assert code_of(renderer, assistant=assistant, end="") == "cut_inside_reasoning"
    if assistant["content"]:
        closed = {**assistant, "content": f"{assistant['content']}\n</think>\n\nIt is"}
        assert "terminator_inserted" in splice(renderer, assistant=closed, end="").notes


def test_every_code_is_explained_in_one_sentence() -> None:
    assert set(EXPLANATIONS) == set(SpliceCode)
    for sentence in EXPLANATIONS.values():
        assert sentence.endswith(".")
        assert ". " not in sentence
    page = (Path(__file__).resolve().parents[2] / "docs" / "splice.md").read_text()
    for code, sentence in EXPLANATIONS.items():
        assert f"| `{code}` | {sentence} |" in page
