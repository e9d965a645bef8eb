"""One request inside Megatron's dynamic engine: stops, draws, epochs, times and what came of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tokenplane.engine_adapter.cpu.request import EpochTrack
from tokenplane.engine_adapter.engine import (
    EngineInfo,
    EpochBoundaries,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from tokenplane.engine_adapter.sampling import make_generator, resolve_seed
from tokenplane.engine_adapter.sampling_stops import Detokenize, Stop, StopMatcher
from tokenplane.schemas.errors import EngineError

OnTokens = Callable[[np.ndarray], None]


class DynamicEpochs(EpochTrack):
    """Epoch boundaries of a request whose first positions may come from the prefix cache."""

    def start_kv(self, pieces: Sequence[tuple[int, int]]) -> None:
        """The KV cache is about to be filled: ``pieces`` ``(input_index, epoch)``, in order.

        Cached blocks keep the epoch that computed them, so a stale prefix is seen in the evidence.
        """
        if self._policy:
            merged: list[tuple[int, int]] = []
            for at, epoch in pieces:
                if not merged or merged[-1][1] != epoch:
                    merged.append((at, epoch))
            self._kv = merged


class DynamicRequest:
    """What we add to Megatron's own record of a request. Owned by the engine thread."""

    def __init__(
        self,
        key: str,
        prompt: np.ndarray,
        sampling: SamplingParams,
        info: EngineInfo,
        detokenize: Detokenize | None,
        on_tokens: OnTokens | None,
        version: int | None,
    ) -> None:
        """``sampling`` must be effective (see ``effective``)."""
        self.key = key
        self.prompt = prompt
        self.sampling = sampling
        self.on_tokens = on_tokens
        self.epochs = DynamicEpochs(version)
        self.generated = 0
        self.in_context = False
        """True while Megatron's context holds its KV cache."""
        self.num_evictions = 0
        self.stop: Stop | None = None
        self.error: Exception | None = None
        self.cancelled = False
        self.greedy = sampling.temperature == 0
        self._generator = None if self.greedy else make_generator(sampling)
        eos = () if sampling.ignore_eos else info.eos_token_ids
        self._matcher = StopMatcher(
            frozenset(sampling.stop_token_ids) | frozenset(eos), sampling.stop_strings, detokenize
        )
        self._admitted_s = time.monotonic()
        self._started_s = self._first_token_s = self._ended_s = self._admitted_s

    @property
    def over(self) -> bool:
        """Nothing more shall be generated for it."""
        return self.cancelled or self.error is not None or self.stop is not None

    def draw(self) -> float:
        """The next uniform of its own generator; one for each token of a non-greedy answer."""
        if self._generator is None:
            return 0.0
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))

    def started(self, kv: Sequence[tuple[int, int]]) -> None:
        """Its positions are about to be computed (again, after an eviction)."""
        if not self.in_context and not self.generated:
            self._started_s = time.monotonic()
        self.in_context = True
        self.epochs.start_kv(kv)

    def take(self, token: int) -> bool:
        """Takes the id sampled in this step; True if the answer ends with it.

        An id below zero says that the logits were not finite: the request fails rather than receive
        an invented token. What its callback raises fails this request alone.
        """
        if self.cancelled:
            return True
        if token < 0:
            self.error = EngineError("the model gave logits that are not finite", key=self.key)
            return True
        if not self.generated:
            self._first_token_s = time.monotonic()
        self.generated += 1
        self.stop = self._matcher.push(token)
        ended = self.stop is not None or self.generated >= self.sampling.max_tokens
        if ended:
            self._matcher.finish(self.stop)
        released = self._matcher.take_released()
        if released and self.on_tokens is not None:
            try:
                self.on_tokens(_frozen(released, np.int32))
            except Exception as error:  # noqa: BLE001 - handed to the request's waiter
                self.error = error
        return ended or self.error is not None

    def change_version(self, version: int, computed: int | None = None) -> None:
        """Open an epoch boundary at the next position to be computed.

        ``computed``: input positions in the cache, where a prefill is under way.
        """
        total = len(self.prompt) + self.generated
        if computed is None:
            computed = total - 1 if self.in_context else 0
        self.epochs.change(version, total=total, computed=computed, generated=self.generated)

    def dropped(self, version: int | None) -> bool:
        """Its KV cache is gone; False if it had none."""
        if not self.in_context:
            return False
        self.in_context = False
        self.num_evictions += 1
        self.epochs.restart_kv(version)
        return True

    def evidence(self) -> dict[str, Any]:
        """What a reply must carry beside Megatron's own fields, in plain types."""
        now = time.monotonic()
        stop = None if self.stop is None else self.stop.reason
        return {
            "policy": [list(pair) for pair in self.epochs.policy],
            "kv": [list(pair) for pair in self.epochs.kv],
            "evictions": self.num_evictions,
            "stop": stop,
            "queue_s": self._started_s - self._admitted_s,
            "prefill_s": self._first_token_s - self._started_s,
            "decode_s": now - self._first_token_s,
        }


