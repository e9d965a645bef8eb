"""The engine thread: an event loop of its own that builds the engine, steps it and ends it.

Everything but ``post``, ``start``, ``join``, ``state``, ``version`` and ``stats`` runs on that one
thread, between two steps of the engine, so no lock guards the requests or the model. Megatron's
step awaits once in its middle; nothing but its own callbacks is scheduled on this loop meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from tokenplane.engine_adapter.dynamic.core import HookedEngine
from tokenplane.engine_adapter.dynamic.records import megatron_sampling, record_lists
from tokenplane.engine_adapter.dynamic.request import DynamicRequest, OnTokens, make_result
from tokenplane.engine_adapter.engine import EngineState, GenerationResult
from tokenplane.engine_adapter.engine_thread import EngineThread, Outcome
from tokenplane.schemas.errors import (
    DeadlineError,
    EngineStateError,
    RequestCancelledError,
    RequestRejectedError,
)

_log = logging.getLogger("tokenplane.engine")

BuildCore = Callable[[], HookedEngine]

_ONE_AT_A_TIME = threading.Lock()
"""Held while this process has a dynamic engine: Megatron's inference mode, its recorded routers and
its CUDA graphs are globals, and a second engine's end would give the first one other answers."""


class DynamicLoop(EngineThread):
    """Owns a ``HookedEngine``, who waits for what, and the state. Direct mode: it steps itself."""

    def __init__(self, build: BuildCore, device: torch.device) -> None:
        super().__init__("tokenplane-dynamic")
        self.core: HookedEngine
        """There from the end of ``start`` on."""
        self.wake_event: asyncio.Event
        self._build = build
        self._device = device
        self._waiters: dict[str, Future[GenerationResult]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: Future[None] = Future()
        self._given_up = False

    # ---- any thread

    def start(self, timeout_s: float) -> None:
        """Build the engine on its thread (CUDA graphs are captured there).

        Raises: what the building raised; EngineStateError if this process has another engine;
        DeadlineError, after which the thread ends, and frees what it has, as soon as it can.
        """
        self._thread.start()
        try:
            self._started.result(timeout_s)
        except TimeoutError as error:
            if self._started.done():
                raise  # the building's own
            self.give_up()
            raise DeadlineError(
                "the engine did not start", expected=f"within {timeout_s} s"
            ) from error

    def give_up(self) -> None:
        """Nobody waits for this engine any more: it ends when its thread has its next turn."""
        self._given_up = True
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it ended meanwhile
                loop.call_soon_threadsafe(self._let_go)

    def _notify(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.wake_event.set)

    # ---- the engine thread

    def _run(self) -> None:
        try:
            with _alone():
                asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the start is told
            self._end(EngineState.DEAD, error, self._waiters)
            if not self._started.done():
                self._started.set_exception(error)
            else:
                _log.error("the engine thread died", exc_info=error)
        else:
            self._end(EngineState.CLOSED, None, self._waiters)

    def _let_go(self) -> None:
        self.enter(EngineState.CLOSED)
        self.wake_event.set()

    async def _main(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is each thread's own
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # others need cores too
        self._loop, self.wake_event = asyncio.get_running_loop(), asyncio.Event()
        self.core = self._build()
        self.core.on_finished = self.take_finished
        try:
            if not self._given_up:
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

    def between_steps(self) -> None:
        """What must happen between two steps: commands in order, then cancellations."""
        self.run_commands()
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
        self.settle(future, outcome)

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

    def _publish_end(self) -> None:
        """The engine's counters stay as they were; it may be gone."""
        names = ("cancelled_requests", "failed_requests", "finished_requests")
        self.stats = replace(
            self.stats,
            live_requests=0,
            waiting_requests=0,
            kv_tokens=0,
            kv_bytes=0,
            **{name: getattr(self._count, name) for name in names},
        )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Raises: EngineStateError while another engine of this process has not ended."""
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise EngineStateError(
            "this process has a dynamic engine already",
            expected="one at a time: close the other first",
            got=EngineState.RUNNING.value,
        )
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()
