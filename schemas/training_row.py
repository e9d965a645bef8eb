"""The training row: what the collector publishes per rollout (or segment), declared once here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokenplane.schemas.columns import (
    Column,
    conform,
    int_list,
    list_value,
    one_row,
    render_schema,
    struct,
)
from tokenplane.schemas.errors import CorruptRowError, InvalidRecordError
from tokenplane.schemas.tokens import Float32Array, Int32Array, UInt8Array

TRAINING_ROW_VERSION = 1
TRAINING_PARTITION = "rows"
"""Default partition of published training rows."""

CALL_SPANS = int_list(
    struct(
        model_call_id=pa.string(),
        staging_key=pa.string(),
        start=pa.int64(),
        carry_len=pa.int64(),
        generation_len=pa.int64(),
        weight_version=pa.uint64(),
        extras_digest=pa.binary(32),
    )
)

TRAINING_COLUMNS: tuple[Column, ...] = (
    Column("row_id", pa.string(), "rollout_id, or rollout_id#segment"),
    Column("rollout_id", pa.string(), "rollout that the row was made from"),
    Column("group_id", pa.string(), "group (one prompt's rollouts)", nullable=True),
    Column("segment", pa.int32(), "0 unless a rollout gives several rows"),
    Column("token_ids", int_list(pa.int32()), "root prompt, then every delta of the chain"),
    Column("token_mask", int_list(pa.uint8()), "1 = sampled, and this row owns its loss"),
    Column("log_probs", int_list(pa.float32()), "as sampled; 0 where carried"),
    Column("weight_versions", int_list(pa.int64()), "version that made the token; -1 if carried"),
    Column("prompt_len", pa.int64(), "carried tokens of the root call"),
    Column("call_spans", CALL_SPANS, "one per call, root first, in row coordinates"),
    Column("reward", pa.float64(), "as given by the environment", nullable=True),
    Column("sample_mask", pa.uint8(), "0 = placeholder, train on nothing"),
    Column("reason", pa.string(), "why the row is a placeholder or salvaged", nullable=True),
    Column("salvaged", pa.bool_(), "True: only the verified part of a damaged rollout"),
    Column("terminal_model_call_id", pa.string(), "last call of the chain", nullable=True),
    Column("terminal_selection", pa.string(), "how the terminal was chosen", nullable=True),
    Column("min_weight_version", pa.int64(), "over sampled tokens; -1 if none"),
    Column("max_weight_version", pa.int64(), "over sampled tokens; -1 if none"),
    Column("logprobs_mode", pa.string(), "raw, processed or mixed", nullable=True),
    Column("model_fingerprint", pa.string(), "of the root call", nullable=True),
    Column("tokenizer_fingerprint", pa.string(), "of the root call", nullable=True),
    Column("cumulative_hash", pa.binary(32), "hash of token_ids", nullable=True),
    Column("created_at", pa.float64(), "Unix seconds of its newest staged row", nullable=True),
)
TRAINING_ROW_SCHEMA = render_schema("training-row", TRAINING_ROW_VERSION, TRAINING_COLUMNS)


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Where one call's delta lies in the row: ``[start, start + carry_len + generation_len)``."""

    model_call_id: str
    staging_key: str
    start: int
    carry_len: int
    generation_len: int
    weight_version: int
    extras_digest: str


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One training row. The four token columns have one length ``T`` (checked, case D16)."""

    row_id: str
    rollout_id: str
    token_ids: Int32Array = field(repr=False)
    token_mask: UInt8Array = field(repr=False)
    log_probs: Float32Array = field(repr=False)
    weight_versions: NDArray[np.int64] = field(repr=False)
    prompt_len: int
    call_spans: tuple[CallSpan, ...]
    created_at: float | None
    """Of the newest staged row, so that the same rollout always gives the same row."""
    group_id: str | None = None
    segment: int = 0
    reward: float | None = None
    sample_mask: int = 1
    reason: str | None = None
    salvaged: bool = False
    terminal_model_call_id: str | None = None
    terminal_selection: str | None = None
    logprobs_mode: str | None = None
    model_fingerprint: str | None = None
    tokenizer_fingerprint: str | None = None
    cumulative_hash: str | None = None

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("token_ids", "token_mask", "log_probs", "weight_versions")
        }
        if len(set(lengths.values())) != 1:
            raise InvalidRecordError("token columns of unequal length", got=lengths)
        sampled = self.token_mask == 1
        if np.any(self.weight_versions[sampled] < 0) or np.any(self.weight_versions[~sampled] >= 0):
            raise InvalidRecordError("a weight version belongs to exactly the sampled tokens")

    @property
    def min_weight_version(self) -> int:
        """Oldest version among the sampled tokens; −1 if there are none."""
        versions = self.weight_versions[self.token_mask == 1]
        return int(versions.min()) if len(versions) else -1

    @property
    def max_weight_version(self) -> int:
        """Newest version among the sampled tokens; −1 if there are none."""
        versions = self.weight_versions[self.token_mask == 1]
        return int(versions.max()) if len(versions) else -1

    @property
    def trainable_tokens(self) -> int:
        """Number of tokens with mask 1."""
        return int(np.count_nonzero(self.token_mask))

    def to_batch(self) -> pa.RecordBatch:
        """One row under ``TRAINING_ROW_SCHEMA``; token buffers are not copied."""
        values: dict[str, Any] = {c.name: getattr(self, c.name) for c in TRAINING_COLUMNS}
        values["call_spans"] = [
            {name: getattr(span, name) for name in CallSpan.__slots__}
            | {"extras_digest": bytes.fromhex(span.extras_digest)}
            for span in self.call_spans
        ]
        if self.cumulative_hash is not None:
            values["cumulative_hash"] = bytes.fromhex(self.cumulative_hash)
        return one_row(TRAINING_ROW_SCHEMA, values)


_ARRAYS = ("token_ids", "token_mask", "log_probs", "weight_versions")
_DERIVED = ("min_weight_version", "max_weight_version")


def parse_training_row(batch: pa.RecordBatch, *, key: str | None = None) -> TrainingRow:
    """The row of a one-row batch of this or an older schema version; arrays are views.

    Raises:
        UnsupportedSchemaError: another or a newer schema.
        CorruptRowError: not one row, or another key's row.
    """
    if batch.num_rows != 1:
        raise CorruptRowError("a training row message holds one row", got=batch.num_rows, key=key)
    batch = conform(batch, TRAINING_ROW_SCHEMA)
    row = batch.select([n for n in batch.schema.names if n not in _ARRAYS]).to_pylist()[0]
    if key is not None and row["row_id"] != key:
        raise CorruptRowError("the row is another key's", expected=key, got=row["row_id"])
    spans = tuple(
        CallSpan(**{**span, "extras_digest": span["extras_digest"].hex()})
        for span in row.pop("call_spans")
    )
    if row["cumulative_hash"] is not None:
        row["cumulative_hash"] = row["cumulative_hash"].hex()
    for name in _DERIVED:
        row.pop(name)
    row |= {name: list_value(batch, name) for name in _ARRAYS}
    return TrainingRow(**row, call_spans=spans)
