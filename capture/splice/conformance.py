"""``conformance_report``: which conversation shapes a template lets us splice, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tokenplane.capture.splice.cache import SpliceCache
from tokenplane.capture.splice.codes import SpliceCode
from tokenplane.capture.splice.messages import calls, function_of, texts
from tokenplane.capture.splice.parts import printed_forms
from tokenplane.capture.splice.probes import render
from tokenplane.capture.splice.renderer import ChatTemplateRenderer, Message, Tool
from tokenplane.capture.splice.shapes import Shape, shapes
from tokenplane.capture.splice.structural import structural_suffix
from tokenplane.schemas.errors import SpliceError
from tokenplane.schemas.tokens import Int32Array

type Outcome = Literal["exact", "template_equal", "refused", "raises", "wrong"]


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """What became of one shape."""

    shape: str
    outcome: Outcome
    """``exact``: the spliced prompt is the full render, id by id. ``template_equal``: the suffix is
    the full render's own, whose earlier part differs from what the model saw (reasoning taken
    away, another terminator). ``refused``: with ``code``. ``raises``: the template itself rejects
    the conversation. ``wrong``: the suffix is not the full render's; a defect of the splice."""
    code: str = ""
    detail: str = ""
    notes: tuple[str, ...] = ()


def conformance_report(
    renderer: ChatTemplateRenderer, terminator_ids: Collection[int]
) -> list[ShapeReport]:
    """Splice every shape and compare with the full render of the same conversation.

    The staged prefix is what an engine would have seen and sampled: the history with a generation
    prompt, then the answer as the template prints it, then a terminator.
    """
    ids = sorted(terminator_ids)
    names = [renderer.token_text(i) for i in ids]
    return [_judge(renderer, shape, ids, SpliceCache()) for shape in shapes(names[0])]


def sampled_text(
    renderer: ChatTemplateRenderer,
    history: Sequence[Message],
    assistant: Message,
    tools: Sequence[Tool] | None,
    template_kwargs: Mapping[str, Any] | None,
    terminators: Collection[str],
) -> str:
    """What a model would have written for ``assistant``, without its terminator.

    Raises: SpliceError ``template_raises``.
    """
    before = render(renderer, history, tools, template_kwargs)
    try:
        alone = render(
            renderer, [*history, assistant], tools, template_kwargs, add_generation_prompt=False
        )
    except SpliceError:
        alone = ""
    if not alone.startswith(before):
        functions = [function_of(call) for call in calls(assistant)]
        return "".join([*texts(assistant), *(f"<tool_call>{f}</tool_call>" for f in functions)])
    body = alone[len(before) :]
    ends = [body.find(name) for name in terminators if name in body]
    return body[: min(ends)] if ends else body.rstrip("\n")


def _judge(
    renderer: ChatTemplateRenderer, shape: Shape, ids: Sequence[int], cache: SpliceCache
) -> ShapeReport:
    seen = shape.history if shape.seen_history is None else shape.seen_history
    names = [renderer.token_text(i) for i in ids]
    more = (shape.tools, shape.template_kwargs)
    try:
        prompt = render(renderer, seen, *more)
        body = sampled_text(renderer, seen, shape.assistant, *more, names)
        full = prompt + body
        if shape.new:
            full = render(renderer, [*shape.history, shape.assistant, *shape.new], *more)
    except SpliceError as error:
        return ShapeReport(shape.name, "raises", error.code, str(error.got))
    sampled = renderer.encode(body)
    terminator = _printed_terminator(full, names, ids)
    if shape.ending != "cut":
        others = [i for i in ids if i != terminator]
        end = others[0] if shape.ending == "other_terminator" and others else terminator
        sampled = np.append(sampled, np.int32(end))
    prefix = np.concatenate([renderer.encode(prompt), sampled])
    try:
        result = structural_suffix(
            renderer,
            prefix_token_ids=prefix.tolist(),
            n_sampled=len(sampled),
            history=shape.history,
            assistant=shape.assistant,
            new_messages=shape.new,
            tools=shape.tools,
            template_kwargs=shape.template_kwargs,
            terminator_ids=ids,
            cache=cache,
        )
    except SpliceError as error:
        outcome: Outcome = "raises" if error.code == SpliceCode.TEMPLATE_RAISES else "refused"
        return ShapeReport(shape.name, outcome, error.code, str(error))
    outcome = _compare(renderer, shape, renderer.encode(full), prefix, result.suffix_token_ids)
    return ShapeReport(shape.name, outcome, notes=result.notes)


def _printed_terminator(full: str, names: Sequence[str], ids: Sequence[int]) -> int:
    """The terminator that this template prints: the most frequent one, the first if none is."""
    return max(zip(ids, names, strict=True), key=lambda pair: full.count(pair[1]))[0]


def _compare(
    renderer: ChatTemplateRenderer,
    shape: Shape,
    whole: Int32Array,
    prefix: Int32Array,
    suffix: Int32Array,
) -> Outcome:
    if not shape.new:
        return "exact" if not len(suffix) else "wrong"
    if np.array_equal(whole, np.concatenate([prefix, suffix])):
        return "exact"
    text = "".join(renderer.token_text(i) for i in suffix.tolist())
    shown = all(
        not want.isascii() or any(form in text for form, _ in printed_forms(want))
        for message in shape.new
        for want in texts(message)
    )
    same = np.array_equal(whole[len(whole) - len(suffix) :], suffix)
    return "template_equal" if same and shown else "wrong"
