"""One rollout as the store has it: its calls, proven one by one, its failures, its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokenplane.capture.collect.terminal import TerminalChoice, select_terminal_call
from tokenplane.schemas.epochs import generation_versions, kv_versions
from tokenplane.schemas.errors import TokenplaneError
from tokenplane.schemas.failure_row import FAILURE_PARTITION, FailureRow, parse_failure_row
from tokenplane.schemas.manifest import CallRecord
from tokenplane.schemas.staged_row import STAGED_PARTITION, StagedRow, parse_staged_row
from tokenplane.schemas.tokens import Int32Array
from tokenplane.schemas.training_row import TRAINING_PARTITION, TrainingRow, parse_training_row
from tokenplane.staging.store import StagingStore
from tokenplane.tools.row_checks import check_link, check_row
from tokenplane.tools.store_reading import Problem, RolloutKeys, read_rows


@dataclass(frozen=True, slots=True, eq=False)
class CallView:
    """One call whose row and whole chain are proven."""

    row: StagedRow
    parent: CallView | None
    token_ids: Int32Array = field(repr=False)
    """int32[cum_len]: everything from the root's first token to the last sampled one."""

    @property
    def turn(self) -> int:
        """1 for a root, one more for each continuation."""
        return 1 if self.parent is None else self.parent.turn + 1

    @property
    def call_id(self) -> str:
        """The call's id."""
        return self.row.call.model_call_id

    def versions(self) -> NDArray[np.int64]:
        """int64[G]: the weight version that made each sampled token."""
        call = self.row.call
        return generation_versions(
            self.row.evidence.policy_epochs, call.cum_len - call.generation_len, call.cum_len
        )

    def oldest_kv(self) -> NDArray[np.int64]:
        """int64[G]: for each sampled token the oldest version in the KV cache that it looked at;
        −1 where nothing is known."""
        call = self.row.call
        if not self.row.evidence.kv_cache_epochs:
            return np.full(call.generation_len, -1, np.int64)
        written = kv_versions(self.row.evidence.kv_cache_epochs, call.cum_len - 1)
        return np.minimum.accumulate(written)[-call.generation_len :]


@dataclass(frozen=True, slots=True, eq=False)
class RolloutView:
    """A rollout, everything in write order."""

    rollout_id: str
    calls: tuple[CallView, ...]
    failures: tuple[FailureRow, ...]
    training: tuple[TrainingRow, ...]
    """The published rows, as published."""
    problems: tuple[Problem, ...]
    """What does not verify; such calls are not among ``calls``."""
    leftovers: tuple[str, ...] = ()
    """Staged rows that continue calls whose rows were removed after they were published (a branch
    that came to nothing): nothing is lost, and nothing can be proven of them any more."""

    @property
    def verified(self) -> bool:
        """True if every row that is there is proven."""
        return not self.problems

    def terminal(self) -> TerminalChoice:
        """The call that the published row ends with; else what the heuristic says."""
        for row in self.training:
            if row.segment == 0 and row.terminal_model_call_id is not None:
                return TerminalChoice(row.terminal_model_call_id, None, "published")
        return select_terminal_call([to_call_record(call.row) for call in self.calls])

    def terminal_calls(self) -> tuple[CallView, ...]:
        """The calls from the root to the terminal; none if there is no terminal.

        A published row names its very rows: a call that was delivered twice has two.
        """
        for row in self.training:
            if row.segment == 0 and row.call_spans:
                keys = {span.staging_key for span in row.call_spans}
                return tuple(call for call in self.calls if call.row.staging_key in keys)
        ident = self.terminal().model_call_id
        at = next((call for call in self.calls if call.call_id == ident), None)
        chain = []
        while at is not None:
            chain.append(at)
            at = at.parent
        return tuple(reversed(chain))

    def children(self) -> dict[CallView | None, list[CallView]]:
        """The calls that continue each call; those of None are the roots."""
        found: dict[CallView | None, list[CallView]] = defaultdict(list)
        for call in self.calls:
            found[call.parent].append(call)
        return found


