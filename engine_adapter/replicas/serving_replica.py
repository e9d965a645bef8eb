"""The Ray Serve deployment: one actor per worker, and how its actors reach each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.replicas.control_calls import (
    ControlCall,
    ReplicaReply,
    ReplicaState,
)
from tokenplane.engine_adapter.replicas.fleet_app import FleetApp
from tokenplane.engine_adapter.replicas.replica_node import ReplicaNode
from tokenplane.engine_adapter.replicas.replica_settings import ReplicaSettings
from tokenplane.schemas.errors import ConfigError, DeadlineError, EngineDeadError

if TYPE_CHECKING:
    from tokenplane.engine_adapter.server.parts import ServerParts

APPLICATION = "tokenplane"
DEPLOYMENT = "worker"
type OpenParts = Callable[[str], AbstractAsyncContextManager[ServerParts]]
"""Opens the parts of the replica of that name (its engine bears a weight version already) and
closes them at the end. Must pickle: Ray carries it to the worker, which calls it there."""

_PEERS_S = 30.0
_PEER_POLL_S = 0.2


class ServeFleet:
    """Reaches the running replicas through Serve's own broadcast."""

    def __init__(self) -> None:
        self._handle: Any = serve.get_deployment_handle(DEPLOYMENT, APPLICATION)

    async def states(self, timeout_s: float) -> list[ReplicaState]:
        """See ``Fleet.states``."""
        return await self._everyone("describe", ReplicaState, timeout_s)

    async def ask(self, call: ControlCall, timeout_s: float) -> list[ReplicaReply]:
        """See ``Fleet.ask``."""
        return await self._everyone("answer", ReplicaReply, timeout_s, call)

    async def _everyone[T](
        self, method: str, kind: type[T], timeout_s: float, *args: Any
    ) -> list[T]:
        """One that died meanwhile gives an error of Ray's, one that a call is not for gives None:
        neither is a reply."""
        try:
            found = await self._handle.broadcast(method, *args).results_async(
                timeout_s=timeout_s, return_exceptions=True
            )
        except serve.exceptions.DeploymentUnavailableError:
            return []
        return [value for value in found if isinstance(value, kind)]


class ServingReplica:
    """One worker under Serve: opens its parts, joins the fleet, answers until told to stop."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        open_parts: OpenParts,
        settings: ReplicaSettings,
        control_token: str | None,
        api_key: str | None,
    ) -> None:
        # Only in the worker: the process that starts the fleet needs no model library.
        from tokenplane.engine_adapter.server.app import create_app

        context = serve.get_replica_context()
        self._stack = AsyncExitStack()
        parts = await self._stack.enter_async_context(open_parts(context.replica_tag))
        try:
            _check_sharing(parts)
            inner = create_app(parts, control_token=control_token, api_key=api_key)
            node = ray.get_runtime_context().get_node_id()
            self._node = ReplicaNode(context.replica_tag, parts, inner, node=node)
            fleet = ServeFleet()
            await self._node.join(await _peers(fleet))
        except BaseException:
            await self._stack.aclose()
            raise
        self._asgi = FleetApp(
            self._node, inner, fleet, settings.replicas, control_token=control_token
        )

    def __serve_build_asgi_app__(self) -> FleetApp:
        return self._asgi

    async def describe(self) -> ReplicaState:
        """See ``ReplicaNode.describe``."""
        return self._node.describe()

    async def answer(self, call: ControlCall) -> ReplicaReply | None:
        """See ``ReplicaNode.answer``."""
        return await self._node.answer(call)

    async def drain(self, timeout_s: float) -> int:
        """See ``ReplicaNode.drain``."""
        return await self._node.drain(timeout_s)

    async def check_health(self) -> None:
        """Serve starts another worker where this raises."""
        if self._node.parts.engine.state() is EngineState.DEAD:
            raise EngineDeadError("the engine of this replica is dead", key=self._node.name)

    async def __del__(self) -> None:
        if hasattr(self, "_stack"):
            await self._stack.aclose()


async def _peers(fleet: ServeFleet) -> list[ReplicaState]:
    """The replicas that run already; empty at the first start.

    Raises:
        DeadlineError: Serve says that some run and none answers.
    """
    ends = time.monotonic() + _PEERS_S
    while True:
        running = await asyncio.to_thread(_running_count)
        if not running:
            return []
        try:
            found = await fleet.states(max(0.1, ends - time.monotonic()))
        except TimeoutError:
            found = []
        if found:
            return found
        if time.monotonic() > ends:
            raise DeadlineError(
                "no running replica answered the new one", expected=f"within {_PEERS_S:g} s"
            )
        await asyncio.sleep(_PEER_POLL_S)


def _running_count() -> int:
    application = serve.status().applications.get(APPLICATION)
    deployment = None if application is None else application.deployments.get(DEPLOYMENT)
    states = {} if deployment is None else deployment.replica_states
    return int(states.get("RUNNING", 0))


def _check_sharing(parts: ServerParts) -> None:
    """Raises:
    ConfigError: the store is not visible where the other replicas may run.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    if parts.store.shared == "host" and len(alive) > 1:
        raise ConfigError(
            "a store of one host cannot be shared by a cluster of several",
            expected="redis: or tq:",
            got=parts.store.url,
        )
