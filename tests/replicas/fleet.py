"""Several replicas in this process, over one store: everything of a fleet but Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.server.serving import Served, serving
from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.replicas.control_calls import (
    ControlCall,
    ReplicaReply,
    ReplicaState,
)
from tokenplane.engine_adapter.replicas.fleet_app import FleetApp
from tokenplane.engine_adapter.replicas.replica_node import ReplicaNode
from tokenplane.staging.open_store import open_store


@dataclass
class LocalFleet:
    """Reaches the nodes that are not ``gone``; waits for nothing."""

    nodes: list[ReplicaNode] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    hangs: bool = False

    def present(self) -> list[ReplicaNode]:
        return [node for node in self.nodes if node.name not in self.gone]

    async def states(self, _timeout_s: float) -> list[ReplicaState]:
        return [node.describe() for node in self.present()]

    async def ask(self, call: ControlCall, _timeout_s: float) -> list[ReplicaReply]:
        if self.hangs:
            raise TimeoutError
        replies = [await node.answer(call) for node in self.present()]
        return [reply for reply in replies if reply is not None]


@dataclass(frozen=True)
class Replica:
    """One of them, by its own address."""

    served: Served
    node: ReplicaNode
    client: httpx.AsyncClient

    async def chat(
        self, messages: Sequence[dict[str, Any]], *, rollout: str | None = "r1", **body: Any
    ) -> httpx.Response:
        """One chat completion of this very replica; headers through ``headers=``."""
        headers = body.pop("headers", {})
        base = "" if rollout is None else f"/rollouts/{rollout}"
        return await self.client.post(
            f"{base}/v1/chat/completions", json={"messages": messages, **body}, headers=headers
        )


@asynccontextmanager
async def replicas(
    engines: Sequence[Engine],
    store_url: str,
    *,
    fleet: LocalFleet | None = None,
    control_token: str | None = None,
    roll_call_s: float = 0.5,
    **config: Any,
) -> AsyncIterator[list[Replica]]:
    """A replica per engine, ``a``, ``b``, ...; each with a store object of its own."""
    shared = LocalFleet() if fleet is None else fleet
    async with AsyncExitStack() as stack:
        found = []
        for name, engine in zip("abcdefgh", engines, strict=False):
            store = stack.enter_context(open_store(store_url))
            served = await stack.enter_async_context(
                serving(engine, store=store, control_token=control_token, **config)
            )
            node = ReplicaNode(name, served.parts, served.app)
            shared.nodes.append(node)
            app = FleetApp(
                node,
                served.app,
                shared,
                len(engines),
                control_token=control_token,
                roll_call_s=roll_call_s,
            )
            transport = httpx.ASGITransport(app)
            client = httpx.AsyncClient(transport=transport, base_url="http://fleet")
            found.append(Replica(served, node, await stack.enter_async_context(client)))
        yield found
