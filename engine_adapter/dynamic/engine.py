"""MegatronDynamicEngine: the engine protocol over Megatron's ``DynamicInferenceEngine``.

``dynamic.loop`` is the thread behind it (direct mode), ``dynamic.coordinator`` the same behind
Megatron's coordinator and client, ``dynamic.core`` what is ours inside Megatron's engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from tokenplane.engine_adapter.cpu.request import check_request
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
    GenerationRequest,
    GenerationResult,
    SuspendMode,
)
from tokenplane.engine_adapter.engine_control import ControlledEngine
from tokenplane.engine_adapter.sampling_stops import Detokenize
from tokenplane.schemas.errors import DeadlineError

EngineMode = Literal["direct", "coordinator"]


class MegatronDynamicEngine(ControlledEngine[DynamicLoop]):
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

        Raises: ConfigError; EngineStateError if this process has another one; DeadlineError if the
        start takes longer than its setting; what Megatron raises.
        """
        settings = settings or DynamicSettings()
        device = next(model.parameters()).device
        info = effective_info(info, settings, device)
        self._settings = settings
        self._has_text = detokenize is not None
        build = core_builder(model, info, settings, detokenize, megatron_extra or {})
        if mode == "coordinator":
            loop: DynamicLoop = CoordinatedLoop(build, device, settings, coordinator)
        else:
            loop = DynamicLoop(build, device)
        super().__init__(model, info, loop)
        sys.setswitchinterval(settings.switch_interval_s)
        loop.start(settings.start_timeout_s)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine.generate``."""
        checked = check_request(request, self._info, has_text=self._has_text)
        wire = to_wire(checked.request_id, effective(checked, self._info))
        prompt = checked.prompt_token_ids.tolist()
        return await self._answer(
            lambda answer: self._loop.admit(prompt, wire, checked.on_tokens, answer)
        )

    async def update_weights(
        self,
        apply: Callable[[torch.nn.Module], None],
        *,
        version: int,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """See ``Engine.update_weights``. Cached prefixes are of the old weights and are forgotten,
        unless the settings keep them and a new version tells them apart."""

        def apply_and_forget(model: torch.nn.Module) -> None:
            apply(model)
            known = self._loop.core.version
            told_apart = known is not None and known != version
            if not (self._settings.keep_prefixes_at_refit and told_apart):
                self._loop.core.clear_prefixes()

        await super().update_weights(apply_and_forget, version=version, timeout_s=timeout_s)

    async def close(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """See ``Engine.close``. One whose thread is stuck ends later, when it has its turn; its
        coordinator ends now."""
        try:
            await super().close(timeout_s=timeout_s)
        except DeadlineError:
            self._loop.give_up()
            raise

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

    def _set_version(self, version: int) -> None:
        """A changed version says that the weights changed: cached prefixes are forgotten unless the
        settings keep them."""
        core = self._loop.core
        if version == core.version:
            return
        if core.version is not None and not self._settings.keep_prefixes_at_refit:
            core.clear_prefixes()
        core.set_version(version)

    def _suspend_kv(self, mode: SuspendMode) -> None:
        """ "recompute" frees the device memory of the KV cache and of the CUDA graphs."""
        self._loop.core.suspend_kv(mode)

    def _resume_kv(self) -> None:
        self._loop.core.resume_kv()
