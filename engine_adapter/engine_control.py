"""The asyncio side that the engines with a thread of their own share: control, its state machine.

    RUNNING <-> PAUSED <-> SUSPENDED;   any of them -> CLOSED;   a failure -> DEAD

A subclass adds ``generate`` and what its kind of engine does at a version, a suspend and a resume.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future

import torch

from tokenplane.engine_adapter.engine import (
    CONTROL_TIMEOUT_S,
    EngineInfo,
    EngineState,
    EngineStats,
    GenerationResult,
    SuspendMode,
)
from tokenplane.engine_adapter.engine_thread import EngineThread
from tokenplane.engine_adapter.weight_update import apply_or_restore
from tokenplane.schemas.errors import (
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    RequestRejectedError,
)


class ControlledEngine[ThreadT: EngineThread](ABC):
    """One model, one thread. Every method may be called from any event loop."""

    def __init__(self, model: torch.nn.Module, info: EngineInfo, thread: ThreadT) -> None:
        self._model = model.eval()
        self._info = info
        self._loop = thread
        self._suspended: SuspendMode | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @abstractmethod
    def _set_version(self, version: int) -> None:
        """On the engine thread: the weights are ``version`` from the next step on."""

    @abstractmethod
    def _suspend_kv(self, mode: SuspendMode) -> None:
        """On the engine thread: keep or drop the KV cache."""

    @abstractmethod
    def _resume_kv(self) -> None:
        """On the engine thread: get back what ``_suspend_kv`` gave away."""

    async def _answer(self, admit: Callable[[Future[GenerationResult]], None]) -> GenerationResult:
        """Have ``admit`` take a request on the engine thread, and wait for its answer."""
        answer: Future[GenerationResult] = Future()
        admitted = self._loop.post(lambda: admit(answer))
        try:
            await asyncio.wrap_future(admitted)
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            admitted.cancel()
            answer.cancel()
            self._loop.wake()
            raise

    async def pause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.pause``."""
        await self._move("pause", EngineState.RUNNING, EngineState.PAUSED, timeout_s)

    async def unpause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.unpause``."""
        await self._move("unpause", EngineState.PAUSED, EngineState.RUNNING, timeout_s)

    async def suspend(self, mode: SuspendMode, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.suspend``. Suspending again in the other mode raises EngineStateError."""
        if mode not in ("persist", "recompute"):
            raise RequestRejectedError("mode", expected="persist or recompute", got=repr(mode))

        def action() -> None:
            if self._loop.state is EngineState.SUSPENDED and self._suspended == mode:
                return
            self._require("suspend", EngineState.PAUSED)
            self._suspend_kv(mode)
            self._suspended = mode
            self._loop.enter(EngineState.SUSPENDED)

        await self._control("suspend", action, timeout_s)

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.resume``."""

        def action() -> None:
            if self._loop.state is EngineState.PAUSED:
                return
            self._require("resume", EngineState.SUSPENDED)
            self._resume_kv()
            self._suspended = None
            self._loop.enter(EngineState.PAUSED)

        await self._control("resume", action, timeout_s)

    async def set_weight_version(
        self, version: int, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """See ``Engine.set_weight_version``. The version that it has already changes nothing."""
        check_version(version)
        await self._control("set_weight_version", lambda: self._set_version(version), timeout_s)

    async def update_weights(
        self,
        apply: Callable[[torch.nn.Module], None],
        *,
        version: int,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """See ``Engine.update_weights``. Legal in RUNNING, PAUSED and SUSPENDED.

        ``apply`` runs on the engine thread without gradients, and must write into the tensors that
        are there (``weight_update`` has the proof demanded; CUDA graphs hold their addresses).
        Caches of live requests are kept, and their KV epochs say so: suspend("recompute") round the
        update where that matters.
        """
        check_version(version)

        def action() -> None:
            try:
                apply_or_restore(self._model, apply)
            except BaseException:
                self._loop.count_update(failed=True)
                raise
            self._loop.count_update(failed=False)
            self._set_version(version)

        await self._control("update_weights", action, timeout_s)

    def weight_version(self) -> int | None:
        """See ``Engine.weight_version``."""
        return self._loop.version

    def state(self) -> EngineState:
        """See ``Engine.state``."""
        return self._loop.state

    def stats(self) -> EngineStats:
        """As of the last step or command."""
        return self._loop.stats

    async def close(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.close``. Raises: DeadlineError if the thread is stuck in a step."""
        if self._loop.state not in (EngineState.CLOSED, EngineState.DEAD):
            # Somebody else closing it, or its death, meanwhile: it has ended either way.
            with contextlib.suppress(EngineStateError, EngineDeadError):
                await self._control(
                    "close", lambda: self._loop.enter(EngineState.CLOSED), timeout_s
                )
        if not await asyncio.to_thread(self._loop.join, timeout_s):
            raise DeadlineError("the engine thread did not end", expected=f"within {timeout_s} s")
        self._loop.state = EngineState.CLOSED

    async def _move(
        self, what: str, source: EngineState, target: EngineState, timeout_s: float
    ) -> None:
        def action() -> None:
            if self._loop.state is target:
                return
            self._require(what, source)
            self._loop.enter(target)

        await self._control(what, action, timeout_s)

    def _require(self, what: str, state: EngineState) -> None:
        if self._loop.state is not state:
            raise EngineStateError(
                f"cannot {what} an engine that is {self._loop.state.value}",
                expected=state.value,
                got=self._loop.state.value,
            )

    async def _control(self, what: str, action: Callable[[], None], timeout_s: float) -> None:
        """Run ``action`` between two steps; withdraw it if its turn does not come in time."""
        future = self._loop.post(action)
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
        except asyncio.CancelledError:
            future.cancel()
            waiter.cancel()
            raise
        if not done and future.cancel():
            raise DeadlineError(
                f"{what} did not get its turn; it will not take effect",
                expected=f"within {timeout_s} s",
            )
        await waiter


def check_version(version: int) -> None:
    """Raises: RequestRejectedError for what no epoch column (int64) can hold."""
    whole = isinstance(version, int) and not isinstance(version, bool)
    if not whole or not 0 <= version < 2**63:
        raise RequestRejectedError(
            "a weight version is an integer >= 0", expected="0 <= version < 2^63", got=repr(version)
        )
