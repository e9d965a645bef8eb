"""The completion stager: a finished request becomes one staged row before its answer leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenplane.capture.active_call import code_of
from tokenplane.capture.core import (
    RolloutTokenCapture,
    StagingSink,
    failed_coords,
)
from tokenplane.capture.failures import FailureLog
from tokenplane.capture.hook_types import (
    ADMISSION_KEY,
    CONTEXT_KEY,
    COORDS_KEY,
    PREFIX_KEY,
    CallContext,
    PreparedPrefix,
    RequestPayloadStageResult,
)
from tokenplane.capture.prefix_resolver import PrefixResolver
from tokenplane.schemas.epochs import Boundaries, admission_version, spans_epochs, to_boundaries
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.staged_row import CallEvidence
from tokenplane.schemas.tokens import Int32Array, frozen, to_token_ids
from tokenplane.schemas.wire import CaptureAdmission, CommitCoords, parse_model

logger = logging.getLogger("tokenplane.capture")

ROUTES = "routed_experts"


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """What became of one admitted call."""

    coords: CommitCoords | None
    """None only where the admission itself is unreadable: there is nothing to name then."""
    stage_s: float
    """Seconds from the finished request to the durable row (or the failure)."""

    @property
    def staged(self) -> bool:
        """True if a verified row is durable."""
        return self.coords is not None and self.coords.disposition == "staged"


class TQMegatronTokenStager:
    """Stages admitted completions; declines ordinary traffic.

    Never raises into the engine loop for a call that carries an admission: every failure becomes
    ``capture_failed`` coordinates and an entry in ``failures``. Thread-safe.

    Args:
        sink: where rows go.
        resolver: if given, learns each staged sequence, so that the next turn on this worker needs
            no store read; it also resolves prefixes that no preparer left.
    """

    def __init__(
        self,
        sink: StagingSink,
        *,
        resolver: PrefixResolver | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self.failures = failures if failures is not None else FailureLog()
        self._resolver = resolver
        self._capture = RolloutTokenCapture(
            sink=sink, weight_version_fn=_no_provider, failures=self.failures
        )
        self._lock = threading.Lock()
        self._epoch_span_count = 0
        self._staged_count = 0

    @property
    def epoch_span_count(self) -> int:
        """Staged calls whose generation lived under more than one policy epoch."""
        return self._epoch_span_count

    @property
    def staged_count(self) -> int:
        """Calls that were staged by this object."""
        return self._staged_count

    def stage(
        self,
        uid: str,
        payload: Any,
        *,
        finished_metadata: Any,
        offload_params: dict[str, Any] | None = None,
    ) -> RequestPayloadStageResult | None:
        """Stage an admitted request; None for ordinary traffic, whose payload stays on the reply.

        Args:
            uid: the engine's request id, non-empty.
            payload: ``OffloadedRequestPayload`` or an object with its fields.
            finished_metadata: ``FinishedRequestRecord`` or an object with its fields.

        Raises:
            ValueError: ``uid`` is empty.
        """
        if not uid:
            raise ValueError("uid must not be empty")
        if not offload_params or ADMISSION_KEY not in offload_params:
            return None
        outcome = self.stage_admitted(
            uid, payload, finished_metadata=finished_metadata, offload_params=offload_params
        )
        if outcome.coords is None:
            return RequestPayloadStageResult()
        return RequestPayloadStageResult({COORDS_KEY: outcome.coords.model_dump()})

    def stage_admitted(
        self, uid: str, payload: Any, *, finished_metadata: Any, offload_params: dict[str, Any]
    ) -> StageOutcome:
        """``stage`` for a request that carries an admission, with the outcome as an object."""
        started = time.perf_counter()
        admission: CaptureAdmission | None = None
        policy: Boundaries = ()
        coords: CommitCoords | None
        version = 0  # the wire demands an integer even where no epoch is known
        try:
            admission = parse_model(CaptureAdmission, offload_params[ADMISSION_KEY], key=uid)
            policy = to_boundaries(getattr(finished_metadata, "policy_epoch", None))
            version = admission_version(policy)
            kv = to_boundaries(
                getattr(finished_metadata, "kv_cache_epoch", None), name="kv_cache_epochs"
            )
            evictions = int(getattr(finished_metadata, "num_evictions", 0) or 0)
            coords = self._stage(admission, version, payload, offload_params, policy, kv, evictions)
        except Exception as exc:
            # Whatever went wrong, the answer is served (invariant 3) and the reason is kept.
            logger.debug("staging %s failed", uid, exc_info=True)
            self.failures.record(
                rollout_id="" if admission is None else admission.rollout_id,
                model_call_id=uid if admission is None else admission.model_call_id,
                code="invalid_admission" if admission is None else code_of(exc, "stager_error"),
                message=f"{type(exc).__name__}: {exc}",
            )
            coords = None if admission is None else failed_coords(admission, version)
        outcome = StageOutcome(coords, time.perf_counter() - started)
        if outcome.staged:
            with self._lock:
                self._staged_count += 1
                self._epoch_span_count += spans_epochs(policy)
        return outcome

    def _stage(
        self,
        admission: CaptureAdmission,
        version: int,
        payload: Any,
        offload_params: dict[str, Any],
        policy: Boundaries,
        kv: Boundaries,
        evictions: int,
    ) -> CommitCoords:
        prepared = offload_params.get(PREFIX_KEY)
        context = offload_params.get(CONTEXT_KEY)
        prefix, source, notes = self._prefix(admission, prepared)
        call = self._capture.begin_call(admission, prefix_token_ids=prefix, weight_version=version)
        prompt = to_token_ids(_plain(payload.prompt_token_ids), name="prompt_token_ids")
        generated = to_token_ids(_plain(payload.generated_token_ids), name="generated_token_ids")
        base = context.evidence if isinstance(context, CallContext) else CallEvidence(())
        evidence = dataclasses.replace(
            base,
            policy_epochs=policy,
            kv_cache_epochs=kv,
            num_evictions=evictions,
            prefix_source=source,
            splice_notes=notes,
        )
        attachments, extras = self._routes(payload, admission, len(prompt) + len(generated))
        coords = self._capture.complete_call(
            call,
            prompt_token_ids=prompt,
            generated_token_ids=generated,
            generated_logprobs=_plain(payload.generated_log_probs),
            extras=extras,
            attachments=attachments,
            evidence=evidence,
            ledger=context.ledger if isinstance(context, CallContext) else None,
        )
        if self._resolver is not None and coords.disposition == "staged":
            self._remember(admission, coords, prompt, generated)
        return coords

    def _prefix(
        self, admission: CaptureAdmission, prepared: object
    ) -> tuple[Int32Array | None, str, tuple[str, ...]]:
        """The prefix, where it came from, and what the splice noted. None: the admission's own."""
        if isinstance(prepared, PreparedPrefix):
            ids = None if admission.mode == "text" else prepared.prefix.token_ids
            return ids, prepared.prefix.source, prepared.notes
        if admission.mode == "text":
            return None, "root", ()
        if admission.staging_chain and self._resolver is not None:
            found = self._resolver.resolve(admission)
            return found.token_ids, found.source, ()
        return None, "inline", ()

    def _remember(
        self,
        admission: CaptureAdmission,
        coords: CommitCoords,
        prompt: Int32Array,
        generated: Int32Array,
    ) -> None:
        if self._resolver is None or coords.staging_key is None or coords.chain_hash is None:
            return
        self._resolver.remember(
            staging_key=coords.staging_key,
            parent_staging_key=admission.staging_chain[-1] if admission.staging_chain else None,
            token_ids=frozen(np.concatenate([prompt, generated])),
            n_sampled=len(generated),
            chain_hash=coords.chain_hash,
        )

    def _routes(
        self, payload: Any, admission: CaptureAdmission, total: int
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Delta-aligned routes as an attachment, bound by their hash in the digested extras.

        The engine emits a route per *input* position from ``routing_start`` on, up to total − 2;
        the last sampled token was never fed. What it does not say is −1 (invariant 4).
        """
        routes = getattr(payload, "routing_indices", None)
        if routes is None:
            return None, None
        array = np.asarray(_plain(routes))
        start = int(getattr(payload, "routing_start", 0) or 0)
        count = total - 1 - start
        if start < 0 or array.ndim != 3 or len(array) != count or array.dtype.kind not in "iu":
            raise InvalidRecordError(
                "routing indices",
                code="route_shape",
                expected=f"integers [{count}, L, K] from position {start} on",
                got=f"{array.dtype}{array.shape}",
            )
        delta = np.full((total - admission.prev_len, *array.shape[1:]), -1, np.int16)
        first = max(start, admission.prev_len)
        delta[first - admission.prev_len : -1] = array[first - start :]
        return {ROUTES: frozen(delta)}, {ROUTES: route_reference(delta)}


def route_reference(delta: NDArray[np.int16]) -> dict[str, Any]:
    """The digested extras entry that binds an attachment of routes by content."""
    return {
        "dtype": "int16",
        "shape": [int(n) for n in delta.shape],
        "sha256": hashlib.sha256(np.ascontiguousarray(delta).data).hexdigest(),
    }


def _plain(values: Any) -> Any:
    """An array or list as it is; a torch tensor as a numpy array, without importing torch."""
    return values.numpy() if hasattr(values, "numpy") else values


def _no_provider() -> int:
    raise InvalidRecordError("the request carries no policy epoch", code="no_policy_epoch")
