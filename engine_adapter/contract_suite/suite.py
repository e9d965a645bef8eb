"""What the contract suites of an engine share: making one, asking it, checking an answer."""

from __future__ import annotations

import abc
import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np

from tokenplane.engine_adapter.engine import (
    Engine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)

WAIT_S = 60.0
"""A scenario that takes longer hangs."""


class EngineSuite(abc.ABC):
    """What the suites share: how to make an engine, how to ask it, and how to check an answer."""

    logprob_tolerance: ClassVar[float] = 1e-5
    """Largest difference of a log-probability from the reference; float32 on the CPU."""
    prompt: ClassVar[tuple[int, ...]] = (5, 9, 17, 33, 65, 7)
    """Ids that are ordinary tokens of the model."""

    @abc.abstractmethod
    def make_engine(self, **limits: int) -> Engine:
        """A running engine over a model of its own, without a weight version.

        ``limits``: ``max_sequence_length``, ``max_live_requests``, ``max_step_tokens``.
        """

    @abc.abstractmethod
    def reference_logits(self, engine: Engine, ids: np.ndarray) -> np.ndarray:
        """float32[n, V] of one forward without a cache over int32[n] ``ids``, present weights."""

    @staticmethod
    def change_weights(model: Any) -> None:
        """Another policy: every parameter in place, deterministically."""
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.02 if index % 2 else 0.97)

    _names: ClassVar[Any] = itertools.count()

    def request(
        self, prompt: Any = None, *, on_tokens: Any = None, **sampling: Any
    ) -> GenerationRequest:
        """A greedy request of 24 tokens that ignores end ids, unless said otherwise."""
        settings = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | sampling
        ids = np.array(self.prompt if prompt is None else prompt, dtype=np.int32)
        name = f"request-{next(self._names)}"
        return GenerationRequest(name, ids, SamplingParams(**settings), on_tokens)

    def run(self, scenario: Callable[[Engine], Awaitable[None]], **limits: int) -> None:
        """Run ``scenario`` on a fresh engine, within a deadline, and close the engine."""

        async def bounded() -> None:
            async with self._open(**limits) as engine, asyncio.timeout(WAIT_S):
                await scenario(engine)

        asyncio.run(bounded())

    @asynccontextmanager
    async def _open(self, **limits: int) -> AsyncIterator[Engine]:
        engine = self.make_engine(**limits)
        try:
            yield engine
        finally:
            await engine.close()

    def reference_log_probs(self, engine: Engine, result: GenerationResult) -> np.ndarray:
        """float64[G]: teacher-forced log-probabilities of the answer under the present weights."""
        ids = np.concatenate([result.prompt_token_ids, result.generated_token_ids])
        logits = self.reference_logits(engine, ids).astype(np.float64)
        first = len(result.prompt_token_ids)
        rows = logits[first - 1 : -1]
        top = rows.max(axis=-1, keepdims=True)
        log_total = top[:, 0] + np.log(np.exp(rows - top).sum(axis=-1))
        return np.asarray(rows[np.arange(len(rows)), ids[first:]] - log_total)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about; the scenario's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - nothing signals it: it is a counter elsewhere
        await asyncio.sleep(0.001)
