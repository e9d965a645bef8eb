"""Test only: the CUDA calls of Megatron's dynamic inference, answered on the CPU.

Megatron's dynamic context and engine take pinned memory, CUDA events and streams, and allocate on
``torch.cuda.current_device()``. ``install`` gives torch stand-ins for those names, so that the
genuine engine, coordinator and client run where there is no GPU. It changes torch for the whole
process and nothing of Megatron but two things that the product or Megatron itself provide for: the
attention (``dynamic.attention``) and the KV append, whose torch path serves where Triton's is off.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from tokenplane.engine_adapter.dynamic.attention import install_torch_attention
from tokenplane.engine_adapter.models.megatron_process import quiet_imports

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


class CpuEvent:
    """A CUDA event that has always happened; its time is the host's."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.at_s = 0.0

    def record(self, *_args: Any) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, later: CpuEvent) -> float:
        return (later.at_s - self.at_s) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait(self, *_args: Any) -> None: ...


class CpuStream(contextlib.AbstractContextManager["CpuStream"]):
    """A CUDA stream on which everything is done when it is asked for."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __exit__(self, *_exc: object) -> None: ...

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        return event or CpuEvent()

    def synchronize(self) -> None: ...

    def wait_event(self, _event: CpuEvent) -> None: ...

    def wait_stream(self, _stream: CpuStream) -> None: ...


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put the stand-ins in place, unless there is a GPU. ``put`` may know how to undo it."""
    install_torch_attention()
    if torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    values: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "Event": CpuEvent,
        "Stream": CpuStream,
        "current_stream": lambda *_a, **_k: CpuStream(),
        "stream": lambda _stream: contextlib.nullcontext(),
        "synchronize": lambda *_a, **_k: None,
        "set_device": lambda *_a, **_k: None,
        "memory_stats": lambda *_a, **_k: collections.defaultdict(int),
    }
    for name, value in values.items():
        put(cuda, name, value)
    for name in ("cuda", "pin_memory"):
        put(torch.Tensor, name, lambda self, *_a, **_k: self)
    put(torch.Tensor, "record_stream", lambda _self, _stream: None)
    for name in _FACTORIES:
        put(torch, name, _without_pinning(getattr(torch, name)))
    with quiet_imports():
        from megatron.core.inference.contexts import dynamic_context
    put(dynamic_context, "triton_append_key_value_cache", None)


def _without_pinning(factory: Any) -> Any:
    @functools.wraps(factory)
    def build(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    return build
