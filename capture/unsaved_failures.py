"""Failure rows that a store refuses: kept and shown meanwhile, and written when it takes rows."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from tokenplane.capture.failures import CaptureFailure
from tokenplane.schemas.errors import StoreError

logger = logging.getLogger("tokenplane.capture")

type Save = Callable[[CaptureFailure], None]


class UnsavedFailures:
    """Stands before ``Ledger.record_failure``. Thread-safe.

    A call that could not be staged because the disk is full cannot have its failure row either;
    without the row, the rollout would later look shorter than it was. While some wait, new ones
    queue behind them, so that a full store holds nobody up twice.

    Args:
        save: writes one failure; a retryable ``StoreError`` means later, another one never.
        retry_s: how long to wait before the next attempt.
        capacity: the oldest are given up beyond it (they were logged and counted).
    """

    def __init__(self, save: Save, *, retry_s: float = 5.0, capacity: int = 100_000) -> None:
        self._save = save
        self._retry_s = retry_s
        self._capacity = capacity
        self._waiting: deque[CaptureFailure] = deque()
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def record(self, failure: CaptureFailure) -> None:
        """Save the failure now, or as soon as the store takes it."""
        with self._lock:
            if self._waiting:
                self._keep(failure)
                return
        if not self._settle(failure):
            with self._lock:
                self._keep(failure)

    def waiting(self, rollout_id: str) -> list[CaptureFailure]:
        """The rollout's failures that have no row yet, oldest first."""
        with self._lock:
            return [failure for failure in self._waiting if failure.rollout_id == rollout_id]

    def flush(self) -> int:
        """Try to save everything that waits; gives how many still do."""
        with self._saving:
            while True:
                with self._lock:
                    if not self._waiting:
                        return 0
                    first = self._waiting[0]
                if not self._settle(first):
                    with self._lock:
                        return len(self._waiting)
                with self._lock:
                    if self._waiting and self._waiting[0] is first:
                        self._waiting.popleft()

    def close(self) -> None:
        """A last attempt; what is left then is in the log only. Idempotent."""
        self._closed.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        left = self.flush()
        if left:
            logger.error("%d failures were never stored; the log has them", left)

    def _settle(self, failure: CaptureFailure) -> bool:
        """False if another try may succeed where this one did not."""
        try:
            self._save(failure)
        except StoreError as error:
            if error.retryable:
                logger.warning("a failure row waits for the store: %s: %s", error.code, error)
                return False
            logger.exception("the store will never take the row of %s", failure)
        return True

    def _keep(self, failure: CaptureFailure) -> None:
        self._waiting.append(failure)
        if len(self._waiting) > self._capacity:
            given_up = self._waiting.popleft()
            logger.error("too many failures wait; given up: %s", given_up)
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(
                target=self._retry, name="tokenplane-failures", daemon=True
            )
            self._thread.start()

    def _retry(self) -> None:
        while not self._closed.wait(self._retry_s):
            if self.flush():
                continue
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
