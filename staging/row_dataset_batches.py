"""Training rows as jagged batches: claimed, handed out, acknowledged when they were trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from tokenplane.schemas.errors import ConfigError
from tokenplane.schemas.tokens import Float32Array, Int32Array, UInt8Array
from tokenplane.schemas.training_row import TRAINING_PARTITION, TrainingRow, parse_training_row
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import Claimed

GROUP_COLUMN: Final = "group_id"


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """``B`` rows. Row ``i`` owns ``[offsets[i], offsets[i + 1])`` of the token columns.

    For three rows of 5, 2 and 4 tokens: ``offsets`` is ``[0, 5, 7, 11]`` and each token column has
    11 values. The arrays are the batch's own and writable. Advantages are the trainer's to compute:
    from ``rewards`` and ``groups``.
    """

    row_ids: tuple[str, ...]
    group_ids: tuple[str | None, ...]
    groups: NDArray[np.int64]
    """int64[B]: equal for rows of one group, counted from 0; a row without a group is alone."""
    offsets: NDArray[np.int64] = field(repr=False)
    """int64[B + 1], from 0."""
    token_ids: Int32Array = field(repr=False)
    token_mask: UInt8Array = field(repr=False)
    """1 = sampled, and this row owns its loss."""
    log_probs: Float32Array = field(repr=False)
    """As sampled; 0 where carried."""
    weight_versions: NDArray[np.int64] = field(repr=False)
    """Version that made the token; −1 where carried."""
    prompt_lens: NDArray[np.int64]
    rewards: NDArray[np.float64]
    """NaN where the environment gave none."""
    sample_mask: UInt8Array
    """0 = placeholder, train on nothing."""
    attempts: NDArray[np.int64]
    """1 unless the row was handed out before: a consumer died, or took longer than its lease."""
    expires_at_s: float
    """Acknowledge before: afterwards the rows may be handed out again."""

    def __len__(self) -> int:
        return len(self.row_ids)


def to_row_batch(claims: list[Claimed]) -> RowBatch:
    """The batch of what one claim gave.

    Raises:
        CorruptRowError: a row is another key's.
        UnsupportedSchemaError: a row is no training row of this or an older version.
    """
    rows = [parse_training_row(claim.row, key=claim.key) for claim in claims]
    lengths = [len(row.token_ids) for row in rows]
    groups, _ = _numbered([row.group_id for row in rows])
    return RowBatch(
        row_ids=tuple(row.row_id for row in rows),
        group_ids=tuple(row.group_id for row in rows),
        groups=groups,
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        token_ids=_joined(rows, "token_ids", np.int32),
        token_mask=_joined(rows, "token_mask", np.uint8),
        log_probs=_joined(rows, "log_probs", np.float32),
        weight_versions=_joined(rows, "weight_versions", np.int64),
        prompt_lens=np.array([row.prompt_len for row in rows], np.int64),
        rewards=np.array([np.nan if r.reward is None else r.reward for r in rows], np.float64),
        sample_mask=np.array([row.sample_mask for row in rows], np.uint8),
        attempts=np.array([claim.attempt for claim in claims], np.int64),
        expires_at_s=min((claim.expires_at_s for claim in claims), default=0.0),
    )


def _joined[T: np.generic](rows: list[TrainingRow], name: str, dtype: type[T]) -> NDArray[T]:
    return np.concatenate([np.zeros(0, dtype), *(getattr(row, name) for row in rows)])


def _numbered(names: list[str | None]) -> tuple[NDArray[np.int64], int]:
    known: dict[object, int] = {}
    numbers = [
        known.setdefault(("row", at) if name is None else ("group", name), len(known))
        for at, name in enumerate(names)
    ]
    return np.array(numbers, np.int64), len(known)


class _GroupOptions(TypedDict):
    group_column: str | None
    group_size: int | None
    group_wait_s: float | None


class RowReader:
    """Claims training rows for one consumer, whole groups at a time.

    Args:
        max_rows: of a batch; a group that is larger comes alone, whole.
        lease_s: how long the rows of a batch are kept from other readers of this consumer.
        group_size: rows of a whole group (one per rollout, as ``segments="terminal"`` gives them):
            a group waits until all of them are published.
        group_wait_s: take a smaller group when its newest row is this old; None: never.
        idle_s: how long to wait for new rows before the iteration ends; None waits for ever.
        poll_s: pause between two looks at an empty store.
    """

    def __init__(
        self,
        store: StagingStore,
        consumer: str,
        *,
        max_rows: int,
        lease_s: float,
        partition: str = TRAINING_PARTITION,
        group_column: str | None = GROUP_COLUMN,
        group_size: int | None = None,
        group_wait_s: float | None = None,
        idle_s: float | None = 0.0,
        poll_s: float = 0.2,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if idle_s is not None and not idle_s >= 0:
            raise ConfigError("idle_s", expected=">= 0, or None", got=idle_s)
        self._store = store
        self._consumer = consumer
        self._max_rows = max_rows
        self._lease_s = lease_s
        self.partition = partition
        self._groups: _GroupOptions = {
            "group_column": group_column,
            "group_size": group_size,
            "group_wait_s": group_wait_s,
        }
        self._idle_s = idle_s
        self._poll_s = poll_s
        self._sleep = sleep

    def __iter__(self) -> Iterator[RowBatch]:
        waited = 0.0
        while True:
            batch = self.claim()
            if batch is not None:
                waited = 0.0
                yield batch
                continue
            if self._idle_s is not None and waited >= self._idle_s:
                return
            self._sleep(self._poll_s)
            waited += self._poll_s

    def claim(self) -> RowBatch | None:
        """One batch, or None if there is nothing to claim at the moment.

        A batch that cannot be read is released, so that another reader may try.
        """
        claims = self._store.claim(
            self.partition,
            self._consumer,
            max_rows=self._max_rows,
            lease_s=self._lease_s,
            **self._groups,
        )
        if not claims:
            return None
        try:
            return to_row_batch(claims)
        except BaseException:
            self.release([claim.key for claim in claims])
            raise

    def ack(self, batch: RowBatch) -> int:
        """The batch was trained on: its rows never come back. Counts those not yet acknowledged."""
        return self._store.ack(self.partition, self._consumer, batch.row_ids)

    def release(self, row_ids: list[str]) -> int:
        """Give rows back at once."""
        return self._store.release(self.partition, self._consumer, row_ids)
