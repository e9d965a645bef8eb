"""The OpenAI-compatible HTTP server over one call path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenplane.capture.ledger import ROLLOUT_ID
from tokenplane.engine_adapter.call_path.call_path import OnTokens
from tokenplane.engine_adapter.call_path.call_types import CallOutcome, ModelCall
from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.server.control import ControlRoutes
from tokenplane.engine_adapter.server.openai_requests import ParsedRequest, RequestParser
from tokenplane.engine_adapter.server.parts import ServerParts
from tokenplane.engine_adapter.server.replies import (
    answering,
    check_bearer,
    error_reply,
    json_reply,
    read_body,
)
from tokenplane.engine_adapter.server.stream import (
    EventStreamResponse,
    StreamedCall,
    until_disconnect,
)
from tokenplane.schemas.errors import RequestCancelledError, RequestRejectedError, TokenplaneError

CAPTURE_HEADER = "x-tokenplane-capture"
CALL_HEADER = "x-tokenplane-call"

_Parse = Callable[[bytes, Mapping[str, str], str | None], ParsedRequest]


def create_app(
    parts: ServerParts, *, control_token: str | None = None, api_key: str | None = None
) -> FastAPI:
    """The application. It closes nothing: whoever made ``parts`` does.

    Args:
        control_token: bearer token of the control routes; None leaves them open, which is for
            loopback binds only (see ``server.config.check_bind``).
        api_key: bearer token of model calls; None asks for none.
    """
    app = FastAPI(title="tokenplane", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.parts = parts
    app.add_exception_handler(HTTPException, _plain_http_error)
    ModelRoutes(parts, api_key).mount(app)
    ControlRoutes(parts, control_token).mount(app)
    return app


class ModelRoutes:
    """``/v1`` and ``/rollouts/{rollout_id}/v1``, health and metrics."""

    def __init__(self, parts: ServerParts, api_key: str | None) -> None:
        self._parts = parts
        self._api_key = api_key
        self._parser = RequestParser(parts.model_names, parts.defaults)
        self._in_flight = 0

    def mount(self, app: FastAPI) -> None:
        """Add the routes to ``app``."""
        for base in ("/v1", "/rollouts/{rollout_id}/v1"):
            routes = (
                ("POST", "chat/completions", self.chat),
                ("POST", "completions", self.completion),
                ("GET", "models", self.models),
            )
            for method, name, handler in routes:
                app.add_api_route(
                    f"{base}/{name}", answering(handler), methods=[method], response_model=None
                )
        app.add_api_route("/health", answering(self.health), response_model=None)
        app.add_api_route("/metrics", answering(self.metrics), response_model=None)

    async def chat(self, request: Request) -> Response:
        """Chat completions, whole or streamed."""
        return await self._serve(request, self._parser.chat)

    async def completion(self, request: Request) -> Response:
        """Bare completions, whole or streamed."""
        return await self._serve(request, self._parser.completion)

    async def models(self, request: Request) -> Response:
        """The names under which the model is served."""
        check_bearer(request, self._api_key)
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "tokenplane"}
            for name in self._parts.model_names
        ]
        return json_reply({"object": "list", "data": listed})

    async def health(self, _request: Request) -> Response:
        """200 while model calls are accepted, 503 otherwise."""
        engine = self._parts.engine
        state = engine.state()
        well = state not in (EngineState.DEAD, EngineState.CLOSED) and not self._parts.path.stopping
        report = {
            "status": "ok" if well else "unavailable",
            "engine": state.value,
            "model": engine.info.model_id,
            "weight_version": engine.weight_version(),
        }
        return json_reply(report, 200 if well else 503)

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text format."""
        text = await self._parts.path.in_pool(self._parts.metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _serve(self, request: Request, parse: _Parse) -> Response:
        check_bearer(request, self._api_key)
        raw = await read_body(request, self._parts.config.max_body_bytes)
        try:
            parsed = parse(raw, request.headers, request.path_params.get("rollout_id"))
            self._check_room()
        except TokenplaneError as error:
            self._parts.metrics.count_call(error.code)
            raise
        if parsed.stream:
            return await self._start_stream(request, parsed)
        try:
            outcome = await until_disconnect(request.receive, self._call(parsed.call))
        except (asyncio.CancelledError, RequestCancelledError):
            if not self._parts.path.stopping:
                raise
            # The drain is over. A coded answer tells the client more than a cut connection.
            raise RequestCancelledError(
                "the server stopped before the answer was complete", code="server_stopped"
            ) from None
        return json_reply(outcome.body, headers=_status_headers(outcome))

    async def _start_stream(self, request: Request, parsed: ParsedRequest) -> Response:
        call, answers = parsed.call, self._parts.answers
        buffered = call.parse_tools or call.log_probs or answers.split_thoughts
        stream = StreamedCall(
            self._call,
            parsed,
            answers.text,
            buffered=buffered,
            heartbeat_s=self._parts.config.heartbeat_s,
        )
        await until_disconnect(request.receive, stream.start())
        capture = "off" if call.capture is None else "pending"
        return EventStreamResponse(stream, {CAPTURE_HEADER: capture})

    async def _call(self, call: ModelCall, *, on_tokens: OnTokens | None = None) -> CallOutcome:
        self._in_flight += 1
        try:
            return await self._parts.path.serve(call, on_tokens=on_tokens)
        finally:
            self._in_flight -= 1

    def _check_room(self) -> None:
        limit = self._parts.config.max_in_flight
        if self._in_flight >= limit or self._parts.path.stopping:
            raise RequestRejectedError(
                "too many calls at once, or the server is stopping",
                code="server_busy",
                expected=f"<= {limit}",
            )


def _status_headers(outcome: CallOutcome) -> dict[str, str]:
    headers: dict[str, str] = {CAPTURE_HEADER: outcome.status}
    ident = outcome.model_call_id
    # Gym names its calls as it likes, and a header takes no line feed and no letter beyond ASCII;
    # its coordinates hold the name anyway.
    if ident is not None and ROLLOUT_ID.fullmatch(ident):
        headers[CALL_HEADER] = ident
    return headers


async def _plain_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the shape of every other error."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    code, message = {
        404: ("not_found", "there is no such route"),
        405: ("method_not_allowed", "the route does not take this method"),
    }.get(status, ("http_error", f"HTTP {status}"))
    asked = f"{request.method} {request.url.path}"[:120]
    return error_reply(RequestRejectedError(message, code=code, got=asked), status)
