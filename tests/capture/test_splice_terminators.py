"""Structural splices round terminators, trimmed texts, markers and turns that were cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.capture.splice_conversations import (
    ANSWER,
    BASE,
    GLM,
    HISTORY,
    NEW,
    PROMPT,
    code_of,
    each,
    splice,
    text_of,
)
from tests.capture.splice_renderers import TextRenderer
from tokenplane.capture.splice import (
    EXPLANATIONS,
    Message,
    SpliceCode,
    conformance_report,
    structural_suffix,
)
from tokenplane.schemas.errors import SpliceError
from tokenplane.schemas.tokens import Int32Array


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
