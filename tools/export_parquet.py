"""``tokenplane export``: one partition as one Parquet file, bit for bit, placed at once."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenplane.tools.command_frame import coded_errors, command_parser

if TYPE_CHECKING:
    import pyarrow as pa

    from tokenplane.staging.store import StagingStore

_GROUP_BYTES = 64 * 2**20
"""Rows are gathered to row groups of about this size before they are written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to export, and where to."""
    parser.add_argument("store", help="store URL or folder")
    parser.add_argument("out", type=Path, help="Parquet file to write; replaced if it is there")
    parser.add_argument(
        "--partition",
        default="rows",
        choices=("rows", "staged"),
        help="rows: published training rows (default); staged: one row per model call",
    )
    parser.add_argument(
        "--rollout",
        action="append",
        default=[],
        metavar="ID",
        help="only this rollout's rows (repeatable)",
    )


@coded_errors("export")
def main(argv: list[str] | None = None) -> int:
    """0: written; 1: a row cannot be read, or the store has none."""
    parser = command_parser("export", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    from tokenplane.tools.store_reading import open_for_reading

    with open_for_reading(args.store) as store:
        count = export(store, args.out, args.partition, set(args.rollout))
    print(f"{count} rows of {args.partition!r} to {args.out}", file=sys.stderr)
    return 0


def export(store: StagingStore, out: Path, partition: str, rollouts: set[str]) -> int:
    """Write the partition's rows, in write order, and give their number.

    The file holds the values, types and schema metadata of the store's rows exactly; rows of older
    schema versions get the newer columns as nulls. It appears under its name when it is complete.

    Args:
        rollouts: only these; empty means all.

    Raises:
        MissingRowError: there is nothing to write (code ``nothing_to_export``).
        CorruptRowError: a row cannot be read; nothing is written then.
        OSError: the file cannot be written.
    """
    import pyarrow.parquet as pq

    from tokenplane.schemas.columns import conform
    from tokenplane.schemas.errors import MissingRowError
    from tokenplane.schemas.staged_row import STAGED_ROW_SCHEMA
    from tokenplane.schemas.training_row import TRAINING_ROW_SCHEMA

    schema = TRAINING_ROW_SCHEMA if partition == "rows" else STAGED_ROW_SCHEMA
    temporary = out.with_name(f".tmp-{out.name}-{uuid.uuid4().hex[:8]}")
    count = 0
    try:
        # Without dictionaries: theirs need not tell apart what compares equal (0.0 and −0.0).
        with (
            temporary.open("xb") as sink,
            pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False) as writer,
        ):
            rows = _chosen(store, partition, rollouts)
            for table in _groups((conform(row, schema) for row in rows), schema):
                writer.write_table(table)
                count += table.num_rows
        if not count:
            raise MissingRowError(
                "no row to export",
                code="nothing_to_export",
                key=partition,
                expected="a published rollout (see Collector.publish)"
                if partition == "rows"
                else None,
            )
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _chosen(store: StagingStore, partition: str, rollouts: set[str]) -> Iterator[pa.RecordBatch]:
    for _, row in store.scan(partition):
        if not rollouts or row.column("rollout_id")[0].as_py() in rollouts:
            yield row


def _groups(rows: Iterator[pa.RecordBatch], schema: Any) -> Iterator[pa.Table]:
    import pyarrow as pa

    kept: list[pa.RecordBatch] = []
    size = 0
    for row in rows:
        kept.append(row)
        size += row.nbytes
        if size >= _GROUP_BYTES:
            yield pa.Table.from_batches(kept, schema=schema)
            kept, size = [], 0
    if kept:
        yield pa.Table.from_batches(kept, schema=schema)


if __name__ == "__main__":
    raise SystemExit(main())
