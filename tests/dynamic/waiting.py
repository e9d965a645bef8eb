"""Waiting for what another thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return once ``condition`` holds. Raises: AssertionError after ``timeout_s``."""
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "it never came about"
        time.sleep(0.002)
