"""A worker's engine, its life cycle and the thread that calls it; every call has a deadline."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.worker.generation_config import GenerationConfig
from tokenplane.engine_adapter.worker.lifecycle import EngineLifecycle
from tokenplane.engine_adapter.worker.thread import LoopThread

Move = Callable[[EngineLifecycle], Coroutine[Any, Any, None]]


class RunningEngine:
    """From a started engine to its end; ``close`` leaves neither engine nor thread."""

    def __init__(self, engine: MegatronDynamicEngine, config: GenerationConfig) -> None:
        self.engine = engine
        self._control_s = config.control_timeout_s
        # Each move is up to two control calls with the deadline each, and one that takes the first
        # back; a wake may capture CUDA graphs.
        self._move_s = 3 * config.control_timeout_s + config.start_timeout_s
        self.lifecycle = EngineLifecycle(engine, config.control_timeout_s)
        self._thread = LoopThread("tokenplane-worker")

    def call[T](self, coroutine: Coroutine[Any, Any, T], *, what: str, timeout_s: float) -> T:
        """See ``LoopThread.call``."""
        return self._thread.call(coroutine, what=what, timeout_s=timeout_s)

    def move(
        self, what: str, action: Callable[[EngineLifecycle], Coroutine[Any, Any, None]]
    ) -> None:
        """Have the life cycle do something."""
        self.call(action(self.lifecycle), what=what, timeout_s=self._move_s)

    def set_version(self, version: int) -> None:
        """On the engine's own thread."""
        self.call(
            self.engine.set_weight_version(version, timeout_s=self._control_s),
            what="set_rollout_weight_version",
            timeout_s=2 * self._control_s,
        )

    def drain(self, timeout_s: float) -> None:
        """See ``EngineLifecycle.drain``."""
        self.call(
            self.lifecycle.drain(timeout_s),
            what="drain",
            timeout_s=timeout_s + self._control_s,
        )

    def close(self) -> None:
        """End the engine, then the thread, whatever ending the engine raises."""
        try:
            self.call(
                self.engine.close(timeout_s=self._control_s),
                what="shutdown",
                timeout_s=3 * self._control_s,
            )
        finally:
            self._thread.close()
