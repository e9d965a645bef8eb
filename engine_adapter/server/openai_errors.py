"""From an error of ours to what an OpenAI client sees: a status, a type and a stable code."""

from __future__ import annotations

import re
from typing import Any

from tokenplane.schemas.errors import (
    ContextOverflowError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    EngineStateError,
    InvalidRecordError,
    LedgerError,
    PrefixError,
    RequestCancelledError,
    RequestRejectedError,
    SpliceError,
    StoreError,
    TokenIdRangeError,
    TokenplaneError,
)

_BY_CODE = {
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "server_busy": 503,
    "invalid_rollout_id": 400,
}
_BY_CLASS: tuple[tuple[type[TokenplaneError], int], ...] = (
    (RequestRejectedError, 400),
    (InvalidRecordError, 400),
    (TokenIdRangeError, 400),
    # 409: NeMo-Gym sends 404, 408, 429 and most 5xx again, and reads some 400s as an overflow
    # (CONTRACT section 13). A refused prefix must be neither.
    (PrefixError, 409),
    (SpliceError, 409),
    (LedgerError, 409),
    (DeadlineError, 504),
    (EngineDeadError, 503),
    (RequestCancelledError, 503),
    (EngineStateError, 503),
    (EngineError, 500),
)
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 409: "conflict_error"}
_OVERFLOW_WORDS = (
    (re.compile(r"max_(completion_)?tokens", re.IGNORECASE), "token limit"),
    (re.compile(r"context length", re.IGNORECASE), "sequence length"),
)
"""Words by which NeMo-Gym recognizes an overflow, and what stands for them in other errors."""
_MAX_MESSAGE = 600


def status_of(error: TokenplaneError) -> int:
    """The HTTP status: by code where one is special, else by class; 500 for what is left."""
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    for kind, status in _BY_CLASS:
        if isinstance(error, kind):
            return status
    if isinstance(error, StoreError) and error.retryable:
        return 503
    return 500


def error_body(error: TokenplaneError) -> dict[str, Any]:
    """The OpenAI error object. Only a context overflow says ``context length``.

    ``param`` names the request field where the error has one.
    """
    status = status_of(error)
    message = str(error)
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    param = error.key if status == 400 else None
    if not isinstance(error, ContextOverflowError):
        message = _without_overflow_words(message)
        param = None if param is None else _without_overflow_words(param)
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(status, "server_error" if status >= 500 else "request_error"),
            "param": param,
            "code": error.code,
        }
    }


def internal_error_body() -> dict[str, Any]:
    """The answer where something broke that has no code; the log has the rest."""
    return {
        "error": {
            "message": "internal error; the server's log has the details",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


def _without_overflow_words(text: str) -> str:
    for pattern, instead in _OVERFLOW_WORDS:
        text = pattern.sub(instead, text)
    return text
