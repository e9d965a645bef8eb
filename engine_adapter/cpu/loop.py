"""The engine thread: commands between steps, admission, steps, and how everything ends.

Everything in here but ``post``, ``wake``, ``state``, ``version`` and ``stats`` runs on that one
thread, so no lock guards the requests or the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from tokenplane.engine_adapter.cpu.batch import make_plan, share_step
from tokenplane.engine_adapter.cpu.forward import StepForward
from tokenplane.engine_adapter.cpu.request import LiveRequest
from tokenplane.engine_adapter.cpu.weights import WeightsLost
from tokenplane.engine_adapter.engine import (
    EngineInfo,
    EngineState,
    EngineStats,
    GenerationRequest,
    GenerationResult,
)
from tokenplane.engine_adapter.sampling_stops import Detokenize
from tokenplane.schemas.errors import (
    EngineDeadError,
    EngineStateError,
    RequestCancelledError,
    RequestRejectedError,
)

_log = logging.getLogger(__name__)


class EngineLoop:
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
        self.model = model
        self._forward = StepForward(model)
        self._info = info
        self._detokenize = detokenize
        self._max_live = max_live_requests
        self._max_step_tokens = max_step_tokens
        self._max_kv_tokens = max_kv_tokens
        self._num_threads = num_threads
        self.version: int | None = None
        self.state = EngineState.RUNNING
        self.stats = EngineStats()
        """As of the last step or command; replaced whole, so any thread may read it."""
        self._count = EngineStats()
        self._live: dict[str, LiveRequest] = {}
        self._waiting: deque[LiveRequest] = deque()
        self._commands: deque[_Command] = deque()
        self._changed = threading.Condition()
        self._answers: list[tuple[Future[GenerationResult], GenerationResult | Exception]] = []
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tokenplane-engine", daemon=True)

    # ---- any thread

    def start(self) -> None:
        self._thread.start()

    def post[T](self, action: Callable[[], T]) -> Future[T]:
        """Queue ``action`` to run between two steps.

        Raises: EngineDeadError, EngineStateError once the engine has ended.
        """
        future: Future[T] = Future()
        with self._changed:
            error = self._ended_error()
            if error is not None:
                raise error
            self._commands.append(_Command(action, future))
            self._changed.notify()
        return future

    def wake(self) -> None:
        """Let the thread look at its requests again (one of them was cancelled)."""
        with self._changed:
            if self._ended_error() is None:
                self._commands.append(_Command(lambda: None, Future()))
                self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it did not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ended_error(self) -> EngineDeadError | EngineStateError | None:
        if self.state is EngineState.DEAD:
            error = EngineDeadError(f"the engine died: {self._cause!r}")
            error.__cause__ = self._cause
            return error
        if self.state is EngineState.CLOSED:
            return EngineStateError("the engine is closed", got=self.state.value)
        return None

    # ---- the engine thread

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            while self.state is not EngineState.CLOSED:
                self._run_commands()
                self._sweep_cancelled()
                if self.state is EngineState.RUNNING and (self._live or self._waiting):
                    self._step()
                self._publish()
                self._deliver()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the waiters are told
            _log.exception("the engine thread died")
            self._end(EngineState.DEAD, error)
        else:
            self._end(EngineState.CLOSED, None)

    def _run_commands(self) -> None:
        with self._changed:
            while not self._commands and not self._has_work():
                self._changed.wait()
        while self.state is not EngineState.CLOSED:
            with self._changed:
                if not self._commands:
                    return
                command = self._commands.popleft()
            command.run(before_answer=self._publish)

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

    def count_update(self, *, failed: bool) -> None:
        self._add(weight_updates=0 if failed else 1, failed_weight_updates=1 if failed else 0)

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
            answer: GenerationResult | Exception = request.result()
        except Exception as error:  # noqa: BLE001 - handed to the request's waiter
            answer = error
        self._drop(request)
        if not request.future.set_running_or_notify_cancel():
            self._add(cancelled_requests=1)
        elif isinstance(answer, Exception):
            self._add(failed_requests=1)
            self._answers.append((request.future, answer))
        else:
            self._add(finished_requests=1)
            self._answers.append((request.future, answer))

    def _deliver(self) -> None:
        """Resolve what the step finished, after the stats that count it are visible."""
        answers, self._answers = self._answers, []
        for future, answer in answers:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

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

    def _end(self, state: EngineState, cause: BaseException | None) -> None:
        """Nothing runs any more: answer everybody who waits."""
        with self._changed:
            self._cause = cause
            self.state = state
            commands = list(self._commands)
            self._commands.clear()
        self._add(
            cancelled_requests=0 if cause else len(self._live) + len(self._waiting),
            failed_requests=len(self._live) + len(self._waiting) if cause else 0,
        )
        requests = [*self._live.values(), *self._waiting]
        self._live.clear()
        self._waiting.clear()
        self._publish()
        self._deliver()
        for command in commands:
            command.fail(self._ended_error())
        for request in requests:
            if request.future.set_running_or_notify_cancel():
                key = request.request.request_id
                closed = RequestCancelledError("the engine was closed", key=key)
                request.future.set_exception(closed if cause is None else self._ended_error())

    def _add(self, **deltas: float) -> None:
        changed = {name: getattr(self._count, name) + delta for name, delta in deltas.items()}
        self._count = replace(self._count, **changed)

    def _publish(self) -> None:
        caches = [r.cache for r in self._live.values()]
        self.stats = replace(
            self._count,
            live_requests=len(self._live),
            waiting_requests=len(self._waiting),
            kv_tokens=sum(cache.length for cache in caches),
            kv_bytes=sum(cache.nbytes for cache in caches),
        )


class _Command:
    """An action for the engine thread and the future of whoever waits for it."""

    def __init__(self, action: Callable[[], object], future: Future[Any]) -> None:
        self._action = action
        self._future = future

    def run(self, *, before_answer: Callable[[], None]) -> None:
        """Raises: WeightsLost if the action found that the engine cannot go on."""
        if not self._future.set_running_or_notify_cancel():
            return  # withdrawn before its turn: it must not take effect
        try:
            result = self._action()
        except WeightsLost as error:
            self._future.set_exception(EngineDeadError(f"the engine died: {error}"))
            raise
        except Exception as error:  # noqa: BLE001 - handed to the call's waiter
            before_answer()
            self._future.set_exception(error)
        else:
            before_answer()
            self._future.set_result(result)

    def fail(self, error: BaseException | None) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)
