"""The engine protocol: what a request, a result, a state and an engine are, without torch.

One engine serves one model. Every array that crosses this seam is read-only and C-contiguous
(``np.int32`` ids, ``np.float32`` log-probabilities, ``np.int16`` routes).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np

from tokenplane.schemas.errors import RequestRejectedError

if TYPE_CHECKING:
    import torch

LogprobsMode = Literal["raw", "processed"]
FinishReason = Literal["stop", "length"]
SuspendMode = Literal["persist", "recompute"]
EpochBoundaries = tuple[tuple[int, int], ...]
"""``((input_index, epoch), ...)``, in order; see DESIGN rule 2 for the arithmetic."""

CONTROL_TIMEOUT_S = 60.0
"""How long a control call waits for its turn between two steps unless told otherwise."""

_SEED_RANGE = (-(2**63), 2**63 - 1)


def _reject(field_name: str, expected: str, got: object) -> RequestRejectedError:
    return RequestRejectedError(f"{field_name} is out of range", expected=expected, got=repr(got))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one answer; nonsense is refused on construction, naming the field.

    There is one spelling of "off" per field (0 for ``top_k``, 1.0 for ``top_p``): engines disagree
    about the others, and a value that one of them reads differently must not pass silently.

    Raises: RequestRejectedError.
    """

    max_tokens: int
    """Most tokens to generate, >= 1; the engine lowers it to what fits the context."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens (ties with the k-th stay); 0 keeps all."""
    top_p: float = 1.0
    """In (0, 1]: the smallest set of most likely tokens that reaches this mass; 1 keeps all."""
    seed: int | None = None
    """int64. The same seed gives the same tokens whatever else is in the batch. None: the engine
    draws one and reports it in ``GenerationResult.sampling``."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer, besides the model's own end ids."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the answer, matched on the decoded text as it grows."""
    ignore_eos: bool = False
    """True: the model's own end ids do not stop (``stop_token_ids`` still do)."""
    logprobs_mode: LogprobsMode = "raw"
    """raw: log-softmax of the unmodified logits. processed: of the distribution sampled from."""

    def __post_init__(self) -> None:
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise _reject("max_tokens", "an integer >= 1", self.max_tokens)
        if not _is_number(self.temperature) or self.temperature < 0:
            raise _reject("temperature", "a finite number >= 0", self.temperature)
        if not _is_int(self.top_k) or self.top_k < 0:
            raise _reject("top_k", "an integer >= 0 (0 is off)", self.top_k)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise _reject("top_p", "a number in (0, 1] (1 is off)", self.top_p)
        low, high = _SEED_RANGE
        if self.seed is not None and not (_is_int(self.seed) and low <= self.seed <= high):
            raise _reject("seed", "an int64 or None", self.seed)
        if not all(_is_int(token) and token >= 0 for token in self.stop_token_ids):
            raise _reject("stop_token_ids", "token ids >= 0", self.stop_token_ids)
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise _reject("stop_strings", "non-empty strings", self.stop_strings)
        if self.logprobs_mode not in ("raw", "processed"):
            raise _reject("logprobs_mode", "'raw' or 'processed'", self.logprobs_mode)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to generate from exact token ids."""

    request_id: str
    """Unique among the engine's live requests."""
    prompt_token_ids: np.ndarray
    """int32[P], P >= 1. The engine is conditioned on exactly these."""
    sampling: SamplingParams
    on_tokens: Callable[[np.ndarray], None] | None = None
    """Called on the engine thread with newly released ids, int32[n], n >= 1; must not block or
    raise (raising fails this request alone). An id is released once it cannot belong to a stop
    string any more; ids that hold part of the completed stop string are never released here."""
    routes_from: int = 0
    """In 0..P. Routes of input positions before this one are not needed (an earlier call of the
    rollout has them), so the engine may leave them out."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished answer with the evidence of how it was made."""

    request_id: str
    prompt_token_ids: np.ndarray
    """int32[P], as conditioned on."""
    generated_token_ids: np.ndarray
    """int32[G], as sampled, G >= 1; includes the id (or the ids of the text) that stopped it."""
    generated_log_probs: np.ndarray
    """float32[G], natural log, in ``sampling.logprobs_mode``; finite."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop id or the stop string; None for "length"."""
    policy_epochs: EpochBoundaries
    """Empty if the request started before any weight version was set."""
    kv_cache_epochs: EpochBoundaries
    num_evictions: int
    """How often this request's computed KV cache was dropped."""
    routing_indices: np.ndarray | None
    """int16[P+G-1-routing_start, L, K]: the experts of every input position from ``routing_start``
    on. None for a dense model, or where positions were computed more than once (after a
    recompute)."""
    queue_s: float
    """Admission to first step."""
    prefill_s: float
    """First step to first sampled token."""
    decode_s: float
    """First sampled token to the end."""
    sampling: SamplingParams
    """What was in effect: ``max_tokens`` as clamped, ``seed`` as used."""
    routing_start: int = 0
    """The input position that the first row of ``routing_indices`` belongs to."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves; constant for its life."""

    name: str
    model_id: str
    model_fingerprint: str
    """Hex SHA-256 of the names, shapes, dtypes and bytes of the weights as loaded."""
    tokenizer_fingerprint: str
    """Hex SHA-256 of the tokenizer's serialized form."""
    max_sequence_length: int
    """Prompt and generation together, in tokens."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    engine: str
    """Implementation and version, such as ``megatron-core 0.19.2 cpu``."""


class EngineState(StrEnum):
    """Where an engine stands. ::

        RUNNING --pause--> PAUSED --suspend--> SUSPENDED
        RUNNING <-unpause- PAUSED <--resume--- SUSPENDED
        any --close--> CLOSED        any --unattributable failure--> DEAD --close--> CLOSED

    Requests are accepted (and wait) in PAUSED and SUSPENDED. A control call that is already in
    effect is a no-op; any other from the wrong state raises EngineStateError.
    """

    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    CLOSED = "closed"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and gauges of the present moment."""

    live_requests: int = 0
    """Gauge: being computed, their KV cache allocated."""
    waiting_requests: int = 0
    """Gauge: accepted, not yet started."""
    kv_tokens: int = 0
    """Gauge: positions whose keys and values are held."""
    kv_bytes: int = 0
    """Gauge: bytes allocated for them."""
    steps: int = 0
    """Forward passes."""
    computed_tokens: int = 0
    """Input positions computed (recomputed ones count again)."""
    generated_tokens: int = 0
    finished_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    evictions: int = 0
    weight_updates: int = 0
    failed_weight_updates: int = 0
    step_s: float = field(default=0.0)
    """Time spent in steps."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine behind an asyncio facade.

    Every control call takes effect between two steps and raises: EngineStateError from a state
    that forbids it, EngineDeadError after the engine has died, DeadlineError if its turn did not
    come in time (then it will not take effect later either).
    """

    @property
    def info(self) -> EngineInfo: ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """The finished answer. Cancelling the awaiting task cancels the request in the engine and
        frees its KV cache.

        Raises: RequestRejectedError, ContextOverflowError before admission; EngineError,
        EngineDeadError, EngineStateError, RequestCancelledError (the engine was closed).
        """
        ...

    async def pause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """No step runs from the return on until ``unpause``; live requests keep their state."""
        ...

    async def unpause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None: ...

    async def suspend(self, mode: SuspendMode, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """ "persist" keeps the KV cache, "recompute" drops it (rebuilt after ``unpause``)."""
        ...

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None: ...

    async def set_weight_version(
        self, version: int, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Name the present weights ``version`` (>= 0); a change opens an epoch boundary on every
        live request."""
        ...

    async def update_weights(
        self,
        apply: Callable[[torch.nn.Module], None],
        *,
        version: int,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Run ``apply(model)`` between two steps and then set ``version``: both or neither.

        Once ``apply`` has begun it runs to its end; the deadline bounds only the wait before.
        Raises what ``apply`` raised, after the former weights are back.
        """
        ...

    def weight_version(self) -> int | None: ...

    def state(self) -> EngineState: ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Cancel what is live and end the engine; idempotent."""
        ...
