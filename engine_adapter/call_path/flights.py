"""One run per idempotency key: a request that comes again while it runs waits for the first."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tokenplane.engine_adapter.call_path.call_types import CallOutcome, StandaloneCapture
from tokenplane.schemas.errors import LedgerError


class _AbandonedError(Exception):
    """The leading request was cancelled; a waiting one has to run itself."""


@dataclass(frozen=True, slots=True)
class _Flight:
    digest: str | None
    future: asyncio.Future[CallOutcome]


class Flights:
    """Requests in flight by (rollout, idempotency key). Owned by one event loop."""

    def __init__(self) -> None:
        self._flights: dict[tuple[str, str], _Flight] = {}

    async def run(
        self, capture: StandaloneCapture, key: str, lead: Callable[[], Awaitable[CallOutcome]]
    ) -> CallOutcome:
        """The outcome of ``lead``, or of the same request that is running already.

        A failure is shared. If the leading request is cancelled (its client went away), one of
        the waiting ones runs in its place.

        Raises:
            LedgerError: ``idempotency_mismatch``: the key is in use for another body.
        """
        slot = (capture.rollout_id, key)
        while (flight := self._flights.get(slot)) is not None:
            if flight.digest != capture.request_digest:
                raise LedgerError(
                    "the idempotency key is in use for another request",
                    code="idempotency_mismatch",
                    key=key,
                )
            try:
                outcome = await asyncio.shield(flight.future)
            except _AbandonedError:
                continue
            return dataclasses.replace(outcome, repeated=True)
        future: asyncio.Future[CallOutcome] = asyncio.get_running_loop().create_future()
        self._flights[slot] = _Flight(capture.request_digest, future)
        try:
            outcome = await lead()
        except BaseException as error:
            abandoned = isinstance(error, asyncio.CancelledError)
            future.set_exception(_AbandonedError() if abandoned else error)
            future.exception()  # nobody may be waiting; that is no lost error
            raise
        else:
            future.set_result(outcome)
            return outcome
        finally:
            del self._flights[slot]
