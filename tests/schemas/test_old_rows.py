"""Rows of every schema version that was ever written are readable, bit for bit, forever."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pyarrow as pa
import pytest

from tests.schemas.old_rows import DATA, staged_row_v1, training_row_v1
from tests.schemas.rows import exact, sorted_extras
from tokenplane.schemas.columns import SCHEMA_VERSION_KEY, Column, conform, render_schema
from tokenplane.schemas.errors import SchemaMismatchError
from tokenplane.schemas.row_message import decode_message
from tokenplane.schemas.staged_row import STAGED_COLUMNS, STAGED_ROW_VERSION, parse_staged_row
from tokenplane.schemas.training_row import (
    TRAINING_COLUMNS,
    TRAINING_ROW_VERSION,
    parse_training_row,
)

FROZEN = {
    "staged_row_v1.bin": "101d6eb8f7d851cfd5d841aa2b46eecfce2dfcf886170f421f31e7f06a59fea7",
    "training_row_v1.bin": "cc0b8e063a5781ca07ba34562cf851b573b897d1ea3b05dbc519bcd40df1bed0",
}


def stored(name: str) -> pa.RecordBatch:
    return decode_message((DATA / name).read_bytes())


@pytest.mark.parametrize("name", FROZEN)
def test_the_files_are_the_ones_first_written(name: str) -> None:
    assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == FROZEN[name]


def test_every_version_has_its_file() -> None:
    expected = {f"staged_row_v{v}.bin" for v in range(1, STAGED_ROW_VERSION + 1)}
    expected |= {f"training_row_v{v}.bin" for v in range(1, TRAINING_ROW_VERSION + 1)}
    assert {path.name for path in DATA.glob("*.bin")} == expected == set(FROZEN)


def test_staged_row_v1() -> None:
    row = parse_staged_row(stored("staged_row_v1.bin"), key="röll-1/呼び出し-2/0011223344556677")
    assert exact(row) == exact(sorted_extras(staged_row_v1()))
    row.call.check_digest()
    assert row.call.weight_version == 2**64 - 1
    assert np.signbit(row.call.generation_log_probs_delta).tolist() == [False, True, True, True]
    assert row.call.generation_log_probs_delta[2] == np.float32(-1e-45) != 0


def test_training_row_v1() -> None:
    row = parse_training_row(stored("training_row_v1.bin"), key="röll-1#0")
    assert exact(row) == exact(training_row_v1())


LATER = Column("later", pa.list_(pa.int32()), "came with version 2", nullable=True)


@pytest.mark.parametrize(
    ("name", "kind", "columns"),
    [
        ("staged_row_v1.bin", "staged-row", STAGED_COLUMNS),
        ("training_row_v1.bin", "training-row", TRAINING_COLUMNS),
    ],
)
def test_a_column_that_came_later_is_null_in_an_old_row(
    name: str, kind: str, columns: tuple[Column, ...]
) -> None:
    old = stored(name)
    newer = render_schema(kind, 999, (*columns, LATER))
    batch = conform(old, newer)
    assert batch.schema.equals(newer, check_metadata=True)
    assert batch.schema.metadata[SCHEMA_VERSION_KEY] == b"999"
    assert batch.column("later").null_count == 1
    assert batch.select(old.schema.names).to_pylist() == old.to_pylist()
    with pytest.raises(SchemaMismatchError, match="missing"):
        conform(
            old, render_schema(kind, 999, (*columns, dataclasses.replace(LATER, nullable=False)))
        )
    changed = (*columns[:-1], dataclasses.replace(columns[-1], type=pa.int8()))
    with pytest.raises(SchemaMismatchError, match=columns[-1].name):
        conform(old, render_schema(kind, 999, changed))