def effective(request: GenerationRequest, info: EngineInfo) -> SamplingParams:
    """The parameters that will be in effect: with a seed, and no longer than the context."""
    room = info.max_sequence_length - len(request.prompt_token_ids)
    sampling = resolve_seed(request.sampling)
    return dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room))


def to_wire(key: str, sampling: SamplingParams) -> dict[str, Any]:
    """What travels with a request to the engine, in types that msgpack has."""
    return {"key": key, **dataclasses.asdict(sampling)}


def parse_wire(wire: dict[str, Any]) -> tuple[str, SamplingParams]:
    """The inverse of ``to_wire``. Raises: RequestRejectedError, KeyError, TypeError."""
    values = dict(wire)
    key = str(values.pop("key"))
    for name in ("stop_token_ids", "stop_strings"):
        values[name] = tuple(values[name])
    return key, SamplingParams(**values)


def make_result(
    key: str,
    prompt: np.ndarray,
    sampling: SamplingParams,
    tokens: Sequence[int],
    log_probs: Sequence[float],
    routes: np.ndarray | None,
    evidence: dict[str, Any],
) -> GenerationResult:
    """The finished answer from Megatron's lists and our evidence.

    Raises: EngineError if the lists disagree or hold values that are not finite.
    """
    logs = np.minimum(np.array(log_probs, dtype=np.float32), np.float32(0))
    if len(tokens) != len(logs) or not len(tokens) or not np.isfinite(logs).all():
        raise EngineError(
            "the engine's log-probabilities do not fit its tokens",
            key=key,
            expected=f"{len(tokens)} finite values",
            got=f"{len(logs)} values",
        )
    logs.flags.writeable = False
    if evidence["evictions"] or (routes is not None and not routes.size):
        routes = None  # earlier positions were computed in another pass, or nothing is known
    if routes is not None:
        routes = np.ascontiguousarray(routes, dtype=np.int16)
        routes.flags.writeable = False
    return GenerationResult(
        request_id=key,
        prompt_token_ids=prompt,
        generated_token_ids=_frozen(tokens, np.int32),
        generated_log_probs=logs,
        finish_reason="length" if evidence["stop"] is None else "stop",
        stop_reason=evidence["stop"],
        policy_epochs=_boundaries(evidence["policy"]),
        kv_cache_epochs=_boundaries(evidence["kv"]),
        num_evictions=evidence["evictions"],
        routing_indices=routes,
        queue_s=evidence["queue_s"],
        prefill_s=evidence["prefill_s"],
        decode_s=evidence["decode_s"],
        sampling=sampling,
    )


def _boundaries(pairs: Sequence[Sequence[int]]) -> EpochBoundaries:
    return tuple((int(at), int(epoch)) for at, epoch in pairs)


def _frozen(values: object, dtype: type[np.generic]) -> np.ndarray:
    array = np.array(values, dtype=dtype, order="C")
    array.flags.writeable = False
    return array
