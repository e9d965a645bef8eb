"""What Megatron's two request hooks take and return, where the installed megatron-core lacks them.

Field names and meanings follow Megatron-LM main after its hook change (UPSTREAM section 13); an
engine adapter converts where the installed megatron-core has its own types. Keys of
``offload_params`` that start with ``_`` are ours: HTTP refuses them from clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenplane.capture.prefix_resolver import ResolvedPrefix
from tokenplane.schemas.staged_row import CallEvidence, LedgerEntry
from tokenplane.schemas.tokens import Float32Array, Int32Array

ADMISSION_KEY = "ng_capture"
"""``offload_params`` key of the admission (CONTRACT section 1)."""
COORDS_KEY = "ng_commit_coords"
"""Response key of the acknowledgement (CONTRACT section 1)."""
PREFIX_KEY = "_tokenplane_prefix"
"""``offload_params`` key under which the preparer leaves its ``PreparedPrefix`` for the stager."""
SPLICE_KEY = "_tokenplane_splice"
"""``offload_params`` key of the ``SpliceInputs`` for the structural splice."""
CONTEXT_KEY = "_tokenplane_call"
"""``offload_params`` key of the ``CallContext`` whose evidence goes into the row."""
TEMPLATE_PREFIX_KEY = "template_prefix_token_ids"
"""Megatron's key: rendered history up to and including the last assistant turn."""
TERMINATORS_KEYS = ("terminator_ids", "eos_token_id")
"""Megatron's keys of the turn terminators: a list, or one id."""


@dataclass(frozen=True, slots=True)
class RequestPromptPreparationResult:
    """What ``prepare_prompt`` gives back: the prompt to admit and the offload parameters."""

    prompt: Any
    """int32[P] where a prefix was spliced; else the prompt as it came."""
    offload_params: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class OffloadedRequestPayload:
    """A finished request's heavy data."""

    prompt_token_ids: Int32Array | Sequence[int]
    generated_token_ids: Int32Array | Sequence[int]
    generated_log_probs: Float32Array | Sequence[float]
    prompt_log_probs: Float32Array | Sequence[float] | None = None
    routing_indices: NDArray[np.integer] | None = None
    """int16[P + G - 1 - routing_start, L, K], or None where unknown."""
    media_tensors: dict[str, Any] | None = None
    routing_start: int = 0
    """The input position that the first row of ``routing_indices`` belongs to: an engine that
    reuses a cached prefix, or was asked for the new part only, has none of the positions before."""


@dataclass(frozen=True, slots=True)
class FinishedRequestRecord:
    """A finished request's epochs: ``((token_index, epoch), ...)``, see ``schemas/epochs.py``."""

    policy_epoch: Sequence[Sequence[int]] | None
    kv_cache_epoch: Sequence[Sequence[int]] | None = None
    num_evictions: int = 0


@dataclass(frozen=True, slots=True)
class RequestPayloadStageResult:
    """What ``stage`` gives back for an admitted request; merged into the response's top level."""

    response_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallContext:
    """What the server knows of a call beyond the engine's payload.

    ``evidence`` is completed with the epochs of the finished request by the stager.
    """

    evidence: CallEvidence
    ledger: LedgerEntry | None = None
    """Set in standalone use, where the row is the ledger entry."""


@dataclass(frozen=True, slots=True)
class PreparedPrefix:
    """What the preparer found, for the stager and for the row's evidence."""

    prefix: ResolvedPrefix
    notes: tuple[str, ...] = ()
    """What the splice had to do, e.g. ``terminator_inserted``."""
    resolve_s: float = 0.0
    splice_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpliceInputs:
    """The conversation of a continuation, for the structural splice."""

    renderer: Any
    """A ``capture.splice`` chat template renderer."""
    messages: Sequence[dict[str, Any]]
    """The whole conversation as the template sees it; the last assistant turn is the parent's."""
    tools: Sequence[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    terminator_ids: frozenset[int]
