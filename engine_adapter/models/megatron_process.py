"""What megatron-core needs of a process before it builds a model on the CPU, once per process."""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

_lock = threading.Lock()


def require_process() -> None:
    """Make this process a Megatron world of one rank on the CPU; idempotent and thread-safe.

    - ``torch.distributed`` with gloo over an in-memory store (no port, no file), unless the process
      group exists already;
    - Megatron's parallel state of size one, unless initialized;
    - Megatron's own inference RNG tracker, whose ``fork`` needs no CUDA generator.
    """
    with _lock, quiet_imports():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        if not torch.cuda.is_available():
            initialize_rng_tracker(inference_rng_tracker=True)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Megatron or build its modules in this block without their remarks.

    Their warnings say that TransformerEngine, Apex and CUDA are absent, which is how it is meant to
    be on the CPU. Errors pass, raised or logged.
    """
    for name in ("megatron", "transformers", "accelerate", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def engine_version() -> str:
    """Such as ``megatron-core 0.19.2 cpu``."""
    return f"megatron-core {importlib.metadata.version('megatron-core')} cpu"
