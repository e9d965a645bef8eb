"""Our server on a real port behind the proxy, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from tests.interop.gym_proxy import EngineProxy
from tests.server.serving import Served, serving
from tokenplane.capture.collect.collector import Collector
from tokenplane.capture.collect.training_rows import RolloutOutcome
from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.server.app import create_app
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.schemas.training_row import TrainingRow
from tokenplane.staging.store import StagingStore
from tokenplane.staging.token_source import TokenSource


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are pytest's


@asynccontextmanager
async def listening(engine: Engine, proxy: EngineProxy, **options: Any) -> AsyncIterator[Served]:
    """``serving(engine, **options)``, also reachable through ``proxy``."""
    async with serving(engine, **options) as served:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            create_app(served.parts), lifespan="off", log_config=None, ws="none", access_log=False
        )
        server = _Server(config)
        running = asyncio.ensure_future(server.serve([listener]))
        proxy.route(listener.getsockname()[1])
        try:
            yield served
        finally:
            proxy.route(None)
            server.should_exit = True
            await running
            listener.close()


def collect(
    store: StagingStore, manifest: RolloutManifest, *, response_id: str | None = None, **how: Any
) -> TrainingRow:
    """The one training row of a rollout, or the test fails with the placeholder's reason."""
    outcome = RolloutOutcome(manifest.rollout_id, reward=1.0, response_id=response_id)
    (row,) = Collector(TokenSource(store), manifest, **how).finalize(outcome)
    assert row.sample_mask == 1, row.reason
    return row


TOKEN_WORDS = ("token_ids", "log_probs", "logprobs", "epoch", "routed", "moe_topk", "ng_c")


def find_token_fields(value: Any, where: str = "") -> list[str]:
    """Places in a served body that hold tokens: telling keys with a value, or lists of numbers."""
    found: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            if item not in (None, [], {}) and any(word in key for word in TOKEN_WORDS):
                found.append(f"{where}.{key}")
            found += find_token_fields(item, f"{where}.{key}")
    elif isinstance(value, list):
        numbers = [item for item in value if isinstance(item, int | float)]
        if numbers and len(numbers) == len(value):
            found.append(where)
        for at, item in enumerate(value):
            found += find_token_fields(item, f"{where}[{at}]")
    return found
