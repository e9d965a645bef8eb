"""``structural_suffix``: the ids that the template prints after the last assistant turn."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenplane.capture.splice.cache import ProvenHistory, SpliceCache
from tokenplane.capture.splice.checks import check_spliced
from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.capture.splice.encoding import encode_tail
from tokenplane.capture.splice.history import prove_again, prove_history
from tokenplane.capture.splice.messages import Conversation, calls, digest
from tokenplane.capture.splice.real_tail import RealTail, read_tail
from tokenplane.capture.splice.reasoning import cut_inside_reasoning
from tokenplane.capture.splice.renderer import ChatTemplateRenderer, Message, Tool
from tokenplane.schemas.tokens import Int32Array, frozen, to_token_ids

_CLOSING_TOKENS = 64
"""How many of the last sampled ids are read for a tool call's closing signs."""


@dataclass(frozen=True, slots=True)
class SpliceResult:
    """What to append to the staged prefix."""

    suffix_token_ids: Int32Array
    """int32[S], read-only. The next prompt is the prefix followed by exactly these."""
    notes: tuple[str, ...]
    """What was decided, sorted: ``continuation`` (cut off, nothing new), ``terminator_inserted``
    (cut off: the first suffix id is the template's terminator, a carried token),
    ``other_terminator`` (the model's own is kept, the template prints another),
    ``terminator_is_header``, ``call_not_printed``, ``trimmed`` and ``json_escaped`` (how new texts
    are printed)."""


def structural_suffix(
    renderer: ChatTemplateRenderer,
    *,
    prefix_token_ids: Sequence[int] | Int32Array,
    n_sampled: int,
    history: Sequence[Message],
    assistant: Message,
    new_messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    terminator_ids: Collection[int],
    cache: SpliceCache | None = None,
) -> SpliceResult:
    """The suffix that continues the staged ``prefix_token_ids`` with ``new_messages``.

    Args:
        prefix_token_ids: int32[P], prompt and generation of the parent call, exactly as staged.
        n_sampled: how many ids at its end the parent sampled, its terminator included.
        history: the request's messages before the parent's answer.
        assistant: the parent's answer as the client sent it back. Its text places the boundary; it
            is never encoded, so a parser's changes to it do no harm.
        new_messages: the messages after it, none of them an assistant's.
        tools, template_kwargs: as for the parent call.
        terminator_ids: ids on which the model stops (tokenizer and generation_config.json).
        cache: one per renderer, shared by its calls. With it, a conversation that grows turn by
            turn costs one render and the encoding of what is new.

    ``prefix ++ suffix`` was checked: it starts with the prefix, holds each new message once, and
    nothing old; what the template prints outside assistant turns is what the prefix holds.

    Raises:
        SpliceError: nothing is appended; ``code`` is a ``SpliceCode``.
    """
    prefix = to_token_ids(prefix_token_ids, name="prefix_token_ids")
    if not 0 <= n_sampled <= len(prefix) or not len(prefix):
        raise splice_error(SpliceCode.BAD_PREFIX, got=f"{n_sampled} sampled of {len(prefix)}")
    if any(message.get("role") == "assistant" for message in new_messages):
        raise splice_error(SpliceCode.ASSISTANT_IN_NEW)
    terminators = frozenset(terminator_ids)
    own = int(prefix[-1]) if n_sampled and int(prefix[-1]) in terminators else None
    if not new_messages:
        if own is not None:
            raise splice_error(SpliceCode.NOTHING_NEW)
        return SpliceResult(frozen(np.empty(0, np.int32)), ("continuation",))
    if own is None and cut_inside_reasoning(renderer, prefix, n_sampled, assistant):
        raise splice_error(SpliceCode.CUT_INSIDE_REASONING)
    conversation = Conversation(history, assistant, new_messages, tools, template_kwargs)
    cache = cache if cache is not None else SpliceCache()
    cache.bind(renderer)

    tail = read_tail(renderer, conversation, terminators, cache)
    key = _history_key(conversation, history, prefix[: len(prefix) - n_sampled])
    proven = cache.history(key)
    if proven is None:
        probed = tail.probed_or_read(renderer, conversation, terminators)
        proven = prove_history(renderer, conversation, probed, tail.head, prefix)
    else:
        prove_again(tail.head, proven)

    ids = encode_tail(renderer, tail.text, tail.skeleton.terminator_id)
    notes = set(tail.notes)
    if own is None:
        _check_cut_call(renderer, tail, assistant, prefix, n_sampled)
        notes.add("terminator_inserted")
        suffix = ids
    else:
        if own != tail.skeleton.terminator_id:
            if tail.skeleton.ends_in_header is not False:
                raise splice_error(
                    SpliceCode.HEADER_TERMINATOR_MISMATCH,
                    expected=tail.skeleton.terminator_id,
                    got=own,
                )
            notes.add("other_terminator")
        suffix = ids[1:]
    prompt = np.concatenate([prefix, suffix])
    check_spliced(prompt, prefix=prefix, after_boundary=ids[len(ids) - len(suffix) :])
    cache.put_history(
        _history_key(conversation, [*history, assistant, *new_messages], prompt),
        ProvenHistory(tail.stable, proven),
    )
    return SpliceResult(frozen(suffix), tuple(sorted(notes)))


def _history_key(
    conversation: Conversation, messages: Sequence[Message], prompt: Int32Array
) -> str:
    """Stands for exactly these messages under exactly this prompt: siblings do not mix."""
    prompt_hash = hashlib.sha256(np.ascontiguousarray(prompt)).hexdigest()
    return digest(messages, conversation.tools, conversation.template_kwargs, prompt_hash)


def _check_cut_call(
    renderer: ChatTemplateRenderer,
    tail: RealTail,
    assistant: Message,
    prefix: Int32Array,
    n_sampled: int,
) -> None:
    """A turn that was cut off with calls must have closed the last one itself."""
    if not calls(assistant):
        return
    sampled = prefix[max(len(prefix) - n_sampled, len(prefix) - _CLOSING_TOKENS) :]
    text = "".join(renderer.token_text(i) for i in sampled.tolist()) if n_sampled else ""
    # A string argument's own quote mark stands before the closers in the probe, not in every call.
    closing = tail.skeleton.closers.strip().lstrip('"')
    if not text.rstrip().endswith(closing):
        raise splice_error(
            SpliceCode.CUT_INSIDE_TOOL_CALL, expected=repr(closing), got=repr(text[-80:])
        )
