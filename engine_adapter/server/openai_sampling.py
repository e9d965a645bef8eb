"""The effective sampling parameters of one request: what it says, else the model's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenplane.engine_adapter.engine import LogprobsMode, SamplingParams
from tokenplane.engine_adapter.server.openai_fields import (
    Body,
    read_bool,
    read_int,
    read_number,
    rejected,
)
from tokenplane.schemas.errors import ConfigError

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
"""Characters of one stop string: every sampled token is compared with all its beginnings."""
MAX_STOP_IDS = 1024
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing. Training must assume the same values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    logprobs_mode: LogprobsMode = "raw"
    max_answer_tokens: int = 1 << 30
    """Most tokens of an answer whose request names no limit; the engine lowers it to what fits."""

    def __post_init__(self) -> None:
        SamplingParams(
            max_tokens=self.max_answer_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            logprobs_mode=self.logprobs_mode,
        )


def parse_defaults(
    generation_config: Mapping[str, Any],
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    logprobs_mode: LogprobsMode = "raw",
    max_answer_tokens: int | None = None,
) -> SamplingDefaults:
    """Defaults from a ``generation_config.json``; arguments that are given win over it.

    ``do_sample: false`` means greedy. Absent keys are neutral (temperature 1, no cut), not the
    values that transformers would fill in: what is not written was not chosen.

    Raises:
        ConfigError: a value in the file has the wrong type.
        RequestRejectedError: a value is out of range.
    """
    greedy = generation_config.get("do_sample") is False
    found_temperature = _number(generation_config, "temperature", 1.0)
    found_top_k = _number(generation_config, "top_k", 0)
    if found_top_k != int(found_top_k):
        raise ConfigError("top_k of the generation config", expected="an integer", got=found_top_k)
    chosen_top_k = int(found_top_k) if top_k is None else top_k
    return SamplingDefaults(
        temperature=(0.0 if greedy else found_temperature) if temperature is None else temperature,
        top_p=_number(generation_config, "top_p", 1.0) if top_p is None else top_p,
        top_k=0 if chosen_top_k == -1 else chosen_top_k,
        logprobs_mode=logprobs_mode,
        **({} if max_answer_tokens is None else {"max_answer_tokens": max_answer_tokens}),
    )


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"{name} of the generation config", expected="a number", got=repr(value))
    return value


def parse_sampling(body: Body, defaults: SamplingDefaults) -> SamplingParams:
    """The sampling parameters of a request body.

    ``max_completion_tokens`` comes before ``max_tokens``. ``top_k`` -1, 0 and null are off.

    Raises:
        RequestRejectedError: a value has the wrong type or is out of range; ``key`` names it.
    """
    limit = None
    for name in ("max_tokens", "max_completion_tokens"):
        value = read_int(body, name)
        if value is not None and value < 1:
            raise rejected(name, "is out of range", expected=">= 1", got=value)
        limit = limit if value is None else value
    temperature = read_number(body, "temperature")
    if temperature is not None and temperature < 0:
        raise rejected(
            "temperature", "is out of range", expected=">= 0 (0 is greedy)", got=temperature
        )
    top_p = read_number(body, "top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise rejected(
            "top_p", "is out of range", expected="above 0, at most 1 (1 is off)", got=top_p
        )
    top_k = read_int(body, "top_k")
    if top_k is not None and not -1 <= top_k <= _INT32_MAX:
        raise rejected(
            "top_k",
            "is out of range",
            expected=f"1 to {_INT32_MAX}, or 0, -1 or null for off",
            got=top_k,
        )
    seed = read_int(body, "seed")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise rejected("seed", "is out of range", expected="an int64", got=seed)
    return SamplingParams(
        max_tokens=defaults.max_answer_tokens if limit is None else limit,
        temperature=defaults.temperature if temperature is None else temperature,
        top_k=defaults.top_k if top_k is None else max(top_k, 0),
        top_p=defaults.top_p if top_p is None else top_p,
        seed=seed,
        stop_token_ids=_stop_token_ids(body),
        stop_strings=_stop_strings(body),
        ignore_eos=read_bool(body, "ignore_eos"),
        logprobs_mode=defaults.logprobs_mode,
    )


def _stop_strings(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    texts = isinstance(stops, list) and all(
        isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops
    )
    if not texts or len(stops) > MAX_STOPS:
        raise rejected(
            "stop",
            "is malformed",
            expected=f"up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
            got=value,
        )
    return tuple(stops)


def _stop_token_ids(body: Body) -> tuple[int, ...]:
    value = body.get("stop_token_ids")
    ids = [] if value is None else value
    listed = isinstance(ids, list) and len(ids) <= MAX_STOP_IDS
    if not listed or not all(type(i) is int and 0 <= i <= _INT32_MAX for i in ids):
        raise rejected(
            "stop_token_ids",
            "is malformed",
            expected=f"a list of up to {MAX_STOP_IDS} token ids",
            got=value,
        )
    return tuple(ids)
