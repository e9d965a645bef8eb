"""Makes the environment of the real NeMo-Gym, which the interop tests run as a separate process.

    gym_env.py [light|full]    make the environment if it is not there, and print its interpreter

NeMo-Gym declares a newer Python than it needs and pins what the product pins differently, so it
never enters `.venv`: it lives in the cache, in a folder named after the locks it is made from.

light, for the test suite: requirements/gym.in names what Gym's capture library and its model
server import, and what our base install needs to be loaded by them; what Gym declares is left out.
full, for `make gym-e2e`: on Python 3.13, with everything that Gym declares.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bootstrap import CACHE, PYTHON_VERSION, REQUIREMENTS, SetupError, private_uv
from interpreters import fetch_python, find_python

BUILD_LOCK = REQUIREMENTS / "build.txt"


@dataclass(frozen=True)
class Kind:
    """One sort of environment."""

    name: str
    python_version: str
    locks: tuple[Path, Path]
    """What uv installs, then what is installed whatever Python it declares."""


LIGHT = Kind("gym", PYTHON_VERSION, (REQUIREMENTS / "gym.txt", REQUIREMENTS / "gym-nodeps.txt"))
FULL = Kind("gym-full", "3.13", (REQUIREMENTS / "gym-full.txt", REQUIREMENTS / "gym-nodeps.txt"))
KINDS = {"light": LIGHT, "full": FULL}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gym_env", description=__doc__)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="light")
    kind = KINDS[parser.parse_args(argv).kind]
    os.environ.setdefault("UV_HTTP_TIMEOUT", "300")
    os.environ.setdefault("UV_PYTHON_INSTALL_DIR", str(CACHE / "python"))
    try:
        print(make_gym_env(kind))
    except (OSError, SetupError, subprocess.CalledProcessError) as error:
        print(f"gym_env: {error}", file=sys.stderr)
        return 1
    return 0


def gym_env_folder(kind: Kind = LIGHT) -> Path:
    """Where the environment for the present locks lies, whether or not it was made."""
    digest = hashlib.sha256()
    for file in (*kind.locks, BUILD_LOCK, Path(__file__)):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return cache_folder() / f"{kind.name}-{digest.hexdigest()[:16]}"


def gym_python() -> Path:
    """The interpreter of a finished environment.

    Raises:
        SetupError: it was not made; the message names the step that makes it.
    """
    folder = gym_env_folder()
    if not (folder / "done").exists():
        raise SetupError(f"no NeMo-Gym environment at {folder}; `make install-test` makes it")
    return folder / "bin" / "python"


def make_gym_env(kind: Kind = LIGHT) -> Path:
    """The interpreter of the environment, which is made first where it is missing or half made."""
    folder = gym_env_folder(kind)
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "gym.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "done").exists():
            return python
        print(f"gym_env: making {folder}", file=sys.stderr, flush=True)
        uv = private_uv()
        base = find_python(kind.python_version, uv) or fetch_python(kind.python_version, uv)
        _run(uv, "venv", "--quiet", "--clear", "--no-project", "--python", base, folder)
        _run(
            *(uv, "pip", "sync", "--quiet", "--compile-bytecode", "--python", python),
            *("--require-hashes", "--build-constraints", BUILD_LOCK, kind.locks[0]),
        )
        # uv cannot look away from Requires-Python; pip, itself from the lock above, can.
        _run(
            *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--ignore-requires-python", "--require-hashes", "-r", kind.locks[1]),
        )
        (folder / "done").touch()
    return python


def cache_folder() -> Path:
    """The cache that several clones may share, as the Makefile names it."""
    given = os.environ.get("TOKENPLANE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else (Path(base) if base else Path.home() / ".cache") / "tokenplane"


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
