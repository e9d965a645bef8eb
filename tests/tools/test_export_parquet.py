"""``tokenplane export``: Parquet that holds the rows bit for bit, or nothing at all."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.stories import Story, say
from tokenplane.schemas.row_message import encode_message
from tokenplane.schemas.staged_row import STAGED_ROW_SCHEMA, parse_staged_row
from tokenplane.schemas.tokens import frozen
from tokenplane.schemas.training_row import TRAINING_ROW_SCHEMA, parse_training_row
from tokenplane.staging import open_store
from tokenplane.tools.cli import main
from tokenplane.tools.export_parquet import export

Capture = pytest.CaptureFixture[str]

ODD_FLOATS = [-0.0, 1e-45, -1e-45, -1.1754942e-38, -3.4028235e38, -87.25, 0.0]


def rows_of(path: Path) -> list[pa.RecordBatch]:
    table = pq.read_table(path)
    batches = table.combine_chunks().to_batches()
    return [batch.slice(at, 1) for batch in batches for at in range(batch.num_rows)]


@pytest.mark.parametrize("partition", ["rows", "staged"])
def test_every_row_comes_back_bit_for_bit(
    partition: str, told: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.parquet"
    assert main(["export", str(told), str(out), "--partition", partition]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert str(out) in said.err
    with open_store(str(told)) as store:
        expected = [encode_message(row) for _, row in store.scan(partition)]
    if partition == "rows":
        found = [encode_message(parse_training_row(row).to_batch()) for row in rows_of(out)]
    else:
        found = [encode_message(parse_staged_row(row).to_batch()) for row in rows_of(out)]
    assert found == expected


@pytest.mark.parametrize(
    ("partition", "schema"), [("rows", TRAINING_ROW_SCHEMA), ("staged", STAGED_ROW_SCHEMA)]
)
def test_the_schema_and_its_metadata_are_kept(
    partition: str, schema: pa.Schema, told: Path, tmp_path: Path
) -> None:
    assert main(["export", str(told), str(tmp_path / "o"), "--partition", partition]) == 0
    found = pq.read_schema(tmp_path / "o")
    assert found.equals(schema, check_metadata=False)
    assert {key: found.metadata[key] for key in schema.metadata} == schema.metadata


def test_odd_floats_survive(story: Story, tmp_path: Path) -> None:
    """−0.0, denormals and the largest float, as bits; 0.0 beside −0.0 in one column."""
    story.call("odd", say([], "x"), "six.by", log_probs=ODD_FLOATS)
    for partition, column in (("staged", "generation_log_probs_delta"), ("rows", "log_probs")):
        if partition == "rows":
            story.publish("odd")
        out = tmp_path / f"{partition}.parquet"
        export(story.store, out, partition, {"odd"})
        [row] = rows_of(out)
        values = np.asarray(row.column(column)[0].values)[-len(ODD_FLOATS) :]
        bits = np.array(ODD_FLOATS, np.float32).view(np.int32)
        assert values.view(np.int32).tolist() == bits.tolist()


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
)
def test_any_float_survives(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    folder = tmp_path_factory.mktemp("floats")
    with open_store("memory:") as store:
        row = parse_training_row(_row_with(values))
        store.put("rows", row.row_id, row.to_batch())
        export(store, folder / "o", "rows", set())
    [again] = rows_of(folder / "o")
    assert encode_message(parse_training_row(again).to_batch()) == encode_message(row.to_batch())


def _row_with(values: list[float]) -> pa.RecordBatch:
    from tokenplane.capture.collect.training_rows import RolloutOutcome, placeholder

    row = placeholder(RolloutOutcome("r"), "x")
    n = len(values)
    return dataclasses.replace(
        row,
        token_ids=frozen(np.arange(n, dtype=np.int32)),
        token_mask=frozen(np.zeros(n, np.uint8)),
        log_probs=frozen(np.array(values, np.float32)),
        weight_versions=frozen(np.full(n, -1, np.int64)),
    ).to_batch()


def test_only_the_rollouts_that_are_named(told: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    argv = ["export", str(told), str(out), "--partition", "staged"]
    assert main([*argv, "--rollout", "gamma", "--rollout", "alpha"]) == 0
    found = [row.column("rollout_id")[0].as_py() for row in rows_of(out)]
    assert found == ["alpha"] * 3 + ["gamma"]


def test_many_rows_make_several_row_groups(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenplane.tools.export_parquet._GROUP_BYTES", 2000)
    assert export(story.store, tmp_path / "o", "staged", set()) == 8
    assert pq.ParquetFile(tmp_path / "o").num_row_groups > 2
    assert len(rows_of(tmp_path / "o")) == 8


def test_nothing_to_export_leaves_no_file(told: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["export", str(told), str(tmp_path / "o"), "--rollout", "gamma"]) == 1
    assert "nothing_to_export" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_row_leaves_the_earlier_file_alone(
    story: Story, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    out = folder / "rows.parquet"
    assert main(["export", story.url, str(out)]) == 0
    before = out.read_bytes()
    story.store.close()
    db = sqlite3.connect(story.path / "rows.sqlite")
    db.execute("UPDATE rows SET message = zeroblob(length(message)) WHERE key = 'beta'")
    db.commit()
    db.close()
    capsys.readouterr()
    assert main(["export", story.url, str(out)]) == 1
    assert "corrupt_row" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert list(folder.iterdir()) == [out]


def test_a_folder_that_is_not_there_is_one_line(
    told: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["export", str(told), str(tmp_path / "no" / "o")]) == 1
    assert capsys.readouterr().err.startswith("tokenplane export: os_error: ")
