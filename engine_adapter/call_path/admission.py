"""Admission: is this call captured, what does it continue, or was it answered before?"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenplane.capture.failures import FailureLog
from tokenplane.capture.hook_types import ADMISSION_KEY
from tokenplane.capture.ledger import Ledger, LedgerDecision, LedgerRequest, check_repeat
from tokenplane.capture.ledger_index import LedgerRow
from tokenplane.engine_adapter.call_path.call_types import (
    CaptureStatus,
    ChatPrompt,
    CompletionPrompt,
    GymCapture,
    ModelCall,
    StandaloneCapture,
)
from tokenplane.schemas.errors import InvalidRecordError, LedgerError, StoreError
from tokenplane.schemas.wire import CaptureAdmission, parse_model

logger = logging.getLogger("tokenplane.server")


@dataclass(frozen=True, slots=True)
class Admitted:
    """What admission found."""

    admitted_at: float
    """Unix seconds."""
    status: CaptureStatus = "off"
    """The mark of the answer if nothing is staged: ``capture_failed`` for a captured call."""
    rollout_id: str = ""
    model_call_id: str | None = None
    admission: CaptureAdmission | None = None
    """None: the call is served without capture."""
    decision: LedgerDecision | None = None
    """Set in standalone use."""
    offload_params: Mapping[str, Any] = field(default_factory=dict)
    """For the hooks: the client's, with the checked admission."""

    @property
    def earlier(self) -> LedgerRow | None:
        """The earlier run of this very request, where there is one."""
        decision = self.decision
        return decision.parent if decision is not None and decision.kind == "repeat" else None


class Admissions:
    """Decides about each call. Synchronous, thread-safe; may read the store."""

    def __init__(self, ledger: Ledger, failures: FailureLog) -> None:
        self._ledger = ledger
        self._failures = failures

    def admit(self, call: ModelCall) -> Admitted:
        """The decision. What cannot be captured is served, and its failure recorded (invariant 3).

        Raises:
            LedgerError: a malformed rollout id, an idempotency key used for another body, or a
                named parent that the rollout does not have.
        """
        if isinstance(call.capture, GymCapture):
            return self._gym(call.capture)
        if isinstance(call.capture, StandaloneCapture):
            return self._standalone(call, call.capture)
        return Admitted(time.time())

    def preceded_by(self, admitted: Admitted) -> LedgerRow | None:
        """The run of the same request that was staged before this one, whose row is staged too.

        Two servers on one store may run one idempotency key at the same time. The store's write
        order, which all of them see alike, says which answer is given; read after one's own write,
        it cannot change any more.

        Raises:
            LedgerError: ``idempotency_mismatch``: the other run was of another body.
            StoreError: the store cannot be read, so nobody knows; the request may come again.
        """
        request = None if admitted.decision is None else admitted.decision.request
        if request is None or request.idempotency_key is None:
            return None
        first = self._ledger.index(admitted.rollout_id).repeat_of(request.idempotency_key)
        if first is None or first.model_call_id == admitted.model_call_id:
            return None
        check_repeat(request, first.request_digest)
        return first

    def _gym(self, capture: GymCapture) -> Admitted:
        now = time.time()
        try:
            admission = parse_model(CaptureAdmission, capture.admission, key=ADMISSION_KEY)
        except InvalidRecordError as error:
            rollout_id, call_id = _names(capture.admission)
            return self._unusable(now, rollout_id, call_id, "invalid_admission", error)
        return Admitted(
            now,
            "capture_failed",
            admission.rollout_id,
            admission.model_call_id,
            admission,
            offload_params={**capture.offload_params, ADMISSION_KEY: admission},
        )

    def _standalone(self, call: ModelCall, capture: StandaloneCapture) -> Admitted:
        try:
            decision = self._ledger.admit(_ledger_request(call, capture))
        except LedgerError as error:
            if error.code == "unknown_parent" and capture.parent_response_id is None:
                # The client named no parent: an ancestor's row is gone, and that is our loss.
                self._failures.record(
                    rollout_id=capture.rollout_id,
                    model_call_id=uuid.uuid4().hex,
                    code=error.code,
                    message=str(error),
                )
            raise
        except StoreError as error:
            call_id = uuid.uuid4().hex
            return self._unusable(time.time(), capture.rollout_id, call_id, error.code, error)
        if decision.kind == "unproven":
            self._failures.record(
                rollout_id=decision.rollout_id,
                model_call_id=decision.model_call_id,
                code=decision.reason or "unproven",
                message="served without capture: the rollout does not prove what it continues",
            )
        return Admitted(
            decision.admitted_at,
            "unproven" if decision.kind == "unproven" else "capture_failed",
            decision.rollout_id,
            decision.model_call_id,
            decision.admission,
            decision,
            {} if decision.admission is None else {ADMISSION_KEY: decision.admission},
        )

    def record_cancelled(self, admitted: Admitted, code: str) -> None:
        """Keep the failure of a call that nobody waits for any more."""
        if admitted.model_call_id is not None:
            self._failures.record(
                rollout_id=admitted.rollout_id,
                model_call_id=admitted.model_call_id,
                code=code,
                message="the request was cancelled before it was answered; nothing was staged",
            )

    def _unusable(
        self, now: float, rollout_id: str, call_id: str, code: str, error: Exception
    ) -> Admitted:
        self._failures.record(
            rollout_id=rollout_id, model_call_id=call_id, code=code, message=str(error)
        )
        return Admitted(now, "capture_failed", rollout_id, call_id)


def _ledger_request(call: ModelCall, capture: StandaloneCapture) -> LedgerRequest:
    prompt = call.prompt
    settings: dict[str, Any] = {}
    if isinstance(prompt, ChatPrompt):
        shaping = {"tools": prompt.tools, "chat_template_kwargs": dict(prompt.template_kwargs)}
        settings = {name: value for name, value in shaping.items() if value}
    return LedgerRequest(
        rollout_id=capture.rollout_id,
        messages=prompt.messages if isinstance(prompt, ChatPrompt) else None,
        prompt_token_ids=prompt.token_ids if isinstance(prompt, CompletionPrompt) else None,
        settings=settings,
        idempotency_key=capture.idempotency_key,
        request_digest=capture.request_digest,
        parent_response_id=capture.parent_response_id,
    )


def _names(admission: Any) -> tuple[str, str]:
    """Rollout and call of a malformed admission, as far as they can be read."""
    values = admission if isinstance(admission, Mapping) else {}
    names = [values.get("rollout_id"), values.get("model_call_id")]
    rollout_id, call_id = (name if isinstance(name, str) else "" for name in names)
    return rollout_id[:200], call_id[:200] or f"unnamed-{uuid.uuid4().hex[:16]}"
