"""Which fields of an OpenAI request are read, which are accepted and ignored, which are refused.

A field that would change what is sampled or what the model reads, and that this server does not
offer, is refused by name instead of being dropped: a trainer would otherwise learn from an answer
that was made in another way than the client asked for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from tokenplane.schemas.errors import RequestRejectedError

logger = logging.getLogger("tokenplane.server")

Body = Mapping[str, Any]

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": (),
    "logits_processors": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": (),
    "tool_choice": ("auto", "none"),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Unsupported field to the values that change nothing; null and empty values never do."""

_IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Known to change neither the prompt nor the sampling; ``return_*`` because tokens never leave."""

COMMON_FIELDS = frozenset(
    {
        "ignore_eos",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "model",
        "seed",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
    }
)


def refuse_unsupported(body: Body, read: frozenset[str]) -> None:
    """Refuse every field that is unsupported and active; warn of each unknown one once.

    Args:
        read: the fields that the caller reads itself.

    Raises:
        RequestRejectedError: ``unsupported_parameter``; ``key`` is the field's name.
    """
    for name, value in body.items():
        if name in read or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            _warn_once(name[:80])
            continue
        empty = value is None or (isinstance(value, (str, list, dict)) and not value)
        if not empty and not _is_neutral(value, _NEUTRAL[name]):
            raise rejected(
                name,
                "is not supported here",
                expected=" or ".join(map(repr, _NEUTRAL[name])) or None,
                got=value,
                code="unsupported_parameter",
            )


@functools.lru_cache(maxsize=256)
def _warn_once(name: str) -> None:
    logger.warning("ignoring the unknown request field %r, now and from here on", name)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but a flag where a number is meant is nonsense, and the other way round.
    return any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral
    )


def rejected(
    name: str,
    problem: str,
    *,
    expected: object = None,
    got: object = None,
    code: str = "invalid_request",
) -> RequestRejectedError:
    """The error for one field; its value is shown shortened."""
    shown = None if got is None else repr(got)[:120]
    return RequestRejectedError(
        f"{name} {problem}", code=code, key=name, expected=expected, got=shown
    )


def read_bool(body: Body, name: str) -> bool:
    """A flag; absent and null are False.

    Raises:
        RequestRejectedError: no boolean.
    """
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise rejected(name, "must be a boolean", got=value)
    return value


def read_int(body: Body, name: str) -> int | None:
    """An integer, or None where absent or null. A float without a fraction is no integer.

    Raises:
        RequestRejectedError: no integer.
    """
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise rejected(name, "must be an integer", got=value)
    return value


def read_number(body: Body, name: str) -> float | None:
    """A number, or None where absent or null.

    Raises:
        RequestRejectedError: no number.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise rejected(name, "must be a number", got=value)
    return float(value)


def read_text(body: Body, name: str) -> str | None:
    """A string, or None where absent or null.

    Raises:
        RequestRejectedError: no string.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise rejected(name, "must be a string", got=value)
    return value


def read_object(body: Body, name: str) -> dict[str, Any] | None:
    """An object, or None where absent or null.

    Raises:
        RequestRejectedError: no object.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise rejected(name, "must be an object", got=value)
    return value
