"""People, pre-commit and CI go through the same make targets."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

PROMISED = {
    *("clean", "demo", "dist-check", "format", "help", "install", "lint", "lock", "test"),
    "test-fast",
}


def run_make(root: Path, *arguments: str) -> str:
    """What make prints, as if no other make had started this test run."""
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        ["make", *arguments], cwd=root, env=env, check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture
def targets(root: Path) -> set[str]:
    return set(re.findall(r"^\.PHONY: (\S+)$", (root / "Makefile").read_text(), re.MULTILINE))


def test_help_explains_every_target(root: Path, targets: set[str]) -> None:
    lines = [line.split(maxsplit=1) for line in run_make(root, "help").splitlines()]
    assert {name for name, text in lines if text} == targets
    assert targets >= PROMISED


def test_hooks_call_make_targets_only(root: Path, targets: set[str]) -> None:
    config = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    entries = [hook["entry"].split() for hook in config["repos"][0]["hooks"]]
    assert entries
    assert all(entry[0] == "make" and set(entry[1:]) <= targets for entry in entries)


def test_ci_is_make_test(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"


def test_make_test_ends_with_pytest(root: Path) -> None:
    commands = run_make(root, "--dry-run", "test").strip().splitlines()
    assert commands[-1].strip().startswith(".venv/bin/python -m pytest")
    lint = [line for line in commands if re.search(r"ruff check|ruff format --check|mypy", line)]
    assert len(lint) == 3


def test_every_test_set_up_step_is_executable_or_explains(root: Path) -> None:
    for step in (root / "scripts" / "test_setup").iterdir():
        assert os.access(step, os.X_OK) or step.name == "README.md"
