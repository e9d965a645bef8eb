"""The engine thread: commands between steps, admission, steps, and how everything ends.

Everything in here but ``post``, ``wake``, ``state``, ``version`` and ``stats`` runs on that one
thread, so no lock guards the requests or the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import replace

import torch

from tokenplane.engine_adapter.cpu.batch import make_plan, share_step
from tokenplane.engine_adapter.cpu.forward import StepForward
from tokenplane.engine_adapter.cpu.request import LiveRequest
from tokenplane.engine_adapter.engine import (
    EngineInfo,
    EngineState,
    GenerationRequest,
    GenerationResult,
)
from tokenplane.engine_adapter.engine_thread import EngineThread, Outcome
from tokenplane.engine_adapter.sampling_stops import Detokenize
from tokenplane.schemas.errors import (
    RequestRejectedError,
)

_log = logging.getLogger(__name__)


class EngineLoop(EngineThread):
    """Owns the model, the requests and the state. ``start`` once; ends by ``close`` or by dying."""

    def __init__(
        self,
        model: torch.nn.Module,
        info: EngineInfo,
        detokenize: Detokenize | None,
        *,
        max_live_requests: int,
        max_step_tokens: int,
        max_kv_tokens: int,
        num_threads: int,
    ) -> None:
        super().__init__("tokenplane-engine")
        self._forward = StepForward(model)
        self._info = info
        self._detokenize = detokenize
        self._max_live = max_live_requests
        self._max_step_tokens = max_step_tokens
        self._max_kv_tokens = max_kv_tokens
        self._num_threads = num_threads
        self._live: dict[str, LiveRequest] = {}
        self._waiting: deque[LiveRequest] = deque()
        self._notified = threading.Event()

    # ---- any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _notify(self) -> None:
        self._notified.set()

    # ---- the engine thread

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            torch.set_num_threads(self._num_threads)
            while not self.closed:
                self._sleep()
                self.run_commands()
                self._sweep_cancelled()
                if self.state is EngineState.RUNNING and (self._live or self._waiting):
                    self._step()
                self.publish()
                self.deliver()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the waiters are told
            _log.exception("the engine thread died")
            cause = error
        requests = [*self._live.values(), *self._waiting]
        self._live.clear()
        self._waiting.clear()
        self._end(
            EngineState.CLOSED if cause is None else EngineState.DEAD,
            cause,
            {request.request.request_id: request.future for request in requests},
        )

    def _sleep(self) -> None:
        """Until there is something to do."""
        while not self._commands and not self._has_work():
            self._notified.wait()
            self._notified.clear()

    def _has_work(self) -> bool:
        if any(r.future.cancelled() for r in (*self._live.values(), *self._waiting)):
            return True
        return self.state is EngineState.RUNNING and bool(self._live or self._waiting)

    def admit(self, request: GenerationRequest, future: Future[GenerationResult]) -> None:
        """Take a checked request: it is stamped with the present version and waits for room."""
        if future.cancelled():
            self._add(cancelled_requests=1)
            return
        known = {r.request.request_id for r in self._waiting} | self._live.keys()
        if request.request_id in known:
            raise RequestRejectedError("request_id is in use", key=request.request_id)
        live = LiveRequest(request, self._info, self._detokenize, future, version=self.version)
        self._waiting.append(live)

    def set_version(self, version: int) -> None:
        """The weights are ``version`` from the next step on."""
        self.version = version
        for live in (*self._live.values(), *self._waiting):
            live.change_version(version)

    def evict_all(self) -> None:
        """Drop every KV cache."""
        for live in self._live.values():
            if live.evict(self.version):
                self._add(evictions=1)

    def _step(self) -> None:
        began = time.monotonic()
        self._start_waiting()
        live = list(self._live.values())
        shares = share_step([r.pending for r in live], self._max_step_tokens)
        parts = [(r, n, n == r.pending) for r, n in zip(live, shares, strict=True) if n]
        plan = make_plan([(r.chunk(n), r.cache, whole) for r, n, whole in parts])
        with torch.inference_mode():
            logits, routes = self._forward.run(plan)
            row = 0
            for (request, count, whole), piece in zip(parts, plan.slices, strict=True):
                taken = None if routes is None else routes[piece.start : piece.end].numpy()
                request.computed(count, taken)
                if whole:
                    self._advance(request, logits[row])
                    row += 1
        self._add(
            steps=1,
            computed_tokens=int(plan.positions.numel()),
            generated_tokens=row,
            step_s=time.monotonic() - began,
        )

    def _advance(self, request: LiveRequest, logits: torch.Tensor) -> None:
        """Sample for one request; an error here is its own and ends it alone."""
        try:
            request.sample(logits)
            if not request.finished:
                return
            answer: Outcome = request.result()
        except Exception as error:  # noqa: BLE001 - handed to the request's waiter
            answer = error
        self._drop(request)
        self.settle(request.future, answer)

    def _start_waiting(self) -> None:
        """Start waiting requests in order while there is room for all they may ever need."""
        reserved = sum(r.max_cached for r in self._live.values())
        while self._waiting and len(self._live) < self._max_live:
            if reserved + self._waiting[0].max_cached > self._max_kv_tokens:
                return
            request = self._waiting.popleft()
            reserved += request.max_cached
            request.start()
            self._live[request.request.request_id] = request

    def _drop(self, request: LiveRequest) -> None:
        del self._live[request.request.request_id]

    def _sweep_cancelled(self) -> None:
        for request in [r for r in self._live.values() if r.future.cancelled()]:
            self._drop(request)
            self._add(cancelled_requests=1)
        kept = deque(r for r in self._waiting if not r.future.cancelled())
        self._add(cancelled_requests=len(self._waiting) - len(kept))
        self._waiting = kept

    def publish(self) -> None:
        """See ``EngineThread.publish``."""
        caches = [r.cache for r in self._live.values()]
        self.stats = replace(
            self._count,
            live_requests=len(self._live),
            waiting_requests=len(self._waiting),
            kv_tokens=sum(cache.length for cache in caches),
            kv_bytes=sum(cache.nbytes for cache in caches),
        )

    def _publish_end(self) -> None:
        self.publish()
