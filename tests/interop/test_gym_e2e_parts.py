"""What `make gym-e2e` decides by itself: which folders it empties, and which rows it accepts."""

from __future__ import annotations

from pathlib import Path

import gym_e2e
import gym_e2e_processes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from bootstrap import ROOT, SetupError
from gym_e2e_check import check_rows
from gym_e2e_engine import Task, answer

from tests.server.serving import say, scripted, serving, text_of, user
from tokenplane.capture import Collector
from tokenplane.engine_adapter.engine_log import LoggedEngine
from tokenplane.schemas.training_row import TRAINING_ROW_SCHEMA, TrainingRow
from tokenplane.staging.token_source import TokenSource

TASK = Task("Why is it hot?", ("Blazing", "Warm"), (711, 407))


def test_only_folders_of_earlier_runs_are_emptied(tmp_path: Path) -> None:
    out = tmp_path / "out"
    gym_e2e.prepare(out)
    (out / "old").touch()
    gym_e2e.prepare(out)
    assert sorted(path.name for path in out.iterdir()) == [gym_e2e.MARKER, "logs"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(SetupError, match="not an earlier run's"):
        gym_e2e.prepare(foreign)
    assert (foreign / "thesis.tex").exists()


@pytest.mark.parametrize("ledger", gym_e2e_processes.LEDGERS)
def test_the_configuration_is_what_the_documentation_says(ledger: str, tmp_path: Path) -> None:
    path = gym_e2e_processes.gym_config(
        tmp_path, engine="http://127.0.0.1:1/v1", model="tiny", model_port=2, ledger=ledger
    )
    written = yaml.safe_load(path.read_text())
    text = (ROOT / "docs" / "gym.md").read_text()
    (block,) = (part for part in text.split("```yaml\n")[1:] if "token_id_capture:" in part)
    documented = yaml.safe_load(block.partition("```")[0])
    assert documented["token_id_capture"].keys() == written["token_id_capture"].keys()
    same = ("external_staging", "external_staging_backend", "rebuild_response", "enabled")
    for name in same:
        assert documented["token_id_capture"][name] == written["token_id_capture"][name]
    loaded = documented["token_id_capture"]["lineage_store"]
    assert (loaded == written["token_id_capture"]["lineage_store"]) == (ledger == "ours")
    assert documented.keys() < written.keys()


def test_the_scripted_engine_makes_four_calls_a_task() -> None:
    prompt = f"{TASK.question}<|im_start|>assistant\n"
    said = []
    for _ in range(4):
        said.append(answer([TASK], prompt))
        prompt += f"{said[-1]}<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"
    assert ["Blazing" in said[0], "Warm" in said[1], "[711, 407]" in said[2]] == [True] * 3
    assert said[3] == "The values are 711, 407."


@pytest.mark.engine
async def test_a_row_that_the_engine_never_ran_is_found(tmp_path: Path) -> None:
    log = tmp_path / "engine.jsonl"
    async with serving(LoggedEngine(scripted([say("One."), say("Two.")]), log)) as served:
        first = await served.chat([user("a")])
        said = {"role": "assistant", "content": text_of(first)}
        await served.chat([user("a"), said, user("b")])
        (row,) = Collector(TokenSource(served.store), served.parts.ledger).finalize("r1")
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    write_row(good, row)
    assert check_rows(good, log, expected=1) == []
    assert check_rows(good, log, expected=6) == ["1 rows, expected 6"]
    assert check_rows(tmp_path / "none.parquet", log, expected=1) == ["0 rows, expected 1"]
    tokens = row.token_ids.copy()
    tokens[0] ^= 1
    column = TRAINING_ROW_SCHEMA.get_field_index("token_ids")
    batch = row.to_batch()
    other = pa.array([tokens], type=batch.schema.field(column).type)
    write_batch(bad, batch.set_column(column, batch.schema.field(column), other))
    problems = check_rows(bad, log, expected=1)
    assert len(problems) == 2
    assert all("the engine never saw call" in problem for problem in problems)


def write_row(path: Path, row: TrainingRow) -> None:
    write_batch(path, row.to_batch())


def write_batch(path: Path, batch: pa.RecordBatch) -> None:
    pq.write_table(pa.Table.from_batches([batch]), path)
