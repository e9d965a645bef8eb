"""MegatronCpuEngine: the engine protocol over a megatron-core GPTModel on the CPU.

True continuous batching: each step is one forward over the tokens of all live requests (see
``cpu.attention`` for how). ``cpu.loop`` is the thread behind it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from tokenplane.engine_adapter.cpu.loop import EngineLoop
from tokenplane.engine_adapter.cpu.request import check_request
from tokenplane.engine_adapter.engine import (
    EngineInfo,
    GenerationRequest,
    GenerationResult,
    SuspendMode,
)
from tokenplane.engine_adapter.engine_control import ControlledEngine
from tokenplane.engine_adapter.sampling_stops import Detokenize
from tokenplane.schemas.errors import (
    ConfigError,
)


class MegatronCpuEngine(ControlledEngine[EngineLoop]):
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
        self._has_text = detokenize is not None
        loop = EngineLoop(
            model,
            info,
            detokenize,
            max_live_requests=max_live_requests,
            max_step_tokens=max_step_tokens,
            max_kv_tokens=max_kv_tokens,
            num_threads=num_threads,
        )
        super().__init__(model, info, loop)
        loop.start()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine.generate``."""
        checked = check_request(request, self._info, has_text=self._has_text)
        return await self._answer(lambda answer: self._loop.admit(checked, answer))

    def _set_version(self, version: int) -> None:
        if self._loop.version != version:
            self._loop.set_version(version)

    def _suspend_kv(self, mode: SuspendMode) -> None:
        if mode == "recompute":
            self._loop.evict_all()

    def _resume_kv(self) -> None:
        """Nothing was given away: dropped caches are computed anew."""


def _kv_bytes_per_token(model: Any) -> int:
    config = model.config
    groups = config.num_query_groups or config.num_attention_heads
    itemsize = torch.empty(0, dtype=config.params_dtype).element_size()
    return int(2 * config.num_layers * groups * config.kv_channels * itemsize)
