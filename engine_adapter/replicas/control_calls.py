"""A control call to every replica, and the one reply that is made of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tokenplane.engine_adapter.server.openai_errors import error_body, status_of
from tokenplane.schemas.errors import EngineStateError, RequestRejectedError, TokenplaneError


@dataclass(frozen=True, slots=True)
class ControlCall:
    """One HTTP request for the control routes, as it came. Pickles."""

    method: str
    path: str
    query: str
    """Without the question mark."""
    authorization: str | None
    body: bytes
    issued_at_ns: int
    """Unix nanoseconds at which it was sent out; a replica refuses a change that is older than its
    last one, so that two changes end the same way on every replica."""
    only: str | None = None
    """Name of the one replica that it is for; None means every one."""


@dataclass(frozen=True, slots=True)
class ReplicaReply:
    """What one replica answered. Pickles."""

    replica: str
    status: int
    body: bytes
    """JSON, or Prometheus' text of ``/metrics``."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica as it is now. Pickles."""

    replica: str
    pid: int
    node: str
    engine: str
    """``EngineState`` by name."""
    weight_version: int | None
    behind: bool
    """It was started again after the others' weights had changed, and takes no model call until
    somebody has named its weights."""


def merge_replies(
    method: str, replies: Sequence[ReplicaReply], expected: int
) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of the merged reply.

    Success: the fields on which all replicas agree (null where they differ), and under ``replicas``
    each one's own. Anything else is an error that tells each replica's status and body. A read is
    content with the replicas that are there; a change is not.
    """
    told = {reply.replica: _parsed(reply) for reply in replies}
    failed = {reply.status for reply in replies if reply.status != 200}
    complete = len(replies) == expected or (method == "GET" and bool(replies))
    if complete and not failed:
        shared = {"replicas_expected": expected, "replicas": told}
        return 200, _agreed(list(told.values())) | shared
    error: TokenplaneError
    if not complete:
        error = EngineStateError(
            "not every replica answered; the others have done it",
            code="replicas_incomplete",
            expected=f"{expected} replicas",
            got=len(replies),
        )
        status = 503
    elif len(failed) == 1 and len(told) == sum(reply.status != 200 for reply in replies):
        # All refuse alike: their own words say most.
        return failed.pop(), next(iter(told.values())) | {"replicas": told}
    else:
        error = EngineStateError(
            "not every replica did it", code="replicas_differ", got=sorted(failed)
        )
        status = max(failed)
    statuses = {reply.replica: reply.status for reply in replies}
    details = {name: {"status": statuses[name], **body} for name, body in told.items()}
    return status, error_body(error) | {"replicas": details}


def only_reply(call: ControlCall, replies: Sequence[ReplicaReply]) -> tuple[int, bytes]:
    """The reply of the one replica that the call was for.

    Raises:
        RequestRejectedError: ``unknown_replica``.
    """
    if not replies:
        raise RequestRejectedError(
            "no such replica is running", code="unknown_replica", key="replica", got=call.only
        )
    return replies[0].status, replies[0].body


def refused(name: str, error: TokenplaneError, status: int | None = None) -> ReplicaReply:
    """The reply of a replica that refuses a call by itself."""
    code = status_of(error) if status is None else status
    return ReplicaReply(name, code, orjson.dumps(error_body(error)))


def _parsed(reply: ReplicaReply) -> dict[str, Any]:
    body = orjson.loads(reply.body)
    return body if isinstance(body, dict) else {"value": body}


def _agreed(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Each field of the bodies: its value where all have the same, else None."""
    first = bodies[0]
    names = dict.fromkeys(name for body in bodies for name in body)
    return {
        name: first[name]
        if all(name in body and body[name] == first.get(name) for body in bodies)
        else None
        for name in names
    }
