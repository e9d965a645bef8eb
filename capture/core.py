"""The capture core: one admitted call from its beginning to its coordinates (CONTRACT section 6).

The order that everything relies on: stage first, acknowledge second, ledger row third, answer last.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenplane.capture.active_call import ActiveCall, checked_prefix, code_of
from tokenplane.capture.failures import FailureLog
from tokenplane.schemas.errors import CaptureError, StreamingUnsupportedError
from tokenplane.schemas.staged_call import build_staged_call
from tokenplane.schemas.staged_row import CallEvidence, LedgerEntry, StagedRow
from tokenplane.schemas.tokens import Int32Array, first_difference, to_log_probs, to_token_ids
from tokenplane.schemas.wire import CaptureAdmission, CommitCoords, StageResult

logger = logging.getLogger("tokenplane.capture")

Ids = Sequence[int] | NDArray[np.integer]


class StagingSink(Protocol):
    """Where a call's record goes. Thread-safe; durable before it answers ``ok``.

    The keyword ``attachments`` is passed only where the caller gave a mapping, so that a sink
    without it still serves plain calls and fails loudly otherwise.
    """

    def stage(self, record: Any) -> StageResult:
        """Store one record and name the key it is stored under."""
        ...


class ResponseAdapter(Protocol):
    """Reads prompt, generation and extras from an engine's response (CONTRACT section 7)."""

    def extract_prompt_ids(self, response: Any) -> Ids:
        """Everything that the engine was conditioned on."""
        ...

    def extract_generation(self, response: Any) -> tuple[Ids, Sequence[float] | NDArray[Any]]:
        """Sampled ids and their log probabilities."""
        ...

    def extract_extras(self, response: Any) -> dict[str, Any] | None:
        """What the digest shall cover beside the tokens."""
        ...


def mint_staging_key(rollout_id: str, model_call_id: str) -> str:
    """``rollout/call/attempt`` with an attempt that no other delivery has (DESIGN rule 4)."""
    return f"{rollout_id}/{model_call_id}/{uuid.uuid4().hex[:16]}"


