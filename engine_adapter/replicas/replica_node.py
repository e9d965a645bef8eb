"""One replica's side: its own application, what it answers to control calls, its drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.replicas.control_calls import (
    ControlCall,
    ReplicaReply,
    ReplicaState,
    refused,
)
from tokenplane.schemas.errors import ConfigError, EngineStateError

if TYPE_CHECKING:
    from tokenplane.engine_adapter.server.parts import ServerParts

NAMING_ROUTES = ("/admin/weight_version", "/admin/perturb_weights")


class ReplicaNode:
    """A replica's engine and application. Belongs to one event loop.

    Args:
        app: the application over ``parts``, the same as that of a server by itself.
        node: where it runs, for reports.
    """

    def __init__(self, name: str, parts: ServerParts, app: ASGIApp, *, node: str = "") -> None:
        if parts.store.shared == "private":
            raise ConfigError(
                "replicas need a store that they share", expected="file:, redis: or tq:"
            )
        self.name = name
        self.parts = parts
        self.behind = False
        self._node = node
        self._app = app
        self._changes = asyncio.Lock()
        self._last_change_ns = 0
        self._running: set[asyncio.Future[None]] = set()

    def describe(self) -> ReplicaState:
        """This replica as it is now."""
        engine = self.parts.engine
        return ReplicaState(
            self.name,
            os.getpid(),
            self._node,
            engine.state().value,
            engine.weight_version(),
            self.behind,
        )

    async def join(self, others: Sequence[ReplicaState]) -> None:
        """Take the fleet's state over before the first call.

        Where the others stand down, so does this one. Where none of them has this one's weight
        version, its weights are old: it is ``behind``, and takes no model call.
        """
        versions = {other.weight_version for other in others}
        self.behind = bool(versions) and self.parts.engine.weight_version() not in versions
        states = {other.engine for other in others}
        running = EngineState.RUNNING.value in states
        if states and not running:
            engine, limit = self.parts.engine, self.parts.config.control_timeout_s
            await engine.pause(timeout_s=limit)
            if EngineState.SUSPENDED.value in states:
                await engine.suspend("persist", timeout_s=limit)

    async def answer(self, call: ControlCall) -> ReplicaReply | None:
        """Do a control call here; None if it is for another replica."""
        if call.only is not None and call.only != self.name:
            return None
        if call.method == "GET":
            return await self._ask_app(call)
        async with self._changes:
            if call.issued_at_ns < self._last_change_ns:
                error = EngineStateError(
                    "a later change came first", code="control_superseded", key=call.path
                )
                return refused(self.name, error, 409)
            if self.behind and call.path == "/admin/perturb_weights":
                error = EngineStateError(
                    "these are other weights than the other replicas'", code="weights_behind"
                )
                return refused(self.name, error, 409)
            reply = await self._ask_app(call)
            # A refused call (a bad token, a bad body) changed nothing and is no change.
            if reply.status == 200:
                self._last_change_ns = call.issued_at_ns
                if call.path in NAMING_ROUTES:
                    self.behind = False
            return reply

    async def run_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request for the application, in a task of its own that ``drain`` can end."""
        task = asyncio.ensure_future(_run(self._app, scope, receive, send))
        self._running.add(task)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
            raise
        finally:
            self._running.discard(task)

    async def drain(self, timeout_s: float) -> int:
        """No new call; wait for the running ones, then end them (they get ``server_stopped``).

        Returns how many were ended.
        """
        self.parts.path.stopping = True
        late: set[asyncio.Future[None]] = set(self._running)
        if late and timeout_s > 0:
            _, late = await asyncio.wait(late, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        return len(late)

    async def _ask_app(self, call: ControlCall) -> ReplicaReply:
        headers = {} if call.authorization is None else {"authorization": call.authorization}
        url = f"http://replica{call.path}" + (f"?{call.query}" if call.query else "")
        transport = httpx.ASGITransport(self._app)
        # The routes have a deadline of their own.
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            reply = await client.request(call.method, url, headers=headers, content=call.body)
        return ReplicaReply(self.name, reply.status_code, reply.content)


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)
