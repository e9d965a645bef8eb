"""The ledger row that NeMo-Gym keeps through us: a commit or a failure of one call."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tokenplane.schemas.columns import Column, conform, int_list, one_row, render_schema
from tokenplane.schemas.errors import CorruptRowError

GYM_LEDGER_ROW_VERSION = 1
GYM_LEDGER_PARTITION = "gym_ledger"
"""Default partition; keys are ``rollout/call`` for commits, ``rollout/call/failure-N`` else."""

GYM_LEDGER_COLUMNS: tuple[Column, ...] = (
    Column("rollout_id", pa.string(), "rollout of the call"),
    Column("model_call_id", pa.string(), "the call"),
    Column(
        "record", pa.string(), "CallRecord as canonical JSON; null for a failure", nullable=True
    ),
    Column("staging_chain", int_list(pa.string()), "root to this call's key", nullable=True),
    Column("fingerprint", pa.string(), "of history and answer; null: no parent", nullable=True),
    Column("context_len", pa.int32(), "request items", nullable=True),
    Column("context_digest", pa.string(), "digest of the request items", nullable=True),
    Column("fingerprint_version", pa.int32(), "version of both", nullable=True),
    Column("reason", pa.string(), "why the call failed; null for a commit", nullable=True),
)
GYM_LEDGER_ROW_SCHEMA = render_schema("gym-ledger-row", GYM_LEDGER_ROW_VERSION, GYM_LEDGER_COLUMNS)


@dataclass(frozen=True, slots=True)
class GymLedgerRow:
    """One ledger row; exactly one of ``record`` and ``reason`` is set."""

    rollout_id: str
    model_call_id: str
    record: str | None = None
    staging_chain: tuple[str, ...] | None = None
    fingerprint: str | None = None
    context_len: int | None = None
    context_digest: str | None = None
    fingerprint_version: int | None = None
    reason: str | None = None

    def to_batch(self) -> pa.RecordBatch:
        """One row under ``GYM_LEDGER_ROW_SCHEMA``."""
        values = {column.name: getattr(self, column.name) for column in GYM_LEDGER_COLUMNS}
        return one_row(GYM_LEDGER_ROW_SCHEMA, values)


def parse_gym_ledger_row(batch: pa.RecordBatch) -> GymLedgerRow:
    """The row of a one-row batch.

    Raises:
        UnsupportedSchemaError: another or a newer schema.
        CorruptRowError: not one row.
    """
    if batch.num_rows != 1:
        raise CorruptRowError("a ledger row message holds one row", got=batch.num_rows)
    values = conform(batch, GYM_LEDGER_ROW_SCHEMA).to_pylist()[0]
    if values["staging_chain"] is not None:
        values["staging_chain"] = tuple(values["staging_chain"])
    return GymLedgerRow(**values)
