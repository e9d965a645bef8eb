"""``tokenplane inspect template``: a table for people, JSON for machines, honest exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenplane.tools.inspecting import template as inspect_template


def test_json(tokenizers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tokenizers_folder / "smollm2")
    assert inspect_template.main([folder, "--terminator", "<|endoftext|>", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["terminators"] == {"<|endoftext|>": 0, "<|im_end|>": 2}
    assert report["totals"] == {"exact": 29, "refused": 2, "template_equal": 1}
    rows = {row["shape"]: row for row in report["shapes"]}
    assert rows["plain"]["outcome"] == "exact"
    assert rows["system changed"]["code"] == "prefix_opening_differs"
    assert report["needs"]["none_content"] is False
    assert len(report["template_fingerprint"]) == 64


def test_table(tokenizers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_template.main([str(tokenizers_folder / "qwen3")]) == 0
    printed = capsys.readouterr().out
    assert "parallel calls" in printed
    assert "new_text_lost_or_moved: The template drops" in printed


def test_a_folder_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_template.main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no tokenizer could be loaded" in captured.err
