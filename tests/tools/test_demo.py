"""``tokenplane demo`` as a user runs it: on SmolLM2, from the command to what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tokenplane.engine_adapter.engine_log import read_engine_log
from tokenplane.tools.cli import main
from tokenplane.tools.demo.checks import replay_elsewhere, rows_equal_engine
from tokenplane.tools.rollout_view import load_rollout
from tokenplane.tools.store_reading import find_rollouts, open_for_reading

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run leaves; it ended well and in time."""
    folder = tmp_path_factory.mktemp("demo") / "demo-out"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tokenplane.tools.cli", "demo", "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "ready: http://127.0.0.1:" in done.stderr
    assert time.monotonic() - started < 400  # three minutes on an idle machine, model converted
    (folder.parent / "stdout").write_text(done.stdout)
    return folder


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def test_the_summary_is_as_promised(out: Path) -> None:
    found = summary(out)
    assert found["calls"] >= 6
    assert found["staged"] == found["calls"]
    assert found["capture_failed"] == 0
    assert found["training_rows"] == found["rollouts"] == 2
    assert found["prefix_exact"] is True
    assert found["replay_identical"] is True
    assert found["spanning_calls"] >= 1
    assert found["row_tokens"] > found["trainable_tokens"] > 0
    assert found["stage_ms_p50"] > 0


def test_a_table_per_rollout_is_printed(out: Path) -> None:
    text = (out.parent / "stdout").read_text()
    assert [line.strip() for line in text.splitlines() if line.startswith("rollout-")] == [
        "rollout-0",
        "rollout-1",
    ]
    assert "v0 → v1" in text
    assert text.count(" ms") >= 6
    assert json.loads(text[text.index("{") :]) == summary(out)


def test_the_export_holds_the_published_rows(out: Path) -> None:
    table = pq.read_table(out / "rows.parquet")
    assert table.num_rows == 2
    assert sum(len(ids) for ids in table["token_ids"]) == summary(out)["row_tokens"]
    mask = sum(sum(mask) for mask in table["token_mask"].to_pylist())
    assert mask == summary(out)["trainable_tokens"]
    assert {v for vs in table["weight_versions"].to_pylist() for v in vs} == {-1, 0, 1}


def test_the_next_commands_work(out: Path, capsys: Capture) -> None:
    assert main(["replay", str(out / "store"), "rollout-0"]) == 0
    text = capsys.readouterr().out
    assert "| <|im_start|>user" in text
    assert "| The calculator says: " in text or "| <|im_start|>tool" in text
    assert main(["audit", str(out / "store"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["totals"]["spanning_calls"] == summary(out)["spanning_calls"]
    assert found["trainer_version"] == 1


def test_the_engines_log_would_convict_a_wrong_row(out: Path, tmp_path: Path) -> None:
    """The comparison is not one that always agrees: change one id, lose one line, add one."""
    with open_for_reading(str(out / "store")) as store:
        views = [load_rollout(store, name, k) for name, k in find_rollouts(store).items()]
        lines = (out / "engine.jsonl").read_text().splitlines()
        assert rows_equal_engine(views, out / "engine.jsonl") == []
        first = json.loads(lines[0])
        for name, field in (
            ("prompt", "prompt_token_ids"),
            ("sampled", "generated_token_ids"),
            ("logprobs", "generated_log_probs"),
        ):
            changed = {**first, field: [*first[field][:-1], first[field][-1] + 1]}
            log = tmp_path / field
            log.write_text("\n".join([json.dumps(changed), *lines[1:]]) + "\n")
            assert rows_equal_engine(views, log) == [f"{first['request_id']}: {name} differ"]
        (tmp_path / "short").write_text("\n".join(lines[1:]) + "\n")
        assert rows_equal_engine(views, tmp_path / "short") == [
            f"{first['request_id']}: not in the engine's log"
        ]
        stranger = json.dumps({**first, "request_id": "stranger"})
        (tmp_path / "long").write_text("\n".join([*lines, stranger]) + "\n")
        assert rows_equal_engine(views, tmp_path / "long") == ["stranger: no staged row"]


def test_a_replay_elsewhere_notices_a_wrong_export(out: Path, tmp_path: Path) -> None:
    table = pq.read_table(out / "rows.parquet")
    pq.write_table(table.slice(0, 1), tmp_path / "rows.parquet")
    verdict, said = replay_elsewhere(out / "store", tmp_path / "rows.parquet")
    assert not verdict
    assert "row_not_exported" in said


def test_every_answer_is_in_the_engines_log(out: Path) -> None:
    requests = list(read_engine_log(out / "engine.jsonl"))
    assert len(requests) == summary(out)["calls"]
    assert all(len(r.generated_token_ids) == len(r.generated_log_probs) for r in requests)