class RolloutTokenCapture:
    """Turns admissions and engine output into staged rows and commit coordinates.

    Thread-safe: completions stage concurrently without a lock. A caller's mistake raises; a call
    that cannot be built or staged gives ``capture_failed`` coordinates, and its reason goes to
    ``failures``.

    Args:
        sink: a ``StagingSink``.
        weight_version_fn: gives the version in force when ``begin_call`` is not told one.
        adapter: needed by ``complete_call_from_response`` only.
    """

    def __init__(
        self,
        *,
        sink: StagingSink,
        weight_version_fn: Callable[[], int],
        adapter: ResponseAdapter | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self._sink = sink
        self._weight_version_fn = weight_version_fn
        self._adapter = adapter
        self.failures = failures if failures is not None else FailureLog()

    def begin_call(
        self,
        admission: CaptureAdmission,
        *,
        prefix_token_ids: list[int] | NDArray[np.integer] | None = None,
        stream: bool = False,
        weight_version: int | None = None,
    ) -> ActiveCall:
        """Check the admission's prefix and stamp the weight version.

        Raises:
            TypeError: not a ``CaptureAdmission``.
            StreamingUnsupportedError: ``stream`` is true.
            CaptureError: the prefix does not fit the admission, or the version is no integer >= 0.
        """
        if not isinstance(admission, CaptureAdmission):
            raise TypeError(f"expected a CaptureAdmission, got {type(admission).__name__}")
        if stream:
            raise StreamingUnsupportedError("capture needs the whole engine answer, not a stream")
        prefix = checked_prefix(admission, prefix_token_ids)
        version = self._weight_version_fn() if weight_version is None else weight_version
        if type(version) is not int or version < 0:
            raise CaptureError("weight version must be an integer >= 0", got=repr(version))
        return ActiveCall(admission, prefix, version)

    def complete_call(
        self,
        call: ActiveCall,
        *,
        prompt_token_ids: Ids,
        generated_token_ids: Ids,
        generated_logprobs: Sequence[float] | NDArray[np.floating],
        extras: dict[str, Any] | None = None,
        attachments: Mapping[str, Any] | None = None,
        evidence: CallEvidence | None = None,
        ledger: LedgerEntry | None = None,
    ) -> CommitCoords:
        """Build, stage, and only then acknowledge.

        Args:
            prompt_token_ids: int32[P] or a list of true ints: all that the engine was conditioned
                on; must start with the call's prefix.
            generated_token_ids: int32[G] or a list of true ints.
            generated_logprobs: float32[G] or a list of floats, natural log, finite.
            extras: digested payload; attachments: undigested buffers stored in the same write.
            evidence, ledger: further columns of the row (a ``StagedRow`` is staged then).

        Raises:
            CaptureError: the call was completed before.
        """
        call.claim()
        admission = call.admission
        try:
            prompt = to_token_ids(prompt_token_ids, name="prompt_token_ids")
            generated = to_token_ids(generated_token_ids, name="generated_token_ids")
            log_probs = to_log_probs(generated_logprobs, name="generated_logprobs")
            at = first_difference(prompt[: admission.prev_len], call.prefix_token_ids)
            if at is not None:
                raise CaptureError(
                    f"the prompt differs from the staged prefix at token {at}",
                    code="prefix_not_in_prompt",
                    expected=_around(call.prefix_token_ids, at),
                    got=_around(prompt, at),
                )
            record = build_staged_call(
                rollout_id=admission.rollout_id,
                model_call_id=admission.model_call_id,
                parent_call_id=admission.parent_call_id,
                mode=admission.mode,
                prev_len=admission.prev_len,
                weight_version=call.weight_version,
                parent_chain_hash=admission.parent_chain_hash,
                prompt_token_ids=prompt,
                generated_token_ids=generated,
                generated_log_probs=log_probs,
                extras=extras,
            )
            staged: Any = record
            if evidence is not None:
                staged = StagedRow(
                    staging_key=mint_staging_key(admission.rollout_id, admission.model_call_id),
                    call=record,
                    evidence=evidence,
                    created_at=time.time(),
                    ledger=ledger,
                )
        except (CaptureError, TypeError, ValueError, OverflowError) as exc:
            return self._failed(call, code_of(exc, "build_failed"), str(exc))
        result = self._stage(staged, attachments)
        if isinstance(result, str):
            return self._failed(call, "stage_failed", result)
        return CommitCoords(
            rollout_id=record.rollout_id,
            model_call_id=record.model_call_id,
            parent_call_id=record.parent_call_id,
            prev_len=record.prev_len,
            delta_len=record.delta_len,
            cum_len=record.cum_len,
            weight_version=record.weight_version,
            digest=record.digest,
            extras_digest=record.extras_digest,
            staging_key=result.staging_key,
            chain_hash=record.chain_hash,
            cumulative_hash=record.cumulative_hash,
        )

    def _stage(self, record: Any, attachments: Mapping[str, Any] | None) -> StageResult | str:
        """The sink's result, or what went wrong. Whatever a sink raises is a failed capture."""
        keywords = {} if attachments is None else {"attachments": attachments}
        try:
            result = self._sink.stage(record, **keywords)
        except Exception as exc:
            logger.exception("the staging sink raised")
            return f"{code_of(exc, type(exc).__name__)}: {exc}"
        # Duck-typed: a sink made for NeMo-Gym answers with Gym's own result class.
        ok, key = getattr(result, "ok", None), getattr(result, "staging_key", None)
        if ok is True and isinstance(key, str) and key:
            return StageResult(ok=True, staging_key=key)
        return str(getattr(result, "error", None) or f"unusable stage result {result!r}")

    def complete_call_from_response(
        self, call: ActiveCall, payload: Any, *, attachments: Mapping[str, Any] | None = None
    ) -> CommitCoords:
        """``complete_call`` with what the adapter reads from an engine's response.

        Raises:
            CaptureError: no adapter was given (the call stays open), or completed before.
        """
        if self._adapter is None:
            raise CaptureError("complete_call_from_response needs an adapter", code="no_adapter")
        try:
            prompt = self._adapter.extract_prompt_ids(payload)
            generated, log_probs = self._adapter.extract_generation(payload)
            extras = self._adapter.extract_extras(payload)
        except Exception as exc:  # noqa: BLE001 - whatever an adapter raises fails the capture
            return self.fail_call(call, reason=str(exc), code="adapter_failed")
        return self.complete_call(
            call,
            prompt_token_ids=prompt,
            generated_token_ids=generated,
            generated_logprobs=log_probs,
            extras=extras,
            attachments=attachments,
        )

    def fail_call(
        self, call: ActiveCall, *, reason: str, code: str = "call_failed"
    ) -> CommitCoords:
        """Complete the call as failed.

        Raises:
            CaptureError: it was completed before.
        """
        call.claim()
        return self._failed(call, code, reason)

    def _failed(self, call: ActiveCall, code: str, reason: str) -> CommitCoords:
        self.failures.record(
            rollout_id=call.admission.rollout_id,
            model_call_id=call.admission.model_call_id,
            code=code,
            message=reason,
        )
        return failed_coords(call.admission, call.weight_version)


def failed_coords(admission: CaptureAdmission, weight_version: int) -> CommitCoords:
    """``capture_failed`` coordinates: identity, lengths and version, nothing else."""
    return CommitCoords(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        parent_call_id=admission.parent_call_id,
        prev_len=admission.prev_len,
        delta_len=0,
        cum_len=admission.prev_len,
        weight_version=weight_version,
        disposition="capture_failed",
    )


def install_capture(
    layer: Any,
    *,
    sink: StagingSink,
    weight_version_fn: Callable[[], int],
    adapter: ResponseAdapter | None = None,
) -> RolloutTokenCapture:
    """Build a capture core and hand it to ``layer.install_token_capture``.

    Raises:
        TypeError: the sink has no ``stage``, the provider is not callable, or the layer cannot
            take a capture.
    """
    if not callable(getattr(sink, "stage", None)):
        raise TypeError("the sink needs a callable stage")
    if not callable(weight_version_fn):
        raise TypeError("weight_version_fn must be callable")
    if not callable(getattr(layer, "install_token_capture", None)):
        raise TypeError("the layer needs a callable install_token_capture")
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=weight_version_fn, adapter=adapter)
    layer.install_token_capture(capture)
    return capture


def _around(ids: Int32Array, at: int) -> list[int]:
    return [int(x) for x in ids[max(0, at - 2) : at + 3]]
