"""Published training rows against their staged rows: made again from disk, equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from tokenplane.capture.collect.linearize import verify_and_linearize
from tokenplane.capture.collect.training_rows import RolloutOutcome, placeholder, to_training_row
from tokenplane.schemas.digests import cumulative_hash
from tokenplane.schemas.errors import ConfigError, InvalidRecordError, TokenplaneError
from tokenplane.schemas.manifest import RolloutReceipt
from tokenplane.schemas.row_message import encode_message
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.schemas.training_row import TRAINING_PARTITION, TrainingRow, parse_training_row
from tokenplane.tools.rollout_view import RolloutView, to_call_record
from tokenplane.tools.store_reading import Problem


def check_published(rollout: RolloutView) -> list[Problem]:
    """What is wrong with a rollout's published rows; empty if they follow from the staged ones.

    Rows whose staged rows were cleaned away are held to their own hash only.
    """
    problems = [
        Problem(TRAINING_PARTITION, row.row_id, error.code, str(error))
        for row in rollout.training
        if (error := _error_of(row, rollout)) is not None
    ]
    owners: dict[str, str] = {}
    for row in rollout.training:
        for call_id in sorted(owned_calls(row)) if not row.salvaged else ():
            if call_id in owners:
                problems.append(
                    Problem(
                        TRAINING_PARTITION,
                        row.row_id,
                        "loss_owned_twice",
                        f"call {call_id} carries loss in {owners[call_id]} too",
                    )
                )
            owners.setdefault(call_id, row.row_id)
    return problems


def owned_calls(row: TrainingRow) -> set[str]:
    """The calls whose sampled tokens carry this row's loss."""
    return {
        span.model_call_id
        for span in row.call_spans
        if row.token_mask[span.start + span.carry_len :][: span.generation_len].any()
    }


def is_cleaned(row: TrainingRow, rollout: RolloutView) -> bool:
    """True if none of the row's staged rows is in the store any more, whole or damaged."""
    there = {call.row.staging_key for call in rollout.calls}
    there |= {problem.key for problem in rollout.problems}
    return not any(span.staging_key in there for span in row.call_spans)


def _error_of(row: TrainingRow, rollout: RolloutView) -> TokenplaneError | None:
    try:
        if (
            row.cumulative_hash is not None
            and cumulative_hash(row.token_ids) != row.cumulative_hash
        ):
            raise InvalidRecordError("the tokens do not give the row's hash", code="row_hash")
        if row.call_spans and is_cleaned(row, rollout):
            return None
        again = rebuild(row, rollout)
        if encode_message(again.to_batch()) != encode_message(row.to_batch()):
            raise InvalidRecordError(
                "the staged rows give another training row",
                code="replay_differs",
                expected=_differing(again, row),
            )
    except TokenplaneError as error:
        return error
    return None


def rebuild(row: TrainingRow, rollout: RolloutView) -> TrainingRow:
    """The training row that the staged rows give, for the same chain, outcome and loss owners.

    Raises:
        TokenplaneError: the chain is not there, not proven, or does not linearize.
    """
    outcome = RolloutOutcome(row.rollout_id, reward=row.reward, group_id=row.group_id)
    if not row.call_spans:
        return placeholder(outcome, row.reason or "")
    by_key = {call.row.staging_key: call.row for call in rollout.calls}
    wanted = [span.staging_key for span in row.call_spans]
    unproven = {problem.key for problem in rollout.problems}
    removed = [key for key in wanted if key not in by_key and key not in unproven]
    if removed:
        raise InvalidRecordError(
            f"{len(removed)} of its {len(wanted)} staged rows were removed, so that it cannot be "
            "made again: retention or a clean-up took a part of the rollout",
            code="staged_rows_removed",
            key=removed[0],
        )
    chain: list[StagedRow] = []
    for key in wanted:
        if key not in by_key:
            raise InvalidRecordError(
                "a staged row of the chain is not proven", code="missing_staged_row", key=key
            )
        chain.append(by_key[key])
    receipt = RolloutReceipt(
        rollout_id=row.rollout_id,
        reward=row.reward,
        terminal_model_call_id=chain[-1].call.model_call_id,
        manifest=[to_call_record(staged) for staged in chain],
        terminal_selection="declared",
    )
    linear = verify_and_linearize(receipt, [staged.call for staged in chain])
    # How the terminal was found is the publisher's statement; nothing staged can repeat it.
    named = receipt.model_copy(update={"terminal_selection": row.terminal_selection})
    return to_training_row(
        outcome,
        named,
        linear,
        chain,
        segment=row.segment,
        owned=None if row.salvaged else owned_calls(row),
        reason=row.reason if row.salvaged else None,
    )


def _differing(one: TrainingRow, other: TrainingRow) -> str:
    a, b = one.to_batch(), other.to_batch()
    names = [name for name in a.schema.names if a.column(name) != b.column(name)]
    return f"the same {', '.join(names) or 'bits of a float column'}"


def compare_parquet(path: Path, published: Sequence[TrainingRow]) -> list[Problem]:
    """Rows of a Parquet file that are not, bit for bit, the published ones; and those it lacks.

    Raises:
        ConfigError: no readable Parquet file.
    """
    where = path.name
    expected = {row.row_id: row for row in published}
    problems: list[Problem] = []
    for batch in _parquet_rows(path):
        try:
            row = parse_training_row(batch)
        except TokenplaneError as error:
            problems.append(Problem(where, "?", error.code, str(error)))
            continue
        known = expected.pop(row.row_id, None)
        if known is None:
            problems.append(
                Problem(where, row.row_id, "row_not_published", "the store has no such row")
            )
        elif encode_message(row.to_batch()) != encode_message(known.to_batch()):
            problems.append(
                Problem(where, row.row_id, "export_differs", "the file has other values")
            )
    problems += [
        Problem(where, key, "row_not_exported", "the file lacks the row") for key in expected
    ]
    return problems


def _parquet_rows(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            for batch in file.iter_batches(batch_size=64):
                for at in range(batch.num_rows):
                    yield batch.slice(at, 1).replace_schema_metadata(schema.metadata)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"cannot be read as Parquet: {error}", key=str(path)) from error
