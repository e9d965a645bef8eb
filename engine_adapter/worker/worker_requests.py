"""Runs a batch of requests on an engine, with a deadline that does not count stand-downs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from tokenplane.engine_adapter.engine import (
    Engine,
    EngineState,
    GenerationRequest,
    GenerationResult,
)
from tokenplane.schemas.errors import DeadlineError

_POLL_S = 0.1


async def as_they_finish(
    engine: Engine, requests: Sequence[GenerationRequest], timeout_s: float
) -> AsyncIterator[tuple[int, GenerationResult]]:
    """``(index, result)`` of each request as it finishes.

    ``timeout_s`` bounds the time during which the engine runs: requests freeze while a colocated
    engine stands down, and that is not theirs to answer for. The first failure cancels the rest,
    and so does whoever stops iterating.

    Raises: DeadlineError; what a request raised.
    """
    tasks = {
        asyncio.ensure_future(engine.generate(request)): index
        for index, request in enumerate(requests)
    }
    left = dict(tasks)
    spent_s = 0.0
    try:
        while left:
            began = time.monotonic()
            ran = engine.state() is EngineState.RUNNING
            done, _ = await asyncio.wait(left, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield left.pop(task), task.result()
            if ran:
                spent_s += time.monotonic() - began
            if left and spent_s > timeout_s:
                raise DeadlineError(
                    f"{len(left)} of {len(requests)} answers did not finish",
                    expected=f"within {timeout_s} s of running",
                )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_in_order(
    engine: Engine, requests: Sequence[GenerationRequest], timeout_s: float
) -> list[GenerationResult]:
    """The results in the order of the requests. Raises as ``as_they_finish`` does."""
    results: list[GenerationResult | None] = [None] * len(requests)
    async for index, result in as_they_finish(engine, requests, timeout_s):
        results[index] = result
    return [result for result in results if result is not None]
