"""Whether a turn that was cut off stopped inside its reasoning."""

from __future__ import annotations

from tokenplane.capture.splice.messages import REASONING_FIELDS, calls
from tokenplane.capture.splice.renderer import ChatTemplateRenderer, Message
from tokenplane.schemas.tokens import Int32Array

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis", "<|end|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""What opens and closes reasoning in the models that are known to write any."""

_HEADER_TOKENS = 24
"""How much of the prompt's end to read: generation prompts may open the reasoning themselves."""


def cut_inside_reasoning(
    renderer: ChatTemplateRenderer, prefix_token_ids: Int32Array, n_sampled: int, message: Message
) -> bool:
    """Whether the turn that ends ``prefix_token_ids`` has reasoning open at its end.

    A parser may have taken the opening tag away, so a message that is all reasoning counts too.
    """
    answered = bool(message.get("content")) or bool(calls(message))
    if not answered and any(message.get(name) for name in REASONING_FIELDS):
        return True
    begin = max(0, len(prefix_token_ids) - n_sampled - _HEADER_TOKENS)
    text = "".join(renderer.token_text(i) for i in prefix_token_ids[begin:].tolist())
    return any(text.rfind(opener) > text.rfind(closer) for opener, closer in TAGS)
