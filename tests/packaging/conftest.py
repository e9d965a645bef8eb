"""The tree as the packaging tests see it, and one built distribution for all of them."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def layers(project: dict[str, Any]) -> tuple[str, ...]:
    """The five top-level folders, lowest first, in the order in which pyproject.toml lists them."""
    names = [name.split(".") for name in project["tool"]["setuptools"]["packages"]]
    return tuple(parts[1] for parts in names if len(parts) == 2)


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """Every file that is committed or would be: tracked, or new and not ignored; no links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = [REPOSITORY / name for name in listed.split("\0") if name]
    return [path for path in files if path.is_file() and not path.is_symlink()]


@pytest.fixture(scope="session")
def uv() -> Callable[..., str]:
    """Run the private uv and return what it printed."""

    def run(*args: str | Path, cwd: Path = REPOSITORY) -> str:
        command = ["sh", str(REPOSITORY / "scripts" / "bootstrap.sh"), "uv", *map(str, args)]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, f"uv {args}:\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def wheel(
    tmp_path_factory: pytest.TempPathFactory,
    tracked: list[Path],
    uv: Callable[..., str],
) -> Path:
    """The wheel built from the sdist built from a copy of the tree, as a release would be."""
    source = tmp_path_factory.mktemp("source")
    for path in tracked:
        target = source / path.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    out = tmp_path_factory.mktemp("dist")
    # The setuptools of the lock builds it: an isolated build would take whatever is newest.
    python = REPOSITORY / ".venv" / "bin" / "python"
    uv("build", "--no-build-isolation", "--python", python, "--out-dir", out, cwd=source)
    (built,) = out.glob("*.whl")
    assert len(list(out.glob("*.tar.gz"))) == 1
    return built
