"""Every known failure of others has tests here, and each of them exists and runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| \[(D\d+)\]\((https://\S+)\) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
CASES = {ident: cells for ident, *cells in ROW.findall((ROOT / "docs" / "cases.md").read_text())}


@cache
def names_in(path: str) -> frozenset[str]:
    """The names of all test functions and methods of one file."""
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@cache
def imported_by_tests() -> str:
    """The text of every test file: a shipped suite counts only where a test file runs it."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))


def test_every_case_has_its_line() -> None:
    assert list(CASES) == [f"D{number}" for number in range(1, 29)]


@pytest.mark.parametrize("case", CASES)
def test_every_named_test_exists(case: str) -> None:
    named = NAMED.findall(CASES[case][3])
    assert named
    assert CASES[case][3].split() == [f"`{path}::{name}`" for path, name in named]
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert missing == []
    for path, name in named:
        assert name.startswith("test_")
        if not path.startswith("tests/"):
            layer = path.split("/", 1)[0]
            suites = rf"from tokenplane\.{layer}\.(testing|contract_suite\.suite) import"
            assert re.search(suites, imported_by_tests())
