"""Collected rows against the engine's own log, which nothing of ours but the engine wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tokenplane.engine_adapter.engine_log import LoggedRequest, read_engine_log
from tokenplane.schemas.training_row import CallSpan, TrainingRow, parse_training_row


def check_rows(parquet: Path, engine_log: Path, *, expected: int) -> list[str]:
    """What does not fit; empty if every row is a chain of requests that the engine really ran."""
    rows = read_rows(parquet) if parquet.exists() else []
    problems = []
    if len(rows) != expected:
        problems.append(f"{len(rows)} rows, expected {expected}")
    requests = list(read_engine_log(engine_log))
    for row in rows:
        if not row.call_spans:
            problems.append(f"{row.row_id}: no verified chain ({row.reason})")
        problems += [
            f"{row.row_id}: the engine never saw call {span.model_call_id} like this"
            for span in row.call_spans
            if not any(_is_same(row, span, request) for request in requests)
        ]
    return problems


def read_rows(parquet: Path) -> list[TrainingRow]:
    """The training rows of a Parquet file."""
    table = pq.read_table(parquet)
    batches = [
        batch.slice(at, 1).replace_schema_metadata(table.schema.metadata)
        for batch in table.to_batches()
        for at in range(batch.num_rows)
    ]
    return [parse_training_row(batch) for batch in batches]


def _is_same(row: TrainingRow, span: CallSpan, request: LoggedRequest) -> bool:
    """True if the engine ran the call on this prompt, and sampled just this from it."""
    at = span.start + span.carry_len
    sampled = slice(at, at + span.generation_len)
    return (
        np.array_equal(row.token_ids[:at], request.prompt_token_ids)
        and np.array_equal(row.token_ids[sampled], request.generated_token_ids)
        and row.log_probs[sampled].tobytes() == request.generated_log_probs.tobytes()
    )
