"""Set-up with the standard library only: a private uv, Python 3.12, .venv, and the locks.

    bootstrap.py install   make or refresh .venv from the locks (nothing to do: well under 2 s)
    bootstrap.py lock      write requirements/*.txt anew (--upgrade: to the newest releases)
    bootstrap.py uv ...    run the private uv

Everything it makes lies in .venv and .cache; nothing outside the tree changes but uv's own
download cache. A stamp in .venv names what it was made from, so a second run is a comparison.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from interpreters import fetch_python, find_python

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
VENV = ROOT / ".venv"
STAMP = VENV / "tokenplane-stamp.json"
REQUIREMENTS = ROOT / "requirements"
PYTHON_VERSION = "3.12"
"""Megatron Bridge supports no other."""


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bootstrap")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="make or refresh .venv from the locks")
    lock = commands.add_parser("lock", help="write requirements/*.txt anew")
    lock.add_argument("--upgrade", action="store_true", help="do not keep the present pins")
    commands.add_parser("uv", help="run the private uv; all that follows is its own")
    arguments = sys.argv[1:] if argv is None else argv
    # argparse would take uv's options for its own.
    for_uv = arguments[1:] if arguments[:1] == ["uv"] else []
    options = parser.parse_args(arguments[: len(arguments) - len(for_uv)])
    os.environ.setdefault("UV_HTTP_TIMEOUT", "300")
    os.environ.setdefault("UV_PYTHON_INSTALL_DIR", str(CACHE / "python"))
    try:
        if options.command == "install":
            with _exclusive():
                install()
        elif options.command == "lock":
            write_locks(upgrade=options.upgrade)
        else:
            return subprocess.run([private_uv(), *for_uv]).returncode
    except SetupError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(f"bootstrap: exit status {error.returncode} from: {command}", file=sys.stderr)
        return 1
    return 0


def install() -> None:
    """Make `.venv` equal to the lock, and the project importable from the tree."""
    locked = _fingerprint(REQUIREMENTS / "dev.txt", REQUIREMENTS / "build.txt")
    project = _fingerprint(ROOT / "pyproject.toml")
    stamp = _read_stamp()
    if stamp == {"locked": locked, "project": project}:
        return
    python = VENV / "bin" / "python"
    uv = private_uv()
    STAMP.unlink(missing_ok=True)
    if stamp.get("locked") != locked:
        if not _runs(python):
            base = _base_python(uv)
            _say(f"making .venv on {base}")
            _run(uv, "venv", "--quiet", "--clear", "--no-project", "--python", base, VENV)
        _say("installing the locked packages")
        _run(
            *(uv, "pip", "sync", "--quiet", "--python", python, "--require-hashes"),
            *("--build-constraints", REQUIREMENTS / "build.txt", REQUIREMENTS / "dev.txt"),
        )
    # setuptools comes from the lock: no isolation means no second, unpinned one.
    _run(
        *(uv, "pip", "install", "--quiet", "--python", python, "--no-deps"),
        *("--no-build-isolation", "--reinstall-package", "tokenplane", "--editable", ROOT),
    )
    STAMP.write_text(json.dumps({"locked": locked, "project": project}))
    _say("ready: .venv/bin/python")


def write_locks(*, upgrade: bool) -> None:
    """Write requirements/*.txt: versions and hashes, for every platform, without any address."""
    uv = private_uv()
    python = _base_python(uv)
    common: list[str | Path] = [
        *("--universal", "--python", python),
        *("--generate-hashes", "--no-header", "--no-annotate", "--quiet"),
        *(["--upgrade"] if upgrade else []),
    ]
    ours = ["--python-version", PYTHON_VERSION, *common]
    # NeMo-Gym declares a newer Python than it needs; scripts/gym_env.py installs it all the same.
    alone = ["--python-version", "3.13.14", "--no-deps", *common]
    # All that it declares, without itself: only the step above looks away from its declaration.
    around = ["--python-version", "3.13.14", "--no-emit-package", "nemo-gym", *common]
    dev = REQUIREMENTS / "dev.txt"
    project = "pyproject.toml"
    _run(uv, "pip", "compile", *ours, "--all-extras", project, "-o", dev)
    # The base install gets the versions that the tests run with.
    _run(uv, "pip", "compile", *ours, "-c", dev, project, "-o", REQUIREMENTS / "base.txt")
    special = {"gym-nodeps": alone, "gym-full": around}
    for name in ("build", "gym", "gym-full", "gym-nodeps", "uv"):
        source, target = REQUIREMENTS / f"{name}.in", REQUIREMENTS / f"{name}.txt"
        options = special.get(name, ours)
        _run(uv, "pip", "compile", *options, source, "-o", target)


def private_uv() -> Path:
    """The pinned uv under .cache, installed on first use.

    Raises:
        SetupError: this Python can make no environment and has no pip.
    """
    lock = REQUIREMENTS / "uv.txt"
    home = CACHE / f"uv-{_fingerprint(lock)[:12]}"
    done = home / "done"
    uv = home / "bin" / "uv"
    if done.exists() and os.access(uv, os.X_OK):
        return uv
    _say("installing uv under .cache")
    shutil.rmtree(home, ignore_errors=True)
    pip_install = ["install", "--quiet", "--require-hashes", "--no-deps", "-r", str(lock)]
    made = subprocess.run([sys.executable, "-m", "venv", home], capture_output=True, text=True)
    if made.returncode == 0:
        _run(home / "bin" / "python", "-m", "pip", *pip_install)
    elif subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        raise SetupError(
            f"{sys.executable} has neither ensurepip nor pip, so uv cannot be installed; "
            "install one of them (Debian: python3-venv), or name another Python: "
            f"make install PYTHON=/path/to/python3\n{made.stdout}{made.stderr}".rstrip()
        )
    else:
        shutil.rmtree(home, ignore_errors=True)
        _run(sys.executable, "-m", "pip", *pip_install, "--target", home)
    done.touch()
    return uv


def _base_python(uv: Path) -> Path:
    """A Python 3.12 of this machine, else one that uv fetches.

    Raises:
        SetupError: there is none, and none could be fetched.
    """
    found = find_python(PYTHON_VERSION, uv)
    if found is not None:
        return found
    _say(f"no Python {PYTHON_VERSION} on PATH, in pyenv or where uv looks; uv fetches one")
    try:
        return fetch_python(PYTHON_VERSION, uv)
    except subprocess.CalledProcessError as error:
        raise SetupError(
            f"uv could not fetch Python {PYTHON_VERSION} (above). Install one so that "
            f"python{PYTHON_VERSION} runs, or name a mirror in UV_PYTHON_INSTALL_MIRROR"
        ) from error


@contextmanager
def _exclusive() -> Iterator[None]:
    """One install at a time per tree."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fingerprint(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def _read_stamp() -> dict[str, str]:
    """What `.venv` was made from; empty when unknown or when its interpreter has gone."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and (VENV / "bin" / "python").exists() else {}


def _runs(python: Path) -> bool:
    try:
        command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return False
    return bool(result.stdout.strip() == PYTHON_VERSION)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, cwd=ROOT)


def _say(text: str) -> None:
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
