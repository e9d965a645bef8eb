"""Rollout indexes while others write, remove and index between any two steps of a reader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.capture.ledger_index import LedgerRow, RolloutIndex
from tokenplane.capture.rollout_indexes import RolloutIndexes
from tokenplane.schemas.staged_call import build_staged_call
from tokenplane.schemas.staged_row import (
    STAGED_PARTITION,
    CallEvidence,
    LedgerEntry,
    StagedRow,
)
from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.token_sink import TokenSink

ROLLOUT = "r"


def _row(number: int, idempotency_key: str | None) -> StagedRow:
    call = build_staged_call(
        rollout_id=ROLLOUT,
        model_call_id=f"c{number}",
        parent_call_id=None,
        mode="text",
        prev_len=0,
        weight_version=1,
        parent_chain_hash=None,
        prompt_token_ids=np.array([number], np.int32),
        generated_token_ids=np.array([7], np.int32),
        generated_log_probs=np.array([-0.5], np.float32),
        extras=None,
    )
    entry = LedgerEntry(f"resp-{number}", None, 2, "ab" * 32, idempotency_key=idempotency_key)
    return StagedRow(f"{ROLLOUT}/c{number}/0", call, CallEvidence(((0, 1),)), 1.0, entry)


class InterruptedStore(MemoryStore):
    """Lets others do what they like after a listing and before a read, as threads may."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt: Callable[[], None] = lambda: None

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        listed = super().keys(partition, prefix)
        self.interrupt()
        return listed

    def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        self.interrupt()
        return super().get(partition, keys, columns)


def state(index: RolloutIndex) -> tuple[list[LedgerRow], set[str], LedgerRow | None]:
    return list(index.rows.values()), set(index.superseded), index.repeat_of("key")


SERVERS = st.integers(0, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), SERVERS, st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 9), st.none()),
        st.tuples(st.just("index"), SERVERS, st.none()),
    ),
    max_size=14,
)


@given(steps=STEPS, within=STEPS, max_noted=st.sampled_from([1, 2, 64]))
def test_two_servers_agree_whatever_happens_between_listing_and_reading(
    steps: list[tuple[str, int, bool | None]],
    within: list[tuple[str, int, bool | None]],
    max_noted: int,
) -> None:
    with InterruptedStore() as store:
        servers = [RolloutIndexes(store, STAGED_PARTITION, max_noted=max_noted) for _ in range(2)]
        sinks = [TokenSink(store, on_staged=server.note) for server in servers]
        staged: list[str] = []
        given_out: list[tuple[RolloutIndex, Any]] = []
        waiting = list(within)

        def do(step: tuple[str, int, bool | None]) -> None:
            what, number, keyed = step
            if what == "stage":
                row = _row(len(staged), "key" if keyed else None)
                staged.append(row.staging_key)
                assert sinks[number].stage(row).ok
            elif what == "remove" and number < len(staged):
                store.discard(STAGED_PARTITION, [staged[number]])
            elif what == "index":
                index = servers[number].index(ROLLOUT)
                given_out.append((index, state(index)))

        def interrupt() -> None:
            if waiting:
                do(waiting.pop())

        store.interrupt = interrupt
        for step in steps:
            do(step)
        waiting.clear()

        truth = state(RolloutIndexes(store, STAGED_PARTITION).index(ROLLOUT))
        assert [row.staging_key for row in truth[0]] == [
            key for key in staged if key in store.keys(STAGED_PARTITION)
        ]
        for server in servers:
            assert state(server.index(ROLLOUT)) == truth
        # Whoever holds an index without the lock sees one state.
        assert all(state(index) == seen for index, seen in given_out)


def test_each_thread_sees_what_it_staged_while_others_stage_and_remove() -> None:
    per_thread, workers = 40, 4
    with MemoryStore() as store:
        indexes = RolloutIndexes(store, STAGED_PARTITION, max_noted=3)
        sink = TokenSink(store, on_staged=indexes.note)
        wrong: list[object] = []
        begin = threading.Barrier(workers)

        def work(worker: int) -> None:
            begin.wait()
            try:
                for turn in range(per_thread):
                    row = _row(worker * per_thread + turn, None)
                    assert sink.stage(row).ok
                    assert indexes.index(ROLLOUT).rows[row.staging_key] == LedgerRow.of(row)
                    if turn % 3 == 0:
                        store.discard(STAGED_PARTITION, [row.staging_key])
                        assert row.staging_key not in indexes.index(ROLLOUT).rows
            except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert wrong == []
        assert list(indexes.index(ROLLOUT).rows) == store.keys(STAGED_PARTITION)
