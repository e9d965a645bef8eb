"""Engines, chat rendering, the OpenAI server and refit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenplane.engine_adapter.worker.generation import (
        MegatronGenerationWorker as MegatronGenerationWorker,
    )

__all__ = ["MegatronGenerationWorker"]


def __getattr__(name: str) -> Any:
    # Only when asked for: the worker imports torch and megatron-core, which take seconds.
    if name == "MegatronGenerationWorker":
        from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker

        return MegatronGenerationWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
