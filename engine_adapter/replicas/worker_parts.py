"""A ``MegatronGenerationWorker`` as one of several replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.server.parts import ServerParts
from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
from tokenplane.engine_adapter.worker.generation_engine import http_sampling_defaults
from tokenplane.engine_adapter.worker.server import build_worker_parts
from tokenplane.schemas.errors import ConfigError
from tokenplane.staging.store import StagingStore


@dataclass(frozen=True, slots=True)
class ReplicaWorker:
    """A worker, not yet prepared, with its weight version set, and what its server needs beside it.

    The worker must not serve HTTP by itself: the fleet's one base URL does.
    """

    worker: MegatronGenerationWorker
    loaded: LoadedModel
    store: StagingStore


@asynccontextmanager
async def open_worker_parts(
    make_worker: Callable[[str], ReplicaWorker], name: str
) -> AsyncIterator[ServerParts]:
    """``functools.partial(open_worker_parts, make_worker)`` is an ``OpenParts``.

    Args:
        make_worker: called in the worker's own process, with the replica's name; what it made is
            closed here.

    Raises:
        ConfigError: the worker serves HTTP by itself. What preparing the worker raises.
    """
    made = make_worker(name)
    worker = made.worker
    try:
        if worker.config.megatron.expose_http_server:
            raise ConfigError("a replica has no HTTP server of its own", key="expose_http_server")
        await asyncio.to_thread(worker.prepare_for_generation)
        engine = worker.engine
        if engine is None:
            raise ConfigError("the worker has no engine after it was prepared", key=name)
        defaults = http_sampling_defaults(worker.config)
        parts = build_worker_parts(engine, made.loaded, made.store, defaults)
        try:
            yield parts
        finally:
            await asyncio.to_thread(worker.shutdown)
            parts.path.close()
    finally:
        await asyncio.to_thread(worker.shutdown)
        made.store.close()
