"""Staged, training and failure rows come back from a message with every bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schemas.rows import (
    FLOATS,
    LEDGER_ROWS,
    STAGED_ROWS,
    TEXT,
    exact,
    sorted_extras,
    training_rows,
)
from tokenplane.schemas.columns import render_schema
from tokenplane.schemas.errors import (
    CorruptRowError,
    InvalidRecordError,
    SchemaMismatchError,
    UnsupportedSchemaError,
)
from tokenplane.schemas.failure_row import FAILURE_ROW_SCHEMA, FailureRow, parse_failure_row
from tokenplane.schemas.gym_ledger_row import (
    GYM_LEDGER_ROW_SCHEMA,
    GymLedgerRow,
    parse_gym_ledger_row,
)
from tokenplane.schemas.row_message import decode_message, encode_message
from tokenplane.schemas.staged_call import build_staged_call
from tokenplane.schemas.staged_row import (
    LEDGER_READ_COLUMNS,
    STAGED_COLUMNS,
    STAGED_ROW_SCHEMA,
    TOKEN_COLUMNS,
    CallEvidence,
    StagedRow,
    parse_staged_row,
)
from tokenplane.schemas.tokens import to_log_probs, to_mask, to_token_ids
from tokenplane.schemas.training_row import (
    TRAINING_COLUMNS,
    TRAINING_ROW_SCHEMA,
    TrainingRow,
    parse_training_row,
)


@given(STAGED_ROWS)
def test_a_staged_row_comes_back_with_every_bit(row: StagedRow) -> None:
    message = encode_message(row.to_batch())
    batch = decode_message(message)
    back = parse_staged_row(batch, key=row.staging_key)
    assert exact(back) == exact(sorted_extras(row))
    arrays = (back.call.token_ids_delta, back.call.token_mask_delta)
    assert not any(a.flags.writeable for a in (*arrays, back.call.generation_log_probs_delta))
    assert encode_message(back.to_batch()) == encode_message(batch) == message
    batch.validate(full=True)


@given(training_rows())
def test_a_training_row_comes_back_with_every_bit(row: TrainingRow) -> None:
    message = encode_message(row.to_batch())
    batch = decode_message(message)
    back = parse_training_row(batch, key=row.row_id)
    assert exact(back) == exact(row)
    stored = batch.to_pylist()[0]
    versions = [v for v, m in zip(row.weight_versions, row.token_mask, strict=True) if m]
    assert stored["min_weight_version"] == row.min_weight_version == min(versions, default=-1)
    assert stored["max_weight_version"] == row.max_weight_version == max(versions, default=-1)
    assert row.trainable_tokens == len(versions)
    assert encode_message(back.to_batch()) == message
    batch.validate(full=True)


@given(TEXT, TEXT, TEXT, TEXT, FLOATS)
def test_a_failure_row_comes_back(a: str, b: str, code: str, message: str, at: float) -> None:
    row = FailureRow(a, b, code, message, at)
    back = parse_failure_row(decode_message(encode_message(row.to_batch())))
    assert exact(back) == exact(row)


@given(LEDGER_ROWS)
def test_a_gym_ledger_row_comes_back(row: GymLedgerRow) -> None:
    back = parse_gym_ledger_row(decode_message(encode_message(row.to_batch())))
    assert exact(back) == exact(row)


LEDGER_ROW = GymLedgerRow("r", "c", reason="x")
FAILURE = FailureRow("r", "c", "x", "y", 0.0)


@pytest.mark.parametrize(
    ("batch", "parse"),
    [
        (FAILURE.to_batch(), parse_failure_row),
        (LEDGER_ROW.to_batch(), parse_gym_ledger_row),
    ],
)
def test_small_rows_come_one_by_one(batch: pa.RecordBatch, parse: Any) -> None:
    (two,) = pa.Table.from_batches([batch, batch]).combine_chunks().to_batches()
    for rows in (two, batch.slice(0, 0)):
        with pytest.raises(CorruptRowError, match="one row"):
            parse(rows)
    assert parse(two.slice(1, 1)) == parse(batch)


CALL = build_staged_call(
    rollout_id="r",
    model_call_id="c",
    parent_call_id=None,
    mode="text",
    prev_len=0,
    weight_version=2**64 - 1,
    parent_chain_hash=None,
    prompt_token_ids=to_token_ids([1, 2]),
    generated_token_ids=to_token_ids([3]),
    generated_log_probs=to_log_probs([-1e-45]),
    extras={},
)
STAGED = StagedRow("r/c/1", CALL, CallEvidence(((0, 1),)), 1.0)
TRAINING = TrainingRow(
    row_id="r#0",
    rollout_id="r",
    token_ids=to_token_ids([1, 2]),
    token_mask=to_mask([0, 1]),
    log_probs=to_log_probs([0.0, -0.5]),
    weight_versions=np.array([-1, 7]),
    prompt_len=1,
    call_spans=(),
    created_at=None,
)
PARSERS = [(STAGED.to_batch(), parse_staged_row), (TRAINING.to_batch(), parse_training_row)]


def test_no_extras_and_empty_extras_stay_apart() -> None:
    assert parse_staged_row(STAGED.to_batch()).call.extras == {}
    bare = dataclasses.replace(CALL, extras=None)
    row = dataclasses.replace(STAGED, call=bare)
    assert parse_staged_row(row.to_batch()).call.extras is None


def test_a_parsed_call_still_has_its_digest() -> None:
    parse_staged_row(decode_message(encode_message(STAGED.to_batch()))).call.check_digest()
    other = dataclasses.replace(CALL, weight_version=7)
    with pytest.raises(InvalidRecordError, match="digest"):
        parse_staged_row(dataclasses.replace(STAGED, call=other).to_batch()).call.check_digest()


@pytest.mark.parametrize(("batch", "parse"), PARSERS)
def test_identity_and_row_count_are_checked(batch: pa.RecordBatch, parse: Any) -> None:
    with pytest.raises(CorruptRowError, match="another key") as caught:
        parse(batch, key="other")
    assert caught.value.expected == "other"
    (two,) = pa.Table.from_batches([batch, batch]).combine_chunks().to_batches()
    for rows in (two, batch.slice(0, 0)):
        with pytest.raises(CorruptRowError, match="one row"):
            parse(rows)
    assert exact(parse(two.slice(1, 1))) == exact(parse(batch))


@pytest.mark.parametrize(("batch", "parse"), PARSERS)
def test_a_null_where_there_must_be_none(batch: pa.RecordBatch, parse: Any) -> None:
    for at, field in enumerate(batch.schema):
        columns = list(batch.columns)
        columns[at] = pa.nulls(1, field.type)
        holed = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
        if field.nullable:
            parse(holed)
        else:
            with pytest.raises(SchemaMismatchError, match="null") as caught:
                parse(holed)
            assert caught.value.key == field.name


@pytest.mark.parametrize(("batch", "parse"), PARSERS)
def test_another_schema_is_refused(batch: pa.RecordBatch, parse: Any) -> None:
    wrong = FAILURE.to_batch()
    newer = batch.replace_schema_metadata(
        {**batch.schema.metadata, b"tokenplane.schema_version": b"999"}
    )
    for other in (wrong, newer, batch.replace_schema_metadata(None)):
        with pytest.raises(UnsupportedSchemaError):
            parse(other)
    with pytest.raises(UnsupportedSchemaError):
        parse_failure_row(batch)


@pytest.mark.parametrize(
    ("columns", "schema"),
    [(STAGED_COLUMNS, STAGED_ROW_SCHEMA), (TRAINING_COLUMNS, TRAINING_ROW_SCHEMA)],
)
def test_columns_are_documented_and_unique(columns: Any, schema: pa.Schema) -> None:
    assert [column.name for column in columns] == schema.names
    assert len(set(schema.names)) == len(schema.names)
    assert all(column.doc for column in columns)


def test_column_selections_exist() -> None:
    assert set(TOKEN_COLUMNS) | set(LEDGER_READ_COLUMNS) <= set(STAGED_ROW_SCHEMA.names)
    assert not {"response_body", "generation_log_probs_delta"} & set(LEDGER_READ_COLUMNS)


@pytest.mark.parametrize(
    "change",
    [
        {"evidence": CallEvidence(((0, 2**64 - 1),))},
        {"evidence": CallEvidence((), num_evictions=2**31)},
        {"evidence": CallEvidence((), stop_reason="\ud800")},
        {"evidence": CallEvidence((), model=5)},  # type: ignore[arg-type]
        {"staging_key": None},
        {"created_at": "now"},
    ],
    ids=repr,
)
def test_what_does_not_fit_a_column_is_a_coded_error(change: dict[str, Any]) -> None:
    with pytest.raises(SchemaMismatchError):
        dataclasses.replace(STAGED, **change).to_batch()


@given(st.integers(0, 4), st.integers(0, 4))
def test_a_training_row_has_one_length(a: int, b: int) -> None:
    if a == b:
        return
    with pytest.raises(InvalidRecordError, match="unequal length"):
        dataclasses.replace(TRAINING, token_ids=to_token_ids([1] * a), token_mask=to_mask([0] * b))


@pytest.mark.parametrize("versions", [[-1, -1], [7, 7], [7, -1]], ids=repr)
def test_a_version_belongs_to_exactly_the_sampled_tokens(versions: list[int]) -> None:
    with pytest.raises(InvalidRecordError, match="sampled"):
        dataclasses.replace(TRAINING, weight_versions=np.array(versions))


def test_schemas_name_themselves() -> None:
    for schema, name in (
        (STAGED_ROW_SCHEMA, b"staged-row"),
        (TRAINING_ROW_SCHEMA, b"training-row"),
        (FAILURE_ROW_SCHEMA, b"failure-row"),
        (GYM_LEDGER_ROW_SCHEMA, b"gym-ledger-row"),
    ):
        assert schema.metadata[b"tokenplane.schema"] == name
    assert render_schema("staged-row", 1, STAGED_COLUMNS).equals(STAGED_ROW_SCHEMA)
