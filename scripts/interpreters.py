"""Which Python 3.12 the environment is built on, and where it is searched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

PROBE = "import sys, ssl, ctypes; print('%d.%d' % sys.version_info[:2], sys.executable)"
"""Prints the version; fails on a shim that does not run and on a build without ssl or ctypes."""


def find_python(version: str, uv: Path) -> Path | None:
    """The first interpreter of `version` ("3.12") that runs, or None. Downloads nothing."""
    for candidate in _candidates(version, uv):
        found = _probe(candidate, version)
        if found is not None:
            return found
    return None


def fetch_python(version: str, uv: Path) -> Path:
    """Let uv fetch `version` below UV_PYTHON_INSTALL_DIR and return it.

    Raises:
        subprocess.CalledProcessError: uv could not fetch it.
    """
    subprocess.run([uv, "python", "install", "--no-bin", version], check=True)
    command = [str(uv), "python", "find", "--managed-python", "--no-project", version]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def _candidates(version: str, uv: Path) -> Iterator[Path]:
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from sorted(pyenv.glob(f"{version}*/bin/python"), key=_release, reverse=True)
    command = [str(uv), "python", "find", "--no-python-downloads", "--no-project", version]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode == 0:
        yield Path(found.stdout.strip())


def _release(python: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in python.parents[1].name.split(".") if part.isdigit())


def _probe(python: Path, version: str) -> Path | None:
    try:
        command = [str(python), "-c", PROBE]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found, _, executable = result.stdout.strip().partition(" ")
    return Path(executable) if result.returncode == 0 and found == version else None
