"""``bench.splice`` measures real splices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenplane.tools.bench import splice as bench_splice


def test_json(tokenizers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tokenizers_folder / "smollm2")
    assert bench_splice.main([folder, "--rounds", "1", "3", "--repeat", "1", "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)
    assert 500 < small["tokens"] < large["tokens"]
    assert all(value > 0 for row in (small, large) for value in row.values())


def test_table_and_usage(tokenizers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tokenizers_folder / "smollm2")
    assert bench_splice.main([folder, "--rounds", "1", "--repeat", "1"]) == 0
    assert "full encode" in capsys.readouterr().out
    assert bench_splice.main([str(tokenizers_folder)]) == 2
    assert "no tokenizer could be loaded" in capsys.readouterr().err
