"""The application of a replica under one base URL: model calls here, control calls everywhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenplane.engine_adapter.replicas.control_calls import (
    ControlCall,
    ReplicaReply,
    ReplicaState,
    merge_replies,
    only_reply,
)
from tokenplane.engine_adapter.replicas.metrics_text import merge_metrics
from tokenplane.engine_adapter.replicas.replica_node import ReplicaNode
from tokenplane.engine_adapter.server.replies import (
    answering,
    check_bearer,
    error_reply,
    json_reply,
    read_body,
)
from tokenplane.schemas.errors import DeadlineError, EngineStateError

REPLICA_HEADER = "x-tokenplane-replica"
CONTROL_PREFIX = "/admin/"
_MAX_CONTROL_BODY = 64 * 1024
_ROLL_CALL_POLL_S = 0.2
_CONTROL_CALLS = 3
"""Most engine calls in one control call, each with the control deadline."""
_LOOK_S = 10.0
"""For health and metrics, which must not wait long for a replica that hangs."""


class Fleet(Protocol):
    """Reaches every running replica, this one included."""

    async def states(self, timeout_s: float) -> list[ReplicaState]:
        """Those that answer. Raises: TimeoutError."""

    async def ask(self, call: ControlCall, timeout_s: float) -> list[ReplicaReply]:
        """The replies of those that answer. Raises: TimeoutError."""


class FleetApp:
    """An ASGI application over one replica and the fleet it belongs to.

    Args:
        inner: the replica's application by itself.
        expected: replicas of the whole fleet.
        roll_call_s: how long a change waits for all replicas to be there.
    """

    def __init__(
        self,
        node: ReplicaNode,
        inner: ASGIApp,
        fleet: Fleet,
        expected: int,
        *,
        control_token: str | None = None,
        roll_call_s: float = 10.0,
    ) -> None:
        self._node = node
        self._inner = inner
        self._fleet = fleet
        self._expected = expected
        self._token = control_token
        self._roll_call_s = roll_call_s
        self._limit_s = _CONTROL_CALLS * node.parts.config.control_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every answer names its replica in ``x-tokenplane-replica``."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        name = self._node.name.encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (REPLICA_HEADER.encode(), name)]
                message = {**message, "headers": headers}
            await send(message)

        path = scope["path"]
        if path.startswith(CONTROL_PREFIX):
            await self._reply(self._control, scope, receive, send_named)
        elif path == "/metrics":
            await self._reply(self._metrics, scope, receive, send_named)
        elif path == "/health":
            await self._reply(self._health, scope, receive, send_named)
        elif self._node.behind and scope["method"] == "POST":
            await error_reply(_behind())(scope, receive, send_named)
        else:
            await self._node.run_call(scope, receive, send_named)

    async def _reply(self, handler: Any, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response: Response = await answering(handler)(request)
        await response(scope, receive, send)

    async def _control(self, request: Request) -> Response:
        check_bearer(request, self._token)
        body = await read_body(request, _MAX_CONTROL_BODY)
        query = parse_qsl(request.url.query, keep_blank_values=True)
        only = dict(query).get("replica")
        rest = urlencode([(key, value) for key, value in query if key != "replica"])
        if request.method != "GET" and only is None:
            await self._roll_call()
        call = self._call(request, body, rest, only)
        try:
            replies = await self._fleet.ask(call, self._limit_s)
        except TimeoutError as error:
            raise DeadlineError(
                "not every replica answered; ask /admin/status what each one did",
                expected=f"within {self._limit_s:g} s",
            ) from error
        if only is not None:
            status, content = only_reply(call, replies)
            return Response(content, status, media_type="application/json")
        status, merged = merge_replies(call.method, replies, self._expected)
        return json_reply(merged, status)

    async def _roll_call(self) -> None:
        """A change starts only if every replica is there.

        Raises:
            EngineStateError: ``replicas_incomplete``; nothing was changed.
        """
        ends = time.monotonic() + self._roll_call_s
        while True:
            left = max(0.1, ends - time.monotonic())
            try:
                present = len(await self._fleet.states(left))
            except TimeoutError:
                present = 0
            if present == self._expected:
                return
            if time.monotonic() > ends:
                raise EngineStateError(
                    "not every replica is there; nothing was changed",
                    code="replicas_incomplete",
                    expected=f"{self._expected} replicas",
                    got=present,
                )
            await asyncio.sleep(_ROLL_CALL_POLL_S)

    async def _metrics(self, request: Request) -> Response:
        replies = await self._all(request)
        texts = {reply.replica: reply.body.decode() for reply in replies if reply.status == 200}
        text = merge_metrics(texts)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _health(self, request: Request) -> Response:
        """200 while a replica takes calls; ``degraded`` where not every one does."""
        try:
            found = await self._fleet.states(_LOOK_S)
        except TimeoutError:
            found = [self._node.describe()]
        states = {state.replica: state for state in found}
        replies = await self._all(request)
        listed: dict[str, Any] = {}
        well = 0
        for reply in replies:
            state = states.get(reply.replica)
            behind = state is not None and state.behind
            well += reply.status == 200 and not behind
            listed[reply.replica] = orjson.loads(reply.body) | {
                "behind": behind,
                "pid": None if state is None else state.pid,
            }
        status = "ok" if well == self._expected else "degraded" if well else "unavailable"
        report = {"status": status, "replicas_expected": self._expected, "replicas": listed}
        return json_reply(report, 200 if well else 503)

    async def _all(self, request: Request) -> Sequence[ReplicaReply]:
        call = self._call(request, b"", "", None)
        try:
            return await self._fleet.ask(call, _LOOK_S)
        except TimeoutError:
            # One that hangs must not hide the others for ever; this one at least can speak.
            reply = await self._node.answer(call)
            return [] if reply is None else [reply]

    def _call(self, request: Request, body: bytes, query: str, only: str | None) -> ControlCall:
        return ControlCall(
            method=request.method,
            path=request.url.path,
            query=query,
            authorization=request.headers.get("authorization"),
            body=body,
            issued_at_ns=time.time_ns(),
            only=only,
        )


def _behind() -> EngineStateError:
    return EngineStateError(
        "this replica was started again with older weights than the others have; "
        "it waits for its weights to be named",
        code="weights_behind",
    )
