"""Holds of a file store: rows that are being read, and that nobody may remove meanwhile."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Final

from tokenplane.schemas.errors import RowHeldError
from tokenplane.staging.file_backend.database import Database
from tokenplane.staging.file_backend.rows import to_json
from tokenplane.staging.file_backend.schema import Sql
from tokenplane.staging.store_types import Hold

IS_HELD: Final = """EXISTS(
    SELECT 1 FROM holds h WHERE h.partition=:name AND h.expires_at>:now
    AND substr({key}, 1, length(h.prefix))=h.prefix
)"""
"""True for a key that a live hold covers; ``{key}`` is the column."""
_FIRST_HELD: Final = (
    f"SELECT j.value FROM json_each(:keys) j WHERE {IS_HELD.format(key='j.value')} LIMIT 1"
)


class Holds:
    """See ``StagingStore.hold``; arguments are checked already.

    Whoever removes rows asks for holds in the transaction that removes them, and a hold is there
    when its own transaction has ended: neither can overtake the other.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def hold(self, partition: str, prefix: str, lease_s: float) -> Hold:
        """Keep rows; ended holds of others go."""
        with self._database.write() as db:
            now = self._clock()
            hold = Hold(partition, prefix, uuid.uuid4().hex, now + lease_s)
            db.execute("DELETE FROM holds WHERE expires_at<=?", (now,))
            db.execute(
                "INSERT INTO holds VALUES (?, ?, ?, ?)",
                (hold.hold_id, partition, prefix, hold.expires_at_s),
            )
        return hold

    def extend(self, hold: Hold, lease_s: float) -> bool:
        """False if it had ended."""
        with self._database.write() as db:
            now = self._clock()
            extended = db.execute(
                "UPDATE holds SET expires_at=? WHERE hold_id=? AND expires_at>? RETURNING hold_id",
                (now + lease_s, hold.hold_id, now),
            )
            return bool(extended.fetchall())

    def end(self, hold: Hold) -> None:
        """Idempotent."""
        with self._database.write() as db:
            db.execute("DELETE FROM holds WHERE hold_id=?", (hold.hold_id,))


def check_not_held(db: Sql, partition: str, keys: Sequence[str], now: float) -> None:
    """Raises:
    RowHeldError: a live hold covers one of the keys. ``db``: in the removing transaction.
    """
    values = {"keys": to_json(keys), "name": partition, "now": now}
    found = db.execute(_FIRST_HELD, values).fetchone()
    if found is not None:
        raise RowHeldError("somebody is reading the row", key=found[0])
