"""A partition as one Arrow reader, for batch use: Parquet, Polars, DuckDB, Ray Data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from tokenplane.schemas.columns import SCHEMA_NAME_KEY, conform, schema_identity
from tokenplane.schemas.errors import SchemaMismatchError
from tokenplane.schemas.staged_row import STAGED_ROW_SCHEMA
from tokenplane.schemas.training_row import TRAINING_ROW_SCHEMA
from tokenplane.staging.store import StagingStore

_KNOWN = {schema_identity(schema)[0]: schema for schema in (STAGED_ROW_SCHEMA, TRAINING_ROW_SCHEMA)}


def open_arrow_reader(
    store: StagingStore,
    partition: str,
    *,
    prefix: str = "",
    columns: Sequence[str] | None = None,
    rows_per_batch: int = 256,
) -> pa.RecordBatchReader:
    """The rows in write order, as they are now; nothing is claimed.

    Rows of older schema versions come in the newest one's columns. The reader is read once and
    holds one batch at a time; ``ray.data.from_arrow(reader.read_all())`` gives a Ray dataset.

    Raises:
        SchemaMismatchError: the partition is empty, so that its columns are unknown; while reading:
            rows of unlike schemas.
    """
    rows = (row for _, row in store.scan(partition, prefix))
    first = next(rows, None)
    if first is None:
        raise SchemaMismatchError("an empty partition has no columns", key=partition)
    full = _target(first.schema)
    names = full.names if columns is None else list(columns)
    lacking = [name for name in names if full.get_field_index(name) < 0]
    if lacking:
        raise SchemaMismatchError("the rows have no such column", got=lacking, key=partition)
    schema = pa.schema([full.field(name) for name in names], metadata=full.metadata)
    return pa.RecordBatchReader.from_batches(
        schema, _batches(first, rows, full, names, rows_per_batch)
    )


def _target(schema: pa.Schema) -> pa.Schema:
    if SCHEMA_NAME_KEY not in (schema.metadata or {}):
        return schema
    return _KNOWN.get(schema_identity(schema)[0], schema)


def _batches(
    first: pa.RecordBatch,
    rest: Iterator[pa.RecordBatch],
    full: pa.Schema,
    names: list[str],
    size: int,
) -> Iterator[pa.RecordBatch]:
    held = [_fitted(first, full).select(names)]
    for row in rest:
        held.append(_fitted(row, full).select(names))
        if len(held) >= size:
            yield pa.concat_batches(held)
            held = []
    if held:
        yield pa.concat_batches(held)


def _fitted(row: pa.RecordBatch, full: pa.Schema) -> pa.RecordBatch:
    if row.schema.equals(full, check_metadata=True):
        return row
    if full in _KNOWN.values():
        return conform(row, full)
    raise SchemaMismatchError("rows of unlike schemas in one partition", got=row.schema.names)