def to_call_record(row: StagedRow) -> CallRecord:
    """The manifest row of a staged row.

    Where the row was staged for another ledger and has no response id, the staging key stands in:
    it is unique, and nobody will declare it.
    """
    call, ledger = row.call, row.ledger
    return CallRecord(
        model_call_id=call.model_call_id,
        parent_call_id=call.parent_call_id,
        prev_len=call.prev_len,
        delta_len=call.delta_len,
        cum_len=call.cum_len,
        weight_version=call.weight_version,
        digest=call.digest,
        extras_digest=call.extras_digest,
        staging_key=row.staging_key,
        mode=call.mode,
        chain_hash=call.chain_hash,
        cumulative_hash=call.cumulative_hash,
        response_id=row.staging_key if ledger is None else ledger.response_id,
        admitted_at=row.evidence.admitted_at,
    )


def load_rollout(store: StagingStore, rollout_id: str, keys: RolloutKeys) -> RolloutView:
    """Read and prove one rollout. What is wrong with it becomes ``problems``.

    Raises:
        StoreError: the store itself cannot be read.
    """
    problems = list(keys.unreadable)
    training = tuple(
        _parsed(store, TRAINING_PARTITION, keys.training, parse_training_row, problems)
    )
    there = {*keys.staged, *(problem.key for problem in keys.unreadable)}
    cleaned = {
        span.model_call_id
        for row in training
        if not any(span.staging_key in there for span in row.call_spans)
        for span in row.call_spans
    }
    leftovers: list[str] = []
    rows = _parsed(store, STAGED_PARTITION, keys.staged, parse_staged_row, problems)
    calls: list[CallView] = []
    by_call: dict[str, list[CallView]] = defaultdict(list)
    for row in rows:
        try:
            check_row(row, store)
            view = _linked(row, by_call)
        except TokenplaneError as error:
            if error.code == "missing_parent" and row.call.parent_call_id in cleaned:
                cleaned.add(row.call.model_call_id)
                leftovers.append(row.staging_key)
                continue
            problems.append(Problem(STAGED_PARTITION, row.staging_key, error.code, str(error)))
            continue
        calls.append(view)
        by_call[view.call_id].append(view)
    return RolloutView(
        rollout_id,
        tuple(calls),
        tuple(_parsed(store, FAILURE_PARTITION, keys.failures, _failure, problems)),
        training,
        tuple(problems),
        tuple(leftovers),
    )


def _failure(batch: pa.RecordBatch, *, key: str) -> FailureRow:
    return parse_failure_row(batch)


def _parsed[Row](
    store: StagingStore,
    partition: str,
    keys: Sequence[str],
    parse: Callable[..., Row],
    problems: list[Problem],
) -> Iterator[Row]:
    for key, batch in read_rows(store, partition, keys):
        if isinstance(batch, Problem):
            problems.append(batch)
            continue
        try:
            yield parse(batch, key=key)
        except TokenplaneError as error:
            problems.append(Problem(partition, key, error.code, str(error)))


def _linked(row: StagedRow, by_call: dict[str, list[CallView]]) -> CallView:
    """The call with its parent.

    A call that was delivered twice has two rows; the one that this row's hashes continue is the
    parent.
    """
    parent_id = row.call.parent_call_id
    if parent_id is None:
        return CallView(row, None, check_link(row, None, np.empty(0, np.int32)))
    named = None if row.ledger is None else row.ledger.parent_staging_key
    candidates = [
        c for c in by_call.get(parent_id, ()) if named is None or c.row.staging_key == named
    ]
    if not candidates:
        raise TokenplaneError(
            "the parent was removed from the store, or is not proven itself",
            code="missing_parent",
            key=named or parent_id,
        )
    for parent in candidates[:-1]:
        try:
            return CallView(row, parent, check_link(row, parent.row, parent.token_ids))
        except TokenplaneError:
            continue  # the last candidate's error says what is wrong
    parent = candidates[-1]
    return CallView(row, parent, check_link(row, parent.row, parent.token_ids))
