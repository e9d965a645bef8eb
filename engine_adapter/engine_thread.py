"""The one thread behind an engine: commands between steps, answers, counters, and how it all ends.

Any thread may call ``post``, ``wake``, ``join`` and read ``state``, ``version`` and ``stats``; all
else runs on the engine's own thread, so no lock guards the requests or the model.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from tokenplane.engine_adapter.engine import EngineState, EngineStats, GenerationResult
from tokenplane.engine_adapter.weight_update import WeightsLost
from tokenplane.schemas.errors import EngineDeadError, EngineStateError, RequestCancelledError

Outcome = GenerationResult | Exception


class EngineThread(ABC):
    """Owns the state and whoever waits. A subclass says what a step is; it is started once."""

    def __init__(self, name: str) -> None:
        self.state = EngineState.RUNNING
        self.version: int | None = None
        self.stats = EngineStats()
        """As of the last step or command; replaced whole, so any thread may read it."""
        self.cause: BaseException | None = None
        """What it died of."""
        self._count = EngineStats()
        self._commands: deque[Command] = deque()
        self._guard = threading.Lock()
        self._outcomes: list[tuple[Future[GenerationResult], Outcome]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """The thread's work; ends with ``_end``."""

    @abstractmethod
    def _notify(self) -> None:
        """Have a sleeping thread look at its commands and requests. From any thread."""

    @abstractmethod
    def publish(self) -> None:
        """Make the present counters and gauges visible in ``stats``."""

    @abstractmethod
    def _publish_end(self) -> None:
        """The same when nothing runs any more: all gauges are 0."""

    # ---- any thread

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

    # ---- the engine thread

    def enter(self, state: EngineState) -> None:
        """Be in ``state`` from the next step on."""
        self.state = state

    def run_commands(self) -> None:
        """Run what is queued, in order, until the queue is empty or the engine is closed."""
        while not self.closed:
            with self._guard:
                if not self._commands:
                    return
                command = self._commands.popleft()
            command.run(before_answer=self.publish)

    def settle(self, future: Future[GenerationResult], outcome: Outcome) -> None:
        """Count an ended request and keep its answer for ``deliver``."""
        if not future.set_running_or_notify_cancel():
            self._add(cancelled_requests=1)
            return
        failed = isinstance(outcome, Exception)
        self._add(failed_requests=int(failed), finished_requests=int(not failed))
        self._outcomes.append((future, outcome))

    def deliver(self) -> None:
        """Resolve what has ended, after the stats that count it are visible."""
        outcomes, self._outcomes = self._outcomes, []
        for future, outcome in outcomes:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def count_update(self, *, failed: bool) -> None:
        """Count a weight update."""
        self._add(weight_updates=int(not failed), failed_weight_updates=int(failed))

    def _add(self, **deltas: float) -> None:
        changed = {name: getattr(self._count, name) + delta for name, delta in deltas.items()}
        self._count = replace(self._count, **changed)

    def _end(
        self,
        state: EngineState,
        cause: BaseException | None,
        waiters: Mapping[str, Future[GenerationResult]],
    ) -> None:
        """Nothing runs any more: answer everybody who waits; ``waiters`` by request id."""
        with self._guard:
            self.cause = cause
            self.state = state
            commands = list(self._commands)
            self._commands.clear()
        self._add(**{"failed_requests" if cause else "cancelled_requests": len(waiters)})
        self._publish_end()
        self.deliver()
        error = self.ended_error()
        for command in commands:
            command.fail(error)
        for key, future in waiters.items():
            if future.set_running_or_notify_cancel():
                closed = RequestCancelledError("the engine was closed", key=key)
                future.set_exception(closed if cause is None else error)


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
