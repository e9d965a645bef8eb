"""A background thread with a persistent event loop, and calls into it that have a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any

from tokenplane.schemas.errors import DeadlineError, EngineStateError


class LoopThread:
    """Runs coroutines for callers that have no event loop. ``close`` ends the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._guard = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call[T](self, coroutine: Coroutine[Any, Any, T], *, what: str, timeout_s: float) -> T:
        """The coroutine's result.

        Raises: DeadlineError (the coroutine is cancelled), EngineStateError once closed, and what
        the coroutine raises.
        """
        with self._guard:  # a call after the stop would be started and never end
            if self._closing:
                coroutine.close()
                raise EngineStateError(f"cannot {what}: the worker is shut down", got="closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():
                raise  # the coroutine's own, which says more
            future.cancel()
            raise DeadlineError(
                f"{what} did not finish", expected=f"within {timeout_s} s"
            ) from error
        except CancelledError as error:
            raise EngineStateError(f"{what} was cut off by the shutdown", got="closed") from error

    def close(self, timeout_s: float = 10.0) -> bool:
        """Cancel what runs and end the thread; False if it did not end in time. Idempotent."""
        with self._guard:
            first, self._closing = not self._closing, True
            if first:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
