"""Sleeping, waking and refits of a worker's engine: confirmed, idempotent, nothing lost."""

from __future__ import annotations

from typing import Any

from tokenplane.engine_adapter.engine import Engine, EngineState, SuspendMode


class EngineLifecycle:
    """Moves one engine between serving and standing down. Requests freeze meanwhile.

    A control call of the engine returns when it has taken effect, so every move is confirmed; one
    that the engine refuses raises EngineStateError, which says in which state it is.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    @property
    def asleep(self) -> bool:
        """The engine stands down (or is about to: half of ``sleep`` is done)."""
        return self._engine.state() in (EngineState.PAUSED, EngineState.SUSPENDED)

    async def sleep(self, mode: SuspendMode) -> None:
        """Pause and suspend; no-op when suspended already."""
        if self._engine.state() is EngineState.SUSPENDED:
            return
        await self._engine.pause(timeout_s=self._timeout_s)
        await self._engine.suspend(mode, timeout_s=self._timeout_s)

    async def wake(self) -> None:
        """Resume and unpause; no-op when serving already."""
        if self._engine.state() is EngineState.SUSPENDED:
            await self._engine.resume(timeout_s=self._timeout_s)
        await self._engine.unpause(timeout_s=self._timeout_s)


def clear_rotary_cache(model: Any) -> None:
    """Forget the rotary angles that Megatron caches, on the device, for each length seen."""
    rotary = getattr(model, "rotary_pos_emb", None)
    for name in ("forward", "get_emb"):
        clear = getattr(getattr(rotary, name, None), "cache_clear", None)
        if clear is not None:
            clear()
