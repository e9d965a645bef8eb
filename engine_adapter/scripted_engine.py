"""``ScriptedEngine``: an engine that replays given tokens, for everything round an engine.

It keeps the engine protocol (states, versions and epochs, stops, streaming, cancelling) without a
model: a script says which token comes next. With it a recorded run can be served again, and what a
server does with a particular answer can be tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tokenplane.engine_adapter.cpu.request import EpochTrack, check_request
from tokenplane.engine_adapter.engine import (
    CONTROL_TIMEOUT_S,
    EngineInfo,
    EngineState,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    SuspendMode,
)
from tokenplane.engine_adapter.sampling import resolve_seed
from tokenplane.engine_adapter.sampling_stops import Detokenize, Stop, StopMatcher
from tokenplane.schemas.errors import (
    EngineDeadError,
    EngineError,
    EngineStateError,
    RequestCancelledError,
    RequestRejectedError,
)

if TYPE_CHECKING:
    import torch

type Script = Callable[[GenerationRequest], Iterable[tuple[int, float]]]
"""The (token id, log-probability) pairs of one request's answer, at least one. An answer that the
script ends without a stop finishes with ``length``. Raising fails the request alone."""


def replay(*answers: Sequence[tuple[int, float]]) -> Script:
    """A script that gives the answers in turn, in the order in which requests start.

    A request after the last one fails with EngineError (code ``script_exhausted``).
    """
    left = deque(answers)

    def script(_request: GenerationRequest) -> Iterable[tuple[int, float]]:
        if not left:
            raise EngineError("the script has no further answer", code="script_exhausted")
        return left.popleft()

    return script


@dataclass(slots=True, eq=False)
class _Live:
    request: GenerationRequest
    epochs: EpochTrack
    admitted_s: float
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    started_s: float | None = None
    first_token_s: float | None = None
    evictions: int = 0

    @property
    def total(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def computed(self) -> int:
        """Input positions that an engine with a cache would have computed."""
        return self.total - 1 if self.tokens else 0


class ScriptedEngine:
    """Replays a script on the event loop that calls it. Belongs to one loop.

    Args:
        detokenize: needed where requests bring stop strings.
        step_s: time between two tokens; 0 only lets others run.
    """

    def __init__(
        self,
        info: EngineInfo,
        script: Script,
        detokenize: Detokenize | None = None,
        *,
        step_s: float = 0.0,
    ) -> None:
        self._info = info
        self._script = script
        self._detokenize = detokenize
        self._step_s = step_s
        self._state = EngineState.RUNNING
        self._suspended: SuspendMode | None = None
        self._version: int | None = None
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._live: dict[str, _Live] = {}
        self._stats = EngineStats()
        self.requests: list[GenerationRequest] = []
        """Every request admitted so far."""

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine.generate``."""
        request = check_request(request, self._info, has_text=self._detokenize is not None)
        self._check_alive()
        if request.request_id in self._live:
            raise RequestRejectedError("request_id is live", got=request.request_id)
        room = self._info.max_sequence_length - len(request.prompt_token_ids)
        sampling = resolve_seed(request.sampling)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        request = replace(request, sampling=sampling)
        live = _Live(request, EpochTrack(self._version), time.monotonic())
        self._live[request.request_id] = live
        self._idle.clear()
        self.requests.append(request)
        outcome = "failed_requests"
        try:
            stop = await self._play(live)
            outcome = "finished_requests"
            return _result(live, stop)
        except asyncio.CancelledError:
            outcome = "cancelled_requests"
            raise
        finally:
            del self._live[request.request_id]
            self._count(outcome)
            if not self._live:
                self._idle.set()

    async def _play(self, live: _Live) -> Stop | None:
        sampling = live.request.sampling
        eos = () if sampling.ignore_eos else self._info.eos_token_ids
        matcher = StopMatcher(
            frozenset(sampling.stop_token_ids) | frozenset(eos),
            sampling.stop_strings,
            self._detokenize,
        )
        await self._turn()
        live.started_s = time.monotonic()
        stop = None
        for token, log_prob in self._script(live.request):
            if live.tokens:
                await self._rest()
                await self._turn()
            live.tokens.append(token)
            live.log_probs.append(log_prob)
            live.first_token_s = live.first_token_s or time.monotonic()
            self._count("generated_tokens")
            stop = matcher.push(token)
            if stop is not None or len(live.tokens) == sampling.max_tokens:
                break
            _release(live.request, matcher)
        if not live.tokens:
            raise EngineError("the script gave an empty answer", code="script_exhausted")
        matcher.finish(stop)
        _release(live.request, matcher)
        return stop

    async def _rest(self) -> None:
        """The time between two tokens, cut short when the engine ends."""
        await asyncio.sleep(0)
        if self._step_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._step_s):
                    await self._ended.wait()

    async def _turn(self) -> None:
        """Wait while the engine is paused."""
        while not self._go_on.is_set():
            await self._go_on.wait()
        if self._state is EngineState.CLOSED:
            raise RequestCancelledError("the engine was closed")
        self._check_alive()

    def _check_alive(self) -> None:
        if self._state is EngineState.DEAD:
            raise EngineDeadError("the engine is dead")
        if self._state is EngineState.CLOSED:
            raise EngineStateError("the engine is closed", got=self._state.value)

    async def pause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.pause``."""
        self._move("pause", EngineState.RUNNING, EngineState.PAUSED)

    async def unpause(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.unpause``."""
        self._move("unpause", EngineState.PAUSED, EngineState.RUNNING)

    async def suspend(self, mode: SuspendMode, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.suspend``."""
        if self._state is EngineState.SUSPENDED and self._suspended == mode:
            return
        self._require("suspend", EngineState.PAUSED)
        self._state, self._suspended = EngineState.SUSPENDED, mode
        if mode == "recompute":
            for live in self._live.values():
                if live.computed:
                    live.epochs.restart_kv(self._version)
                    live.evictions += 1
                    self._count("evictions")

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.resume``."""
        self._move("resume", EngineState.SUSPENDED, EngineState.PAUSED)

    async def set_weight_version(
        self, version: int, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """See ``Engine.set_weight_version``."""
        self._check_alive()
        if type(version) is not int or version < 0:
            raise RequestRejectedError("a weight version is an integer >= 0", got=repr(version))
        if version == self._version:
            return
        self._version = version
        for live in self._live.values():
            live.epochs.change(
                version, total=live.total, computed=live.computed, generated=len(live.tokens)
            )

    async def update_weights(
        self,
        apply: Callable[[torch.nn.Module], None],
        *,
        version: int,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Always refused: a script has no weights.

        Raises: RequestRejectedError.
        """
        raise RequestRejectedError("a scripted engine has no weights", code="no_weights")

    def fail(self) -> None:
        """Die, as an engine does whose loop broke: every request gets EngineDeadError."""
        self._end(EngineState.DEAD)

    def weight_version(self) -> int | None:
        """See ``Engine.weight_version``."""
        return self._version

    def state(self) -> EngineState:
        """See ``Engine.state``."""
        return self._state

    def stats(self) -> EngineStats:
        """Counters and gauges; a script has no KV cache."""
        started = sum(live.started_s is not None for live in self._live.values())
        return replace(
            self._stats, live_requests=started, waiting_requests=len(self._live) - started
        )

    async def close(self) -> None:
        """See ``Engine.close``."""
        self._end(EngineState.CLOSED)
        await self._idle.wait()

    def _end(self, state: EngineState) -> None:
        self._state = state
        self._go_on.set()
        self._ended.set()

    def _move(self, what: str, source: EngineState, target: EngineState) -> None:
        if self._state is target:
            return
        self._require(what, source)
        self._state, self._suspended = target, None
        if target is EngineState.RUNNING:
            self._go_on.set()
        else:
            self._go_on.clear()

    def _require(self, what: str, state: EngineState) -> None:
        self._check_alive()
        if self._state is not state:
            raise EngineStateError(
                f"cannot {what} an engine that is {self._state.value}",
                expected=state.value,
                got=self._state.value,
            )

    def _count(self, name: str) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + 1})


def _release(request: GenerationRequest, matcher: StopMatcher) -> None:
    released = matcher.take_released()
    if released and request.on_tokens is not None:
        request.on_tokens(_frozen(released, np.int32))


def _result(live: _Live, stop: Stop | None) -> GenerationResult:
    now = time.monotonic()
    started = now if live.started_s is None else live.started_s
    first = now if live.first_token_s is None else live.first_token_s
    return GenerationResult(
        request_id=live.request.request_id,
        prompt_token_ids=live.request.prompt_token_ids,
        generated_token_ids=_frozen(live.tokens, np.int32),
        generated_log_probs=_frozen(live.log_probs, np.float32),
        finish_reason="length" if stop is None else "stop",
        stop_reason=None if stop is None else stop.reason,
        policy_epochs=live.epochs.policy,
        kv_cache_epochs=live.epochs.kv,
        num_evictions=live.evictions,
        routing_indices=None,
        queue_s=started - live.admitted_s,
        prefill_s=first - started,
        decode_s=now - first,
        sampling=live.request.sampling,
    )


def _frozen(values: Sequence[int] | Sequence[float], dtype: type[np.generic]) -> np.ndarray:
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array
