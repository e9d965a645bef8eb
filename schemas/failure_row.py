"""The failure row: a call that was served and has no staged row, and why."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tokenplane.schemas.columns import Column, conform, one_row, render_schema
from tokenplane.schemas.errors import CorruptRowError

FAILURE_ROW_VERSION = 1
FAILURE_PARTITION = "failures"
"""Default partition of failure rows; keys are ``rollout/call/attempt`` as for staged rows."""

_KEY_PART = 400
"""Characters: two parts of four bytes each stay below every store's limit for a key."""

FAILURE_COLUMNS: tuple[Column, ...] = (
    Column("rollout_id", pa.string(), "rollout of the call"),
    Column("model_call_id", pa.string(), "call that has no staged row"),
    Column("code", pa.string(), "stable reason"),
    Column("message", pa.string(), "what was expected and what came"),
    Column("created_at", pa.float64(), "Unix seconds"),
)
FAILURE_ROW_SCHEMA = render_schema("failure-row", FAILURE_ROW_VERSION, FAILURE_COLUMNS)


@dataclass(frozen=True, slots=True)
class FailureRow:
    """One failure as stored."""

    rollout_id: str
    model_call_id: str
    code: str
    message: str
    created_at: float

    @property
    def key_names(self) -> tuple[str, str]:
        """Rollout and call as parts of the row's key: whatever a client calls its call, a store
        takes them (no NUL, and not too long); the columns keep the names as they came.
        """
        names = (self.rollout_id, self.model_call_id)
        rollout_id, call_id = (name.replace("\0", "\\0")[:_KEY_PART] for name in names)
        return rollout_id, call_id

    def to_batch(self) -> pa.RecordBatch:
        """One row under ``FAILURE_ROW_SCHEMA``."""
        return one_row(FAILURE_ROW_SCHEMA, {c.name: getattr(self, c.name) for c in FAILURE_COLUMNS})


def parse_failure_row(batch: pa.RecordBatch) -> FailureRow:
    """The row of a one-row batch.

    Raises:
        UnsupportedSchemaError: another or a newer schema.
        CorruptRowError: not one row.
    """
    if batch.num_rows != 1:
        raise CorruptRowError("a failure row message holds one row", got=batch.num_rows)
    return FailureRow(**conform(batch, FAILURE_ROW_SCHEMA).to_pylist()[0])
