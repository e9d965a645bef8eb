"""A second witness: an engine whose requests are also written down, as it saw them, to a file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from tokenplane.engine_adapter.engine import (
    CONTROL_TIMEOUT_S,
    Engine,
    EngineInfo,
    EngineState,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    SuspendMode,
)
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.tokens import Float32Array, Int32Array, to_log_probs, to_token_ids

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class LoggedRequest:
    """One finished request, from the engine's own result."""

    request_id: str
    """The served answer's id."""
    prompt_token_ids: Int32Array
    generated_token_ids: Int32Array
    generated_log_probs: Float32Array


class LoggedEngine:
    """``engine``, with one JSON line per finished request appended to ``path``.

    Nothing of it passes through resolver, splice or stager, so the file can convict them. The line
    is written before the answer is given back. For checks and demonstrations: it holds tokens, and
    the write is on the event loop.

    Raises:
        OSError: the file cannot be opened (or, from ``generate``, written).
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine.generate``."""
        result = await self._engine.generate(request)
        line = {
            "request_id": result.request_id,
            "prompt_token_ids": result.prompt_token_ids,
            "generated_token_ids": result.generated_token_ids,
            "generated_log_probs": result.generated_log_probs.astype(np.float64),
        }
        data = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        with self._lock:
            self._file.write(data)
        return result

    async def pause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.pause``."""
        await self._engine.pause(timeout_s=timeout_s)

    async def unpause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.unpause``."""
        await self._engine.unpause(timeout_s=timeout_s)

    async def suspend(self, mode: SuspendMode, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.suspend``."""
        await self._engine.suspend(mode, timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.resume``."""
        await self._engine.resume(timeout_s=timeout_s)

    async def set_weight_version(
        self, version: int, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """See ``Engine.set_weight_version``."""
        await self._engine.set_weight_version(version, timeout_s=timeout_s)

    async def update_weights(
        self,
        apply: Callable[[torch.nn.Module], None],
        *,
        version: int,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """See ``Engine.update_weights``."""
        await self._engine.update_weights(apply, version=version, timeout_s=timeout_s)

    def weight_version(self) -> int | None:
        """See ``Engine.weight_version``."""
        return self._engine.weight_version()

    def state(self) -> EngineState:
        """See ``Engine.state``."""
        return self._engine.state()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return self._engine.stats()

    async def close(self) -> None:
        """Ends the engine, then the file."""
        try:
            await self._engine.close()
        finally:
            self._file.close()


def read_engine_log(path: Path) -> Iterator[LoggedRequest]:
    """Every whole line of a log; the last one may be torn if the server was killed.

    Raises:
        InvalidRecordError: another line is not what ``LoggedEngine`` writes.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                values = json.loads(line)
                yield LoggedRequest(
                    values["request_id"],
                    to_token_ids(values["prompt_token_ids"]),
                    to_token_ids(values["generated_token_ids"]),
                    to_log_probs(values["generated_log_probs"]),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRecordError(
                    "no line of an engine log", key=f"line {number}"
                ) from error
