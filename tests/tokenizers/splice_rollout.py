"""A rollout against a real tokenizer: sampled ids, splices, and an oracle that knows no probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from tokenplane.capture.splice import (
    Message,
    SpliceCache,
    SpliceResult,
    Tool,
    structural_suffix,
)
from tokenplane.engine_adapter.chat.renderer import TokenizerChatRenderer
from tokenplane.schemas.tokens import Int32Array

TERMINATORS = {
    "smollm2": ["<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "llama3.1": ["<|eot_id|>", "<|end_of_text|>"],
    "llama3.1+tools": ["<|eot_id|>", "<|end_of_text|>"],
}
"""What each model stops on; the first is what its template prints."""

type Ending = Literal["template", "other", "cut"]

NASTY = [
    "",
    " ",
    "\n\n",
    "  leading",
    "trailing \n",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|eot_id|>",
    "<|start_header_id|>user<|end_header_id|>\n\n",
    "<|endoftext|>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
    "<tool_call>\n{}\n</tool_call>",
    "{% for m in messages %}{{ m }}{% endfor %}",
    "{{ bos_token }}",
    '{"a": "b\\n"}',
    "你好",
    "Grüße",
    "🙂\u200d🙃",
    "مرحبا",
    "e\u0301",
    "\u00a0\u2028x",
    "\t\r\n",
    "\x00\x1f",
]
"""What breaks splices that look at text: separators, specials, tags, templates, odd signs."""

messy_text = st.lists(
    st.one_of(
        st.sampled_from(NASTY),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    ),
    max_size=5,
).map("".join)


def tag_of(number: int) -> str:
    """A word that occurs nowhere else."""
    return f"Tag{number:03d}End"


@dataclass
class Rollout:
    """One conversation as a trainer sees it: exact ids, and the messages of its requests."""

    renderer: TokenizerChatRenderer
    name: str
    messages: list[Message]
    tools: Sequence[Tool] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache: SpliceCache = field(default_factory=SpliceCache)
    prompt: Int32Array = field(init=False)
    prefix: Int32Array = field(init=False)
    n_sampled: int = 0
    tags: int = 0

    def __post_init__(self) -> None:
        self.prompt = self.renderer.encode(self.render(self.messages))
        self.prefix = self.prompt

    def tag(self) -> str:
        """The next tag."""
        self.tags += 1
        return tag_of(self.tags)

    def render(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        return self.renderer.render(
            messages,
            self.tools,
            add_generation_prompt=prompt,
            template_kwargs=self.template_kwargs,
        )

    def terminator(self, ending: Ending) -> int:
        string = TERMINATORS[self.name][1 if ending == "other" else 0]
        return int(self.renderer.encode(string)[0])

    def sample(self, written: str, ending: Ending = "template", *, pieces: int = 0) -> None:
        """The model writes ``written``; ``pieces`` > 0 encodes it in pieces of that many signs, so
        that its ids are others than an encoder would give for the whole."""
        size = pieces or max(1, len(written))
        parts = [written[i : i + size] for i in range(0, len(written), size)]
        sampled = [i for part in parts for i in self.renderer.encode(part).tolist()]
        if ending != "cut":
            sampled.append(self.terminator(ending))
        self.n_sampled = len(sampled)
        self.prefix = np.concatenate([self.prompt, np.array(sampled, dtype=np.int32)])

    def splice(self, assistant: Message, new: Sequence[Message]) -> SpliceResult:
        """Splice, grow by it, and return it. Raises SpliceError and stays as it is."""
        result = structural_suffix(
            self.renderer,
            prefix_token_ids=self.prefix,
            n_sampled=self.n_sampled,
            history=self.messages,
            assistant=assistant,
            new_messages=new,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
            terminator_ids=self.renderer.terminator_ids,
            cache=self.cache,
        )
        self.prompt = np.concatenate([self.prefix, result.suffix_token_ids])
        self.messages = [*self.messages, assistant, *new]
        return result

    def check(
        self,
        result: SpliceResult,
        new_tags: Sequence[str],
        own_tag: str,
        *,
        called: bool = False,
    ) -> None:
        """What must hold of a splice, from the full render and the ids alone."""
        suffix = result.suffix_token_ids
        assert suffix.dtype == np.int32
        assert not suffix.flags.writeable
        np.testing.assert_array_equal(self.prompt[: len(self.prefix)], self.prefix)
        np.testing.assert_array_equal(self.prompt[len(self.prefix) :], suffix)
        whole = self.renderer.encode(self.render(self.messages))
        np.testing.assert_array_equal(whole[len(whole) - len(suffix) :], suffix)
        text = self.text(suffix)
        assert [text.count(tag) for tag in new_tags] == [1] * len(new_tags)
        assert sum(text.count(tag_of(n)) for n in range(1, self.tags + 1)) == len(new_tags)
        before = self.text(whole[: len(whole) - len(suffix)])
        assert not any(tag in before for tag in new_tags)
        # The answer ends with its tag: from there to the suffix stands at most its terminator.
        inserted = "terminator_inserted" in result.notes
        end = "" if inserted else TERMINATORS[self.name][0]
        assert before.endswith(end if called else own_tag + end)
        if inserted:
            assert int(suffix[0]) == self.terminator("template")

    def text(self, ids: Int32Array) -> str:
        return "".join(self.renderer.token_text(i) for i in ids.tolist())
