"""What goes into and comes out of the call path: one model call, and its served answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenplane.engine_adapter.engine import SamplingParams
from tokenplane.schemas.tokens import Int32Array

CaptureStatus = Literal["staged", "capture_failed", "unproven", "off"]
"""staged: a verified row is durable. capture_failed: served, and a failure with its code is kept.
unproven: the ledger could not prove what the call continues. off: ordinary traffic."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered by the model's own template."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """A bare prompt: text, or the ids themselves (then ``text`` is empty)."""

    text: str = ""
    token_ids: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class StandaloneCapture:
    """The call belongs to a rollout of our own ledger."""

    rollout_id: str
    idempotency_key: str | None = None
    request_digest: str | None = None
    """Hex SHA-256 of the body, without what only shapes the reply's transport."""
    parent_response_id: str | None = None


@dataclass(frozen=True, slots=True)
class GymCapture:
    """The call was admitted by NeMo-Gym's model server, whose ledger is the truth."""

    admission: Any
    """``ng_capture`` as it came, not yet checked."""
    offload_params: Mapping[str, Any] = field(default_factory=dict)
    """The client's other ``offload_params``, passed on."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One checked request."""

    prompt: ChatPrompt | CompletionPrompt
    sampling: SamplingParams
    model: str
    """Name of the model as the client asked for it, and as the answer repeats it."""
    capture: StandaloneCapture | GymCapture | None = None
    parse_tools: bool = False
    log_probs: bool = False
    """Whether the client asked for the log-probabilities of ordinary or standalone traffic."""
    response_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique; the answer's ``id`` is this behind the endpoint's prefix."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def answer_id(self) -> str:
        """The ``id`` of the served answer."""
        prefix = "chatcmpl-" if isinstance(self.prompt, ChatPrompt) else "cmpl-"
        return prefix + self.response_id


@dataclass(frozen=True, slots=True)
class CallTimings:
    """Where one call spent its time, in seconds."""

    resolve_s: float = 0.0
    splice_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stage_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The served answer: token-free, save for nothing. Coordinates are there for Gym alone."""

    body: dict[str, Any]
    """The OpenAI object, ``ng_commit_coords`` included where Gym asked."""
    status: CaptureStatus
    model_call_id: str | None
    repeated: bool = False
    """True where an earlier run of the same request answered."""
    timings: CallTimings | None = None
