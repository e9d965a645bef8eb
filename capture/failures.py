"""Capture failures with a stable code: logged, counted, and kept for questions."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("tokenplane.capture")


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """One call that was served but has no staged row."""

    rollout_id: str
    model_call_id: str
    code: str
    message: str
    at_s: float
    """Unix seconds."""


class FailureLog:
    """Thread-safe record of capture failures.

    Counts are exact for the life of the process; the failures themselves are kept in a ring of
    ``capacity``. ``on_failure`` (a metric, a ledger row) is called after the lock is released; what
    it raises is logged and never reaches the caller (invariant 3).
    """

    def __init__(
        self,
        *,
        capacity: int = 10_000,
        on_failure: Callable[[CaptureFailure], None] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._ring: deque[CaptureFailure] = deque(maxlen=capacity)
        self._counts: Counter[str] = Counter()
        self._on_failure = on_failure

    def record(
        self, *, rollout_id: str, model_call_id: str, code: str, message: str
    ) -> CaptureFailure:
        """Log, count and keep one failure."""
        failure = CaptureFailure(rollout_id, model_call_id, code, message, time.time())
        logger.warning(
            "capture failed: rollout=%s call=%s code=%s: %s",
            rollout_id,
            model_call_id,
            code,
            message,
        )
        with self._lock:
            self._ring.append(failure)
            self._counts[code] += 1
        if self._on_failure is not None:
            try:
                self._on_failure(failure)
            except Exception:
                logger.exception("the failure callback raised; the failure itself is recorded")
        return failure

    def counts(self) -> dict[str, int]:
        """Failures by code since the process started."""
        with self._lock:
            return dict(self._counts)

    def recent(self, rollout_id: str | None = None) -> list[CaptureFailure]:
        """Kept failures, oldest first, of one rollout or of all."""
        with self._lock:
            kept = list(self._ring)
        return [f for f in kept if rollout_id is None or f.rollout_id == rollout_id]
