"""What no commit may hold: a registry's address, a path of one machine, a put-off job, a store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Written in pieces, so that this file passes its own test.
REGISTRIES = re.compile(
    "|".join(
        re.escape("".join(pieces))
        for pieces in (
            ("py", "pi.org"),
            ("python", "hosted"),
            ("npm", "js.org"),
            ("npm", "js.com"),
            ("yarn", "pkg.com"),
            ("deb.", "debian.org"),
            ("down", "load.pytorch.org"),
            ("conda", ".anaconda.org"),
        )
    ),
    re.IGNORECASE,
)
MACHINE_PATHS = re.compile(
    r"(?<![\w.$}-])/(?:root|work|workspace|Users/\w+|home/\w+|opt/(?:wheels|py" + "pi))(?:/|$)",
    re.MULTILINE,
)
PUT_OFF = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b|#\s*HACK\b")
INDEX_OPTIONS = re.compile(r"^\s*(?:-i|--index-url|--extra-index-url|--find-links|-f)\b", re.M)


def matches(pattern: re.Pattern[str], files: list[Path], root: Path) -> list[str]:
    found = []
    for path in files:
        text = path.read_bytes().decode("utf-8", errors="replace")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(root)}:{line}: {match.group()}")
    return found


def test_no_file_names_a_package_registry(tracked: list[Path], root: Path) -> None:
    assert len(tracked) > 20
    assert matches(REGISTRIES, tracked, root) == []


def test_no_file_holds_a_path_of_one_machine(tracked: list[Path], root: Path) -> None:
    assert matches(MACHINE_PATHS, tracked, root) == []


def test_no_source_puts_a_job_off(tracked: list[Path], root: Path) -> None:
    sources = [path for path in tracked if path.suffix in {".py", ".sh", ".toml"}]
    assert matches(PUT_OFF, sources, root) == []


def test_no_store_is_committed(tracked: list[Path], root: Path) -> None:
    """`--store NAME` makes one in the folder that a command runs in."""
    found = [path.relative_to(root) for path in tracked if path.name == "tokenplane-store.json"]
    assert found == []


def test_no_lock_names_an_index(root: Path) -> None:
    assert matches(INDEX_OPTIONS, sorted((root / "requirements").iterdir()), root) == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (REGISTRIES, "https://files.python" + "hosted.org/x"),
        (REGISTRIES, '"resolved": "https://registry.npm' + 'js.org/x"'),
        (MACHINE_PATHS, "cache = '/ho" + "me/someone/x'"),
        (MACHINE_PATHS, "PATH=/ro" + "ot/bin"),
        (PUT_OFF, "# TO" + "DO: later"),
        (INDEX_OPTIONS, "--extra-index-url x"),
    ],
)
def test_the_patterns_find_what_they_are_for(
    pattern: re.Pattern[str], text: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(f"first line\n{text}\n")
    (found,) = matches(pattern, [tmp_path / "file"], tmp_path)
    assert found.startswith("file:2: ")


@pytest.mark.parametrize(
    "text",
    ["/rollouts/{id}/ro" + "ot/x", "https://host/wo" + "rk/x", "$HOME/ro" + "ot/x"],
    ids=["route", "url", "variable"],
)
def test_a_url_path_is_no_machine_path(text: str) -> None:
    assert MACHINE_PATHS.search(text) is None
