"""The control routes: manifests, rows, failures, versions, pausing; each with a deadline."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tokenplane.capture.ledger import check_rollout_id
from tokenplane.engine_adapter.engine import EngineState, SuspendMode
from tokenplane.engine_adapter.server.openai_fields import (
    read_int,
    read_number,
    read_text,
    rejected,
)
from tokenplane.engine_adapter.server.parts import ServerParts, read_status
from tokenplane.engine_adapter.server.replies import (
    Handler,
    answering,
    check_bearer,
    json_reply,
    read_body,
)
from tokenplane.engine_adapter.server.rows import read_failures, read_manifest, read_rows
from tokenplane.schemas.errors import DeadlineError, EngineStateError, RequestRejectedError

_MAX_BODY = 64 * 1024


class ControlRoutes:
    """Handlers over one server's parts.

    Args:
        token: what a request must bring; None where the server is bound to loopback only.
    """

    def __init__(self, parts: ServerParts, token: str | None) -> None:
        self._parts = parts
        self._token = token
        self._timeout_s = parts.config.control_timeout_s

    def mount(self, app: FastAPI) -> None:
        """Add the routes to ``app``."""
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/rollouts/{rollout_id}/manifest", self.manifest),
            ("GET", "/rollouts/{rollout_id}/rows", self.rows),
            ("GET", "/rollouts/{rollout_id}/failures", self.failures),
            ("GET", "/admin/status", self.status),
            ("GET", "/admin/weight_version", self.weight_version),
            ("POST", "/admin/weight_version", self.set_weight_version),
            ("POST", "/admin/pause", self.pause),
            ("POST", "/admin/resume", self.resume),
        ]
        if self._parts.config.allow_weight_edit:
            routes.append(("POST", "/admin/perturb_weights", self.perturb_weights))
        for method, path, handler in routes:
            # Here a wrong state is the caller's conflict; for a model call it is an outage.
            checked = answering(self._checked(handler), statuses={EngineStateError: 409})
            app.add_api_route(path, checked, methods=[method], response_model=None)

    def _checked(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            check_bearer(request, self._token)
            return await handler(request)

        return checked

    async def manifest(self, request: Request) -> Response:
        """The ``RolloutManifest``; empty lists for an unknown rollout."""
        parts, rollout_id = self._parts, request.path_params["rollout_id"]
        return json_reply(await self._read(lambda: read_manifest(parts, rollout_id).model_dump()))

    async def rows(self, request: Request) -> Response:
        """Staged rows in write order; token columns with ``?tokens=1`` only."""
        rollout_id, parts = request.path_params["rollout_id"], self._parts
        check_rollout_id(rollout_id)
        asked = request.query_params.get("tokens", "0")
        if asked not in ("0", "1"):
            raise rejected("tokens", "is unknown", expected="0 or 1", got=asked)
        tokens = asked == "1"
        rows = await self._read(
            lambda: read_rows(parts.store, parts.path, rollout_id, tokens=tokens)
        )
        return json_reply({"rollout_id": rollout_id, "rows": rows})

    async def failures(self, request: Request) -> Response:
        """Calls of the rollout that have no row, with code and message."""
        parts, rollout_id = self._parts, request.path_params["rollout_id"]
        rows = await self._read(lambda: read_failures(parts, rollout_id))
        listed = [dataclasses.asdict(row) for row in rows]
        return json_reply({"rollout_id": rollout_id, "failures": listed})

    async def status(self, _request: Request) -> Response:
        """State, counters and sizes of engine, cache and store."""
        return json_reply(await self._read(lambda: read_status(self._parts)))

    async def weight_version(self, _request: Request) -> Response:
        """The version that the engine's weights bear."""
        return self._version()

    async def set_weight_version(self, request: Request) -> Response:
        """Name the present weights: ``{"version": n}``; live requests get an epoch boundary."""
        version = _version_of(await _body(request, "version"))
        engine = self._parts.engine
        await self._act(engine.set_weight_version(version, timeout_s=self._timeout_s))
        return self._version()

    async def pause(self, request: Request) -> Response:
        """No step from now on; with ``{"suspend": "persist" | "recompute"}`` suspended as well."""
        mode = _suspend_mode(await _body(request, "suspend"))
        engine = self._parts.engine
        await self._act(engine.pause(timeout_s=self._timeout_s))
        if mode is not None:
            await self._act(engine.suspend(mode, timeout_s=self._timeout_s))
        return self._state()

    async def resume(self, request: Request) -> Response:
        """Steps run again, from paused or suspended."""
        await _body(request)
        engine = self._parts.engine
        if engine.state() is EngineState.SUSPENDED:
            await self._act(engine.resume(timeout_s=self._timeout_s))
        await self._act(engine.unpause(timeout_s=self._timeout_s))
        return self._state()

    async def perturb_weights(self, request: Request) -> Response:
        """Multiply every weight: ``{"scale": 1.0001, "version": n}``. For demonstrations."""
        body = await _body(request, "scale", "version")
        scale, version = read_number(body, "scale"), _version_of(body)
        if scale is None or not 0 < scale < 1e6:
            raise rejected("scale", "is out of range", expected="a number above 0", got=scale)

        def apply(model: Any) -> None:
            for parameter in model.parameters():
                parameter.mul_(scale)

        engine = self._parts.engine
        await self._act(engine.update_weights(apply, version=version, timeout_s=self._timeout_s))
        return self._version()

    def _version(self) -> Response:
        return json_reply({"version": self._parts.engine.weight_version()})

    def _state(self) -> Response:
        return json_reply({"state": self._parts.engine.state().value})

    async def _read[T](self, work: Callable[[], T]) -> T:
        """Blocking work in the pool, within the deadline."""
        return await self._act(self._parts.path.in_pool(work))

    async def _act[T](self, action: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await action
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                "the control call did not finish in time", expected=f"within {self._timeout_s:g} s"
            ) from error


async def _body(request: Request, *fields: str) -> Mapping[str, Any]:
    """The JSON object of a control call; no body is an empty one. A field that is not among
    ``fields`` is refused: a misspelled one would change nothing, and nobody would know."""
    raw = await read_body(request, _MAX_BODY)
    if not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise RequestRejectedError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestRejectedError("the body must be a JSON object", code="invalid_json")
    for name in body:
        if name not in fields:
            expected = " and ".join(fields) or "no field"
            raise rejected("body", "has an unknown field", expected=expected, got=name)
    return body


def _version_of(body: Mapping[str, Any]) -> int:
    version = read_int(body, "version")
    if version is None or not 0 <= version < 2**63:
        raise rejected("version", "is malformed", expected="an integer >= 0", got=version)
    return version


def _suspend_mode(body: Mapping[str, Any]) -> SuspendMode | None:
    mode = read_text(body, "suspend")
    if mode == "persist":
        return "persist"
    if mode == "recompute":
        return "recompute"
    if mode is not None:
        raise rejected("suspend", "is unknown", expected="persist or recompute", got=mode)
    return None
