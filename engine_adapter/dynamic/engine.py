"""MegatronDynamicEngine: the engine protocol over Megatron's ``DynamicInferenceEngine``.

This file is the asyncio facade and the rules of the state machine. ``dynamic.loop`` is the thread
behind it (direct mode), ``dynamic.coordinator`` the same behind Megatron's coordinator and client,
``dynamic.core`` what is ours inside Megatron's engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import torch

from tokenplane.engine_adapter.cpu.request import check_request
from tokenplane.engine_adapter.cpu.weights import apply_or_restore
from tokenplane.engine_adapter.dynamic.build import core_builder, effective_info
from tokenplane.engine_adapter.dynamic.coordinator import CoordinatedLoop
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.dynamic.hooks import install_hooks
from tokenplane.engine_adapter.dynamic.loop import DynamicLoop
from tokenplane.engine_adapter.dynamic.request import effective, to_wire
from tokenplane.engine_adapter.dynamic.settings import DynamicSettings
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
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    RequestRejectedError,
)

EngineMode = Literal["direct", "coordinator"]


class MegatronDynamicEngine:
    """One model, one device, one thread. Every method may be called from any event loop.

    One dynamic engine at a time in a process: Megatron keeps its inference mode, the recorded
    routers and its CUDA graphs in globals.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        info: EngineInfo,
        detokenize: Detokenize | None = None,
        *,
        settings: DynamicSettings | None = None,
        mode: EngineMode = "direct",
        coordinator: CoordinatorProcess | None = None,
        megatron_extra: dict[str, Any] | None = None,
    ) -> None:
        """Builds the engine on its own thread and waits for it.

        ``model`` is a megatron-core GPTModel on the device to run on; the engine is its only user
        until ``close``. ``detokenize`` gives the text of ids, special tokens included; stop strings
        need it. ``mode``: "direct" steps the engine itself, "coordinator" starts Megatron's
        coordinator process (or uses ``coordinator``, which must have no other engine) and sends
        every request through its client. ``megatron_extra``: further fields of Megatron's
        ``InferenceConfig``.

        Raises: ConfigError; TimeoutError if the start takes longer than its setting; what Megatron
        raises.
        """
        settings = settings or DynamicSettings()
        device = next(model.parameters()).device
        self._info = effective_info(info, settings, device)
        self._settings = settings
        self._has_text = detokenize is not None
        self._suspended: SuspendMode | None = None
        build = core_builder(model, self._info, settings, detokenize, megatron_extra or {})
        if mode == "coordinator":
            self._loop: DynamicLoop = CoordinatedLoop(
                build, device, settings.start_timeout_s, coordinator
            )
        else:
            self._loop = DynamicLoop(build, device)
        self._model = model.eval()
        sys.setswitchinterval(settings.switch_interval_s)
        self._loop.start(settings.start_timeout_s)

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine.generate``."""
        checked = check_request(request, self._info, has_text=self._has_text)
        wire = to_wire(checked.request_id, effective(checked, self._info))
        prompt = checked.prompt_token_ids.tolist()
        answer: Future[GenerationResult] = Future()
        admitted = self._loop.post(
            lambda: self._loop.admit(prompt, wire, checked.on_tokens, answer)
        )
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
        """See ``Engine.suspend``. "recompute" frees the device memory of the KV cache and of the
        CUDA graphs. Suspending again in the other mode raises EngineStateError."""
        if mode not in ("persist", "recompute"):
            raise RequestRejectedError("mode", expected="persist or recompute", got=repr(mode))

        def action() -> None:
            if self._loop.state is EngineState.SUSPENDED and self._suspended == mode:
                return
            self._require("suspend", EngineState.PAUSED)
            self._loop.core.suspend_kv(mode)
            self._suspended = mode
            self._loop.enter(EngineState.SUSPENDED)

        await self._control("suspend", action, timeout_s)

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.resume``."""

        def action() -> None:
            if self._loop.state is EngineState.PAUSED:
                return
            self._require("resume", EngineState.SUSPENDED)
            self._loop.core.resume_kv()
            self._suspended = None
            self._loop.enter(EngineState.PAUSED)

        await self._control("resume", action, timeout_s)

    async def set_weight_version(
        self, version: int, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """See ``Engine.set_weight_version``. A changed version says that the weights changed, so
        cached prefixes are forgotten unless the settings keep them."""
        _check_version(version)
        await self._control("set_weight_version", lambda: self._set_version(version), timeout_s)

    async def update_weights(
        self,
        apply: Callable[[torch.nn.Module], None],
        *,
        version: int,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """See ``Engine.update_weights``. Legal in RUNNING, PAUSED and SUSPENDED.

        ``apply`` runs on the engine thread without gradients and must write into the tensors that
        are there: CUDA graphs hold their addresses.
        """
        _check_version(version)

        def action() -> None:
            try:
                apply_or_restore(self._model, apply)
            except BaseException:
                self._loop.count_update(failed=True)
                raise
            self._loop.count_update(failed=False)
            self._set_version(version)

        await self._control("update_weights", action, timeout_s)

    def install_capture(self, *, preparer: Any, stager: Any) -> str:
        """Install Megatron's two request hooks; see ``dynamic.hooks.install_hooks``."""
        return install_hooks(self._loop.core, preparer=preparer, stager=stager)

    def cuda_graph_count(self) -> int:
        """CUDA graphs that are captured now."""
        return self._loop.core.cuda_graph_count()

    def coordinator_pid(self) -> int | None:
        """The coordinator's process id; None in direct mode."""
        loop = self._loop
        if isinstance(loop, CoordinatedLoop) and loop.coordinator is not None:
            return loop.coordinator.pid
        return None

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
        """See ``Engine.close``. Raises: DeadlineError if the thread is stuck in a step."""
        if self._loop.state not in (EngineState.CLOSED, EngineState.DEAD):

            def action() -> None:
                self._loop.enter(EngineState.CLOSED)

            # Somebody else closing it, or its death, meanwhile: it has ended either way.
            with contextlib.suppress(EngineStateError, EngineDeadError):
                await self._control("close", action, timeout_s)
        if not await asyncio.to_thread(self._loop.join, timeout_s):
            raise DeadlineError("the engine thread did not end", expected=f"within {timeout_s} s")
        self._loop.state = EngineState.CLOSED

    def _set_version(self, version: int) -> None:
        core = self._loop.core
        if version == core.version:
            return
        if core.version is not None and not self._settings.keep_prefixes_at_refit:
            core.clear_prefixes()
        core.set_version(version)

    async def _move(
        self, what: str, source: EngineState, target: EngineState, timeout_s: float
    ) -> None:
        def action() -> None:
            if self._loop.state is target:
                return
            self._require(what, source)
            self._loop.enter(target)

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
