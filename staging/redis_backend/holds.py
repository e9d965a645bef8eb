"""Holds of a Redis store: rows that are being read, and that nobody may remove meanwhile."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.redis_backend.hold_scripts import END, EXTEND, HOLD
from tokenplane.staging.store_types import Hold


class RedisHolds:
    """See ``StagingStore.hold``; arguments are checked already.

    Sent twice after a lost reply, a hold is the same hold.
    """

    def __init__(self, connection: RedisConnection, total: bytes, now: Callable[[], str]) -> None:
        self._connection = connection
        self._total = total
        self._now = now

    def hold(self, partition: str, prefix: str, lease_s: float) -> Hold:
        """Keep rows."""
        ident = uuid.uuid4().hex
        expiry = self._connection.script(
            HOLD, [self._total], self._now(), partition, ident + prefix, repr(lease_s)
        )
        return Hold(partition, prefix, ident, float(expiry))

    def extend(self, hold: Hold, lease_s: float) -> bool:
        """False if it had ended."""
        name = hold.hold_id + hold.prefix
        reply = self._connection.script(
            EXTEND, [self._total], self._now(), hold.partition, name, repr(lease_s)
        )
        return bool(reply)

    def end(self, hold: Hold) -> None:
        """Idempotent."""
        name = hold.hold_id + hold.prefix
        self._connection.script(END, [self._total], self._now(), hold.partition, name)
