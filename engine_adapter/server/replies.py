"""How every route answers: JSON, coded errors, a bounded body, a checked bearer token."""

from __future__ import annotations

import functools
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tokenplane.engine_adapter.server.openai_errors import (
    error_body,
    internal_error_body,
    status_of,
)
from tokenplane.engine_adapter.server.stream import ClientGoneError
from tokenplane.schemas.errors import RequestRejectedError, TokenplaneError

logger = logging.getLogger("tokenplane.server")

Handler = Callable[..., Awaitable[Response]]

CLIENT_GONE_STATUS = 499
"""Written to nobody; it shows in the access log."""


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``value`` as JSON, the same bytes for the same value."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def error_reply(error: TokenplaneError, status: int | None = None) -> Response:
    """The error object of ``error``; ``status`` overrides the usual one."""
    code = status_of(error) if status is None else status
    headers = {"www-authenticate": "Bearer"} if code == 401 else {}
    if code == 503:
        headers["retry-after"] = "1"
    return json_reply(error_body(error), code, headers)


def answering(
    handler: Handler, *, statuses: dict[type[TokenplaneError], int] | None = None
) -> Handler:
    """``handler`` with every error turned into a reply.

    Args:
        statuses: other statuses than usual, by class of error.
    """

    # The name and signature are what FastAPI reads the parameters from.
    @functools.wraps(handler)
    async def wrapped(*args: Any, **kwargs: Any) -> Response:
        try:
            return await handler(*args, **kwargs)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE_STATUS)
        except TokenplaneError as error:
            logger.info("refused: %s: %s", error.code, error)
            return error_reply(error, (statuses or {}).get(type(error)))
        except Exception:
            logger.exception("a route failed")
            return json_reply(internal_error_body(), 500)

    return wrapped


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body.

    Raises:
        RequestRejectedError: ``body_too_large``; not more than the bound was read, and nothing
            where the request says beforehand how long it is.
        ClientGoneError: the client went away before all of it had come.
    """
    parts: list[bytes] = []
    size, declared = 0, request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> RequestRejectedError:
    return RequestRejectedError(
        "the body is too large", code="body_too_large", expected=f"<= {max_bytes} bytes"
    )


def check_bearer(request: Request, token: str | None) -> None:
    """Compare the bearer token in constant time; nothing is asked for where ``token`` is None.

    Raises:
        RequestRejectedError: ``unauthorized``.
    """
    if token is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not right:
        raise RequestRejectedError("a bearer token is needed", code="unauthorized")
