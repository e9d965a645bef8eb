"""Sleeping, waking and refits of a worker's engine: confirmed, idempotent, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from tokenplane.engine_adapter.engine import Engine, EngineState, SuspendMode
from tokenplane.schemas.errors import (
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    TokenplaneError,
)

_POLL_S = 0.02


class EngineLifecycle:
    """Moves one engine between serving and standing down. Requests freeze meanwhile.

    A control call of the engine returns when it has taken effect, so every move is confirmed; one
    that the engine refuses raises EngineStateError, which says in which state it is. A move that
    fails half-way is taken back as far as the engine lets it.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._refitting = False
        self._woken_by_refit = False

    @property
    def asleep(self) -> bool:
        """The engine stands down (or is about to: half of ``sleep`` is done)."""
        return self._engine.state() in (EngineState.PAUSED, EngineState.SUSPENDED)

    async def sleep(self, mode: SuspendMode) -> None:
        """Pause and suspend; no-op when suspended already."""
        if self._engine.state() is EngineState.SUSPENDED:
            return
        served = self._engine.state() is EngineState.RUNNING
        await self._engine.pause(timeout_s=self._timeout_s)
        try:
            await self._engine.suspend(mode, timeout_s=self._timeout_s)
        except BaseException:
            if served:
                with contextlib.suppress(TokenplaneError):  # the first failure says more
                    await self._engine.unpause(timeout_s=self._timeout_s)
            raise

    async def wake(self) -> None:
        """Resume and unpause; no-op when serving already."""
        if self._engine.state() is EngineState.SUSPENDED:
            await self._engine.resume(timeout_s=self._timeout_s)
        await self._engine.unpause(timeout_s=self._timeout_s)
        self._refitting = False

    async def suspend_for_refit(self, mode: SuspendMode) -> None:
        """Sleep, and remember if the engine served before. No-op while a refit holds it asleep."""
        if self._refitting and self.asleep:
            return
        served = not self.asleep
        await self.sleep(mode)
        self._refitting, self._woken_by_refit = True, served

    async def resume_after_refit(self) -> None:
        """Undo ``suspend_for_refit``: what slept before stays asleep. Idempotent."""
        if not self._refitting:
            return
        if self._woken_by_refit:
            await self.wake()
        self._refitting = False

    async def drain(self, timeout_s: float) -> None:
        """Wait until no request is live or waiting.

        Raises: EngineDeadError; EngineStateError if the engine does not run, and so cannot finish
        any; DeadlineError, saying how many are left.
        """
        ends = time.monotonic() + timeout_s
        while True:
            state = self._engine.state()
            if state is EngineState.DEAD:
                raise EngineDeadError("the engine died before it was drained")
            left = self._under_way()
            if not left:
                return
            if state is not EngineState.RUNNING:
                raise EngineStateError(
                    f"cannot drain an engine that is {state.value}",
                    expected=EngineState.RUNNING.value,
                    got=state.value,
                )
            if time.monotonic() > ends:
                raise DeadlineError(
                    f"{left} requests did not finish", expected=f"within {timeout_s} s"
                )
            await asyncio.sleep(_POLL_S)

    def _under_way(self) -> int:
        stats = self._engine.stats()
        return stats.live_requests + stats.waiting_requests


def clear_rotary_cache(model: Any) -> None:
    """Forget the rotary angles that Megatron caches, on the device, for each length seen."""
    rotary = getattr(model, "rotary_pos_emb", None)
    for name in ("forward", "get_emb"):
        clear = getattr(getattr(rotary, name, None), "cache_clear", None)
        if clear is not None:
            clear()
