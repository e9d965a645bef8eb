"""Rows that this process staged are indexed without being read back; the store alone says which."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given

from tests.capture.test_ledger import USER, Server, said
from tests.schemas.rows import STAGED_ROWS
from tokenplane.capture.ledger_index import LedgerRow, parse_ledger_row
from tokenplane.capture.rollout_indexes import RolloutIndexes
from tokenplane.schemas.staged_row import STAGED_PARTITION, StagedRow, parse_staged_row
from tokenplane.staging import StagingStore
from tokenplane.staging.memory_backend.store import MemoryStore


@given(STAGED_ROWS)
def test_a_row_in_memory_gives_the_columns_that_are_read_back(row: StagedRow) -> None:
    batch = row.to_batch()

    assert repr(LedgerRow.of(row)) == repr(parse_ledger_row(batch))


class CountingStore(MemoryStore):
    """Remembers which keys were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        self.read += keys
        return super().get(partition, keys, columns)


@pytest.fixture
def rows() -> list[StagedRow]:
    """Three turns of one rollout, as staged."""
    with MemoryStore() as store:
        server, messages = Server(store), [USER]
        for turn in range(3):
            reply = said(f"answer {turn}")
            server.serve(messages, reply)
            messages = [*messages, reply, USER]
        keys = store.keys(STAGED_PARTITION, "")
        return [parse_staged_row(batch) for batch in store.get(STAGED_PARTITION, keys)]


def put(store: StagingStore, row: StagedRow) -> None:
    store.put(STAGED_PARTITION, row.staging_key, row.to_batch())


def test_noted_rows_are_not_read_and_all_others_are(rows: list[StagedRow]) -> None:
    with CountingStore() as store:
        indexes = RolloutIndexes(store, STAGED_PARTITION)
        for row in rows:
            put(store, row)
        indexes.note(rows[0])
        indexes.note(rows[2])

        index = indexes.index(rows[0].call.rollout_id)

        assert list(index.rows) == [row.staging_key for row in rows]
        assert store.read == [rows[1].staging_key]
        assert index.rows == RolloutIndexes(store, STAGED_PARTITION).index(index.rollout_id).rows


def test_a_noted_row_that_the_store_does_not_have_is_no_row(rows: list[StagedRow]) -> None:
    with CountingStore() as store:
        indexes = RolloutIndexes(store, STAGED_PARTITION)
        put(store, rows[0])
        for row in rows:
            indexes.note(row)
        rollout = rows[0].call.rollout_id

        assert list(indexes.index(rollout).rows) == [rows[0].staging_key]
        store.discard(STAGED_PARTITION, [rows[0].staging_key])
        assert not indexes.index(rollout).rows


def test_more_noted_rows_than_are_kept_are_read(rows: list[StagedRow]) -> None:
    with CountingStore() as store:
        indexes = RolloutIndexes(store, STAGED_PARTITION, max_noted=1)
        for row in rows:
            put(store, row)
            indexes.note(row)

        assert len(indexes.index(rows[0].call.rollout_id).rows) == len(rows)
        assert store.read == [row.staging_key for row in rows[:2]]
