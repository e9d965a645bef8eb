"""Templates and conversations that the splice tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.capture.splice_renderers import TextRenderer
from tokenplane.capture.splice import (
    Message,
    SpliceCache,
    SpliceResult,
    Tool,
    structural_suffix,
)
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
