"""Notices a coordinator that lives but forwards nothing, so that nobody waits for it for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenplane.schemas.errors import EngineDeadError

_QUIET_S = 1.0
"""Without a message for so long, one is asked for."""
_TURNS = 3
"""Looks for messages that the engine must have made in vain: a long step is not silence."""


class CoordinatorLiveness:
    """Asks while requests are under way; any message that reaches the engine is an answer."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._quiet_s = min(_QUIET_S, timeout_s / 2)
        self._heard = 0
        self._heard_s = time.monotonic()
        self._asked: tuple[float, int] | None = None
        """When the unanswered question was put: seconds, and the engine's turns."""

    def check(self, *, heard: int, turns: int, waiting: bool, ask: Callable[[], None]) -> None:
        """To be called often. ``heard``: messages that reached the engine; ``turns``: how often it
        looked for some; ``waiting``: whether an answer is due; ``ask`` sends a message to it.

        Raises: EngineDeadError if a question went unanswered for the timeout.
        """
        now = time.monotonic()
        if heard != self._heard or not waiting:
            self._heard, self._heard_s, self._asked = heard, now, None
        elif self._asked is None:
            if now - self._heard_s >= self._quiet_s:
                self._asked = now, turns
                ask()
        elif now - self._asked[0] > self._timeout_s and turns - self._asked[1] >= _TURNS:
            raise EngineDeadError(
                "the coordinator forwards no messages", expected=f"within {self._timeout_s} s"
            )
