"""The indexes of many rollouts over one store, kept in memory and brought up to date when asked."""

from __future__ import annotations

import threading
from collections import OrderedDict

from tokenplane.capture.ledger_index import LedgerRow, RolloutIndex, parse_ledger_row
from tokenplane.schemas.errors import LedgerError, MissingRowError
from tokenplane.schemas.staged_row import LEDGER_READ_COLUMNS, StagedRow
from tokenplane.staging.store import StagingStore


class RolloutIndexes:
    """What the rows of a partition say of each rollout. Thread-safe.

    Args:
        max_rollouts: indexes kept in memory (least recently used go first).
        max_noted: rows of this process (see ``note``) that are kept until they are indexed.
    """

    def __init__(
        self,
        store: StagingStore,
        partition: str,
        *,
        max_rollouts: int = 4096,
        max_noted: int = 4096,
    ) -> None:
        self._store = store
        self._partition = partition
        self._max_rollouts = max_rollouts
        self._max_noted = max_noted
        self._lock = threading.Lock()
        self._indexes: OrderedDict[str, RolloutIndex] = OrderedDict()
        self._noted: OrderedDict[str, LedgerRow] = OrderedDict()

    def note(self, row: StagedRow) -> None:
        """Keep the columns of a row that this process has just staged, so that ``index`` need not
        read it back. Whether the row is there, and in which order, the store alone says."""
        if row.ledger is None:
            return
        with self._lock:
            self._noted[row.staging_key] = LedgerRow.of(row)
            if len(self._noted) > self._max_noted:
                self._noted.popitem(last=False)

    def index(self, rollout_id: str) -> RolloutIndex:
        """The rollout's rows as of now. Treat as read-only."""
        keys = self._store.keys(self._partition, f"{rollout_id}/")
        with self._lock:
            known = self._indexes.get(rollout_id) or RolloutIndex(rollout_id)
            fresh = [key for key in keys if key not in known.rows]
            rows = {key: self._noted[key] for key in fresh if key in self._noted}
        # The store is read without the lock: rollouts do not wait for each other's reads.
        rows |= self._read([key for key in fresh if key not in rows])
        gone = known.rows.keys() - set(keys)
        # A new index replaces the old one, so that a reader without the lock sees one state.
        index = known.forget(gone) if gone or fresh else known
        for key in fresh:
            if key in rows:
                index.add(rows[key])
        with self._lock:
            self._indexes[rollout_id] = index
            self._indexes.move_to_end(rollout_id)
            while len(self._indexes) > self._max_rollouts:
                self._indexes.popitem(last=False)
            for key in fresh:
                self._noted.pop(key, None)
        return index

    def _read(self, keys: list[str]) -> dict[str, LedgerRow]:
        """The rows by key, without those that retention removed after they were listed."""
        if not keys:
            return {}
        try:
            found = self._store.get(self._partition, keys, LEDGER_READ_COLUMNS)
        except MissingRowError:
            if len(keys) == 1:
                return {}
            return {key: row for one in keys for key, row in self._read([one]).items()}
        return {
            key: _checked(parse_ledger_row(batch), key)
            for key, batch in zip(keys, found, strict=True)
        }


def _checked(row: LedgerRow, key: str) -> LedgerRow:
    if row.staging_key != key:
        raise LedgerError("the store gave another row than asked for", code="wrong_row", key=key)
    return row
