"""MegatronCpuEngine: the engine protocol over a megatron-core GPTModel on the CPU.

True continuous batching: each step is one forward over the tokens of all live requests (see
``cpu.attention`` for how). This file is the asyncio facade and the rules of the state machine;
``cpu.loop`` is the thread behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from tokenplane.engine_adapter.cpu.loop import EngineLoop
from tokenplane.engine_adapter.cpu.request import check_request
from tokenplane.engine_adapter.cpu.weights import apply_or_restore
from tokenplane.engine_adapter.engine import (
    CONTROL_TIMEOUT_S,
    EngineInfo,
    EngineState,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    SuspendMode,
)
from tokenplane.engine_adapter.sampling_stops import Detokenize
from tokenplane.schemas.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    RequestRejectedError,
)


class MegatronCpuEngine:
    """One model, one thread. Every method may be called from any event loop.

    The model must be built with ``cpu.attention``'s seams (``load_model`` does so); the engine is
    its only user between construction and ``close``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        info: EngineInfo,
        detokenize: Detokenize | None = None,
        *,
        max_live_requests: int = 64,
        max_step_tokens: int = 512,
        max_kv_bytes: int = 2 << 30,
        max_sequence_length: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Starts the thread.

        ``detokenize`` gives the text of ids, special tokens included; stop strings need it.
        ``max_live_requests``: computed together; more wait in order. ``max_step_tokens``: columns
        of one forward, so the longest wait of a decoding request for another's prefill.
        ``max_kv_bytes``: a request starts once all that it may ever need fits.
        ``max_sequence_length`` may lower the model's own. ``num_threads``: cores for one forward,
        by default half of them: server, stores and clients need the rest, and a forward whose
        threads wait for a busy core is many times slower than one with fewer threads.

        Raises: ConfigError.
        """
        if max_sequence_length is not None:
            if not 2 <= max_sequence_length <= info.max_sequence_length:
                raise ConfigError(
                    "max_sequence_length is out of range",
                    expected=f"2 to {info.max_sequence_length}",
                    got=max_sequence_length,
                )
            info = replace(info, max_sequence_length=max_sequence_length)
        if not 1 <= max_live_requests <= max_step_tokens:
            raise ConfigError(
                "max_live_requests is out of range",
                expected=f"1 to max_step_tokens ({max_step_tokens})",
                got=max_live_requests,
            )
        if num_threads is None:
            num_threads = max(1, (os.cpu_count() or 1) // 2)
        if num_threads < 1:
            raise ConfigError("num_threads is out of range", expected=">= 1", got=num_threads)
        max_kv_tokens = max_kv_bytes // _kv_bytes_per_token(model)
        if max_kv_tokens < info.max_sequence_length:
            raise ConfigError(
                "max_kv_bytes does not hold one request of the maximum length",
                expected=f">= {info.max_sequence_length * _kv_bytes_per_token(model)}",
                got=max_kv_bytes,
            )
        self._info = info
        self._has_text = detokenize is not None
        self._suspended: SuspendMode | None = None
        self._loop = EngineLoop(
            model.eval(),
            info,
            detokenize,
            max_live_requests=max_live_requests,
            max_step_tokens=max_step_tokens,
            max_kv_tokens=max_kv_tokens,
            num_threads=num_threads,
        )
        self._loop.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine.generate``."""
        checked = check_request(request, self._info, has_text=self._has_text)
        answer: Future[GenerationResult] = Future()
        admitted = self._loop.post(lambda: self._loop.admit(checked, answer))
        try:
            await asyncio.wrap_future(admitted)
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            admitted.cancel()
            answer.cancel()
            self._loop.wake()
            raise

    async def pause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.pause``."""
        await self._move("pause", EngineState.RUNNING, EngineState.PAUSED, timeout_s)

    async def unpause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.unpause``."""
        await self._move("unpause", EngineState.PAUSED, EngineState.RUNNING, timeout_s)

    async def suspend(self, mode: SuspendMode, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.suspend``. Suspending again in the other mode raises EngineStateError."""
        if mode not in ("persist", "recompute"):
            raise RequestRejectedError("mode", expected="persist or recompute", got=repr(mode))

        def action() -> None:
            if self._loop.state is EngineState.SUSPENDED and self._suspended == mode:
                return
            self._require("suspend", EngineState.PAUSED)
            if mode == "recompute":
                self._loop.evict_all()
            self._suspended = mode
            self._loop.state = EngineState.SUSPENDED

        await self._control("suspend", action, timeout_s)

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.resume``."""
        await self._move("resume", EngineState.SUSPENDED, EngineState.PAUSED, timeout_s)

    async def set_weight_version(
        self, version: int, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """See ``Engine.set_weight_version``."""
        _check_version(version)

        def action() -> None:
            if self._loop.version != version:
                self._loop.set_version(version)

        await self._control("set_weight_version", action, timeout_s)

    async def update_weights(
        self,
        apply: Callable[[torch.nn.Module], None],
        *,
        version: int,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """See ``Engine.update_weights``. Legal in RUNNING, PAUSED and SUSPENDED.

        ``apply`` runs on the engine thread without gradients, and must write into the tensors that
        are there; ``cpu.weights`` has the proof demanded. Caches of live requests are kept, and
        their KV epochs say so: suspend("recompute") round the update where that matters.
        """
        _check_version(version)

        def action() -> None:
            try:
                apply_or_restore(self._loop.model, apply)
            except BaseException:
                self._loop.count_update(failed=True)
                raise
            self._loop.count_update(failed=False)
            self._loop.set_version(version)

        await self._control("update_weights", action, timeout_s)

    def weight_version(self) -> int | None:
        """See ``Engine.weight_version``."""
        return self._loop.version

    def state(self) -> EngineState:
        """See ``Engine.state``."""
        return self._loop.state

    def stats(self) -> EngineStats:
        """As of the last step or command."""
        return self._loop.stats

    async def close(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.close``.

        Raises: DeadlineError if the thread is stuck in a step.
        """
        if self._loop.state not in (EngineState.CLOSED, EngineState.DEAD):

            def action() -> None:
                self._loop.state = EngineState.CLOSED

            # Somebody else closing it, or its death, meanwhile: it has ended either way.
            with contextlib.suppress(EngineStateError, EngineDeadError):
                await self._control("close", action, timeout_s)
        if not await asyncio.to_thread(self._loop.join, timeout_s):
            raise DeadlineError("the engine thread did not end", expected=f"within {timeout_s} s")
        self._loop.state = EngineState.CLOSED

    async def _move(
        self, what: str, source: EngineState, target: EngineState, timeout_s: float
    ) -> None:
        def action() -> None:
            if self._loop.state is target:
                return
            self._require(what, source)
            self._loop.state = target
            self._suspended = None

        await self._control(what, action, timeout_s)

    def _require(self, what: str, state: EngineState) -> None:
        if self._loop.state is not state:
            raise EngineStateError(
                f"cannot {what} an engine that is {self._loop.state.value}",
                expected=state.value,
                got=self._loop.state.value,
            )

    async def _control(self, what: str, action: Callable[[], None], timeout_s: float) -> None:
        """Run ``action`` between two steps; withdraw it if its turn does not come in time."""
        future = self._loop.post(action)
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
        except asyncio.CancelledError:
            future.cancel()
            waiter.cancel()
            raise
        if not done and future.cancel():
            raise DeadlineError(
                f"{what} did not get its turn; it will not take effect",
                expected=f"within {timeout_s} s",
            )
        await waiter


def _check_version(version: int) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise RequestRejectedError(
            "a weight version is an integer >= 0", expected=">= 0", got=repr(version)
        )


def _kv_bytes_per_token(model: Any) -> int:
    config = model.config
    groups = config.num_query_groups or config.num_attention_heads
    itemsize = torch.empty(0, dtype=config.params_dtype).element_size()
    return int(2 * config.num_layers * groups * config.kv_channels * itemsize)
