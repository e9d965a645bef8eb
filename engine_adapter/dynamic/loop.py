"""The engine thread: an event loop of its own that builds the engine, steps it and ends it.

Everything but ``post``, ``start``, ``join``, ``state``, ``version`` and ``stats`` runs on that one
thread, between two steps of the engine, so no lock guards the requests or the model. Megatron's
step awaits once in its middle; nothing but its own callbacks is scheduled on this loop meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from tokenplane.engine_adapter.cpu.weights import WeightsLost
from tokenplane.engine_adapter.dynamic.core import HookedEngine
from tokenplane.engine_adapter.dynamic.records import megatron_sampling, record_lists
from tokenplane.engine_adapter.dynamic.request import DynamicRequest, OnTokens, make_result
from tokenplane.engine_adapter.engine import EngineState, EngineStats, GenerationResult
from tokenplane.schemas.errors import (
    EngineDeadError,
    EngineStateError,
    RequestCancelledError,
    RequestRejectedError,
)

_log = logging.getLogger("tokenplane.engine")

BuildCore = Callable[[], HookedEngine]
Outcome = GenerationResult | Exception


class DynamicLoop:
    """Owns a ``HookedEngine``, who waits for what, and the state. Direct mode: it steps itself."""

    def __init__(self, build: BuildCore, device: torch.device) -> None:
        self.core: HookedEngine
        """There from the end of ``start`` on."""
        self.state = EngineState.RUNNING
        self.stats = EngineStats()
        """As of the last step or command; replaced whole, so any thread may read it."""
        self.version: int | None = None
        self.wake_event: asyncio.Event
        self._build = build
        self._device = device
        self._count = EngineStats()
        self._waiters: dict[str, Future[GenerationResult]] = {}
        self._outcomes: list[tuple[Future[GenerationResult], Outcome]] = []
        self._commands: deque[Command] = deque()
        self._guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: Future[None] = Future()
        self.cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tokenplane-dynamic", daemon=True)

    # ---- any thread

    def start(self, timeout_s: float) -> None:
        """Build the engine on its thread (CUDA graphs are captured there).

        Raises: what the building raised; TimeoutError.
        """
        self._thread.start()
        self._started.result(timeout_s)

    def post[T](self, action: Callable[[], T]) -> Future[T]:
        """Queue ``action`` to run between two steps.

        Raises: EngineDeadError, EngineStateError once the engine has ended.
        """
        future: Future[T] = Future()
        with self._guard:
            error = self.ended_error()
            if error is not None:
                raise error
            self._commands.append(Command(action, future))
        self._notify()
        return future

    def wake(self) -> None:
        """Let the thread look at its requests again (one of them was cancelled)."""
        if self.ended_error() is None:
            self._notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it did not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def closed(self) -> bool:
        """True once ``close`` has had its turn."""
        return self.state is EngineState.CLOSED

    def ended_error(self) -> EngineDeadError | EngineStateError | None:
        """What to raise once the engine has ended; None while it lives."""
        if self.state is EngineState.DEAD:
            error = EngineDeadError(f"the engine died: {self.cause!r}")
            error.__cause__ = self.cause
            return error
        if self.state is EngineState.CLOSED:
            return EngineStateError("the engine is closed", got=self.state.value)
        return None

    def _notify(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.wake_event.set)

    # ---- the engine thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the start is told
            self._end(EngineState.DEAD, error)
            if not self._started.done():
                self._started.set_exception(error)
            else:
                _log.error("the engine thread died", exc_info=error)
        else:
            self._end(EngineState.CLOSED, None)

    async def _main(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is each thread's own
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # others need cores too
        self._loop, self.wake_event = asyncio.get_running_loop(), asyncio.Event()
        self.core = self._build()
        self.core.on_finished = self.take_finished
        try:
            await self.serve()
        finally:
            await self.release()

    def ready(self) -> None:
        """Let ``start`` return."""
        self.publish()
        self._started.set_result(None)

    async def serve(self) -> None:
        """Run until closed."""
        self.ready()
        while not self.closed:
            self.between_steps()
            if self.state is EngineState.RUNNING and self.core.has_unfinished_requests():
                await self.core.async_step()
                self.publish()
                self.deliver()
                await asyncio.sleep(0)  # lets a wake-up from another thread in
            elif not self._commands and not self.closed:
                await self.wake_event.wait()
                self.wake_event.clear()

    async def release(self) -> None:
        """Free what the engine holds on the device."""
        self.core.free()

    def enter(self, state: EngineState) -> None:
        """Be in ``state`` from the next step on."""
        self.state = state

    def between_steps(self) -> None:
        """What must happen between two steps: commands in order, then cancellations."""
        while not self.closed:
            with self._guard:
                if not self._commands:
                    break
                command = self._commands.popleft()
            command.run(before_answer=self.publish)
        self._sweep_cancelled()
        self.publish()
        self.deliver()

    def admit(
        self,
        prompt: list[int],
        wire: dict[str, Any],
        on_tokens: OnTokens | None,
        future: Future[GenerationResult],
    ) -> None:
        """Take a checked request; raises RequestRejectedError if its key is in use."""
        key = str(wire["key"])
        if future.cancelled():
            self._add(cancelled_requests=1)
            return
        if key in self._waiters:
            raise RequestRejectedError("request_id is in use", key=key)
        self._waiters[key] = future
        if on_tokens is not None:
            self.core.callbacks[key] = on_tokens
        self.submit(prompt, wire)

    def submit(self, prompt: list[int], wire: dict[str, Any]) -> None:
        """Hand a request to the engine."""
        number = int(next(self.core.request_counter))
        self.core.add_request(number, prompt, megatron_sampling(wire))

    def take_finished(self, request: DynamicRequest, record: Any) -> None:
        """A request has ended in the engine."""
        self.resolve(request.key, self._outcome(request, record))

    def _outcome(self, request: DynamicRequest, record: Any) -> Outcome:
        if request.error is not None:
            return request.error
        if request.cancelled:
            return RequestCancelledError("the request was cancelled", key=request.key)
        tokens, log_probs, routes = record_lists(record)
        try:
            return make_result(
                request.key,
                request.prompt,
                request.sampling,
                tokens,
                log_probs,
                routes,
                request.evidence(),
            )
        except Exception as error:  # noqa: BLE001 - handed to the request's waiter
            return error

    def resolve(self, key: str, outcome: Outcome) -> None:
        """Count an ended request and keep its answer for ``deliver``."""
        future = self._waiters.pop(key, None)
        if future is None:
            return  # foreign traffic: its answer goes another way
        if not future.set_running_or_notify_cancel():
            self._add(cancelled_requests=1)
        elif isinstance(outcome, Exception):
            self._add(failed_requests=1)
            self._outcomes.append((future, outcome))
        else:
            self._add(finished_requests=1)
            self._outcomes.append((future, outcome))

    def deliver(self) -> None:
        """Resolve what has ended, after the stats that count it are visible."""
        outcomes, self._outcomes = self._outcomes, []
        for future, outcome in outcomes:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _sweep_cancelled(self) -> None:
        """Cancelled requests without a KV cache end now, the others in their next step."""
        gone = {key for key, future in self._waiters.items() if future.cancelled()}
        if not gone:
            return
        for number, request in list(self.core.live.items()):
            if request.key in gone:
                request.cancelled = True
                if not request.in_context:
                    self.core.withdraw(number)

    def _end(self, state: EngineState, cause: BaseException | None) -> None:
        """Nothing runs any more: answer everybody who waits."""
        with self._guard:
            self.cause = cause
            self.state = state
            commands = list(self._commands)
            self._commands.clear()
        waiters, self._waiters = self._waiters, {}
        key = "cancelled_requests" if cause is None else "failed_requests"
        self._add(**{key: len(waiters)})
        self.stats = replace(
            self.stats,
            live_requests=0,
            waiting_requests=0,
            kv_tokens=0,
            kv_bytes=0,
            **{name: getattr(self._count, name) for name in (key, "finished_requests")},
        )
        self.deliver()
        error = self.ended_error()
        for command in commands:
            command.fail(error)
        for name, future in waiters.items():
            if future.set_running_or_notify_cancel():
                closed = RequestCancelledError("the engine was closed", key=name)
                future.set_exception(closed if cause is None else error)

    def count_update(self, *, failed: bool) -> None:
        """Count a weight update."""
        self._add(weight_updates=0 if failed else 1, failed_weight_updates=1 if failed else 0)

    def _add(self, **deltas: float) -> None:
        changed = {name: getattr(self._count, name) + delta for name, delta in deltas.items()}
        self._count = replace(self._count, **changed)

    def publish(self) -> None:
        """Make the present counters and gauges visible."""
        core = self.core
        self.version = core.version
        live = sum(request.in_context for request in core.live.values())
        tokens, nbytes = core.kv_gauges()
        self.stats = replace(
            self._count,
            live_requests=live,
            waiting_requests=len(core.live) - live,
            kv_tokens=tokens,
            kv_bytes=nbytes,
            steps=core.steps,
            step_s=core.step_s,
            computed_tokens=core.computed_tokens,
            generated_tokens=core.generated_tokens,
            evictions=core.evictions,
        )


class Command:
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
        """Tell the waiter that its turn will not come."""
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)
