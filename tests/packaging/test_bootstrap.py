"""Finding interpreters, the private uv, and what a second install costs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bootstrap
import interpreters
import pytest


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but one empty folder, and no pyenv."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


@pytest.fixture
def no_uv(tmp_path: Path) -> Path:
    """In the place of uv: finds no interpreter."""
    return write_script(tmp_path / "uv", "exit 2")


def real(path: Path) -> Path:
    """A program at `path` that is this interpreter."""
    return write_script(path, f'exec "{sys.executable}" "$@"')


def test_a_python_on_path_is_found(bare: Path, no_uv: Path) -> None:
    real(bare / "bin" / "python3.12")
    assert interpreters.find_python("3.12", no_uv) == Path(sys.executable)


def test_a_shim_that_does_not_run_is_passed_over(bare: Path, no_uv: Path) -> None:
    write_script(bare / "bin" / "python3.12", "echo 'command not found' >&2; exit 127")
    assert interpreters.find_python("3.12", no_uv) is None
    real(bare / "pyenv" / "versions" / "3.12.1" / "bin" / "python")
    assert interpreters.find_python("3.12", no_uv) == Path(sys.executable)


def test_an_interpreter_of_another_version_is_passed_over(bare: Path, no_uv: Path) -> None:
    real(bare / "bin" / "python3.13")
    assert interpreters.find_python("3.13", no_uv) is None


def test_the_newest_release_of_pyenv_is_taken_first(
    bare: Path, no_uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(
        interpreters, "_probe", lambda path, version: tried.append(path.parents[1].name)
    )
    for release in ("3.12.9", "3.12.10", "3.12.1", "3.13.0"):
        real(bare / "pyenv" / "versions" / release / "bin" / "python")
    interpreters.find_python("3.12", no_uv)
    assert tried == ["3.12.10", "3.12.9", "3.12.1"]


def test_uv_is_asked_last(bare: Path) -> None:
    uv = write_script(bare / "uv", f'echo "{sys.executable}"')
    assert interpreters.find_python("3.12", uv) == Path(sys.executable)


def test_where_none_is_found_the_one_that_uv_fetches_is_taken(bare: Path) -> None:
    # Finds nothing until it has "installed", as uv does on a machine without that version.
    fetched = bare / "fetched"
    uv = write_script(
        bare / "uv",
        f'if [ "$2" = install ]; then : > "{fetched}"; exit 0; fi\n'
        f'[ -e "{fetched}" ] && echo "{sys.executable}"',
    )
    assert bootstrap._base_python(uv) == Path(sys.executable)


def test_where_none_can_be_fetched_it_says_what_to_do(bare: Path, no_uv: Path) -> None:
    with pytest.raises(bootstrap.SetupError, match="UV_PYTHON_INSTALL_MIRROR"):
        bootstrap._base_python(no_uv)


def test_the_entry_passes_over_a_broken_python3(bare: Path, root: Path) -> None:
    write_script(bare / "bin" / "python3", "exit 127")
    real(bare / "bin" / "python3.12")
    for tool in ("dirname", "sh"):
        os.symlink(shutil.which(tool, path="/usr/bin:/bin") or "", bare / "bin" / tool)
    done = subprocess.run(
        ["/bin/sh", str(root / "scripts" / "bootstrap.sh"), "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "install" in done.stdout


def test_uv_is_installed_with_its_hash_and_once(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "CACHE", tmp_path)
    first = bootstrap.private_uv()
    version = subprocess.run([first, "--version"], capture_output=True, text=True).stdout
    assert f"uv=={version.split()[1]}" == (root / "requirements" / "uv.in").read_text().strip()
    changed_at = first.stat().st_mtime_ns
    assert bootstrap.private_uv() == first
    assert first.stat().st_mtime_ns == changed_at


def test_a_wrong_hash_installs_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = (root / "requirements" / "uv.in").read_text().strip()
    (tmp_path / "uv.txt").write_text(f"{line} \\\n    --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(bootstrap, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(bootstrap, "REQUIREMENTS", tmp_path)
    assert bootstrap.main(["uv", "--version"]) == 1
    assert "exit status 1 from" in capfd.readouterr().err
    assert not list((tmp_path / "cache").glob("*/done"))


def test_uv_comes_without_ensurepip_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A Python as Debian splits it: `venv` fails for want of ensurepip, pip is there.
    python = write_script(
        tmp_path / "python",
        f'if [ "$2" = venv ]; then echo "ensurepip is not available"; exit 1; fi\n'
        f'exec "{bootstrap.private_uv().with_name("python")}" "$@"',
    )
    monkeypatch.setattr(bootstrap, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "executable", str(python))
    uv = bootstrap.private_uv()
    assert subprocess.run([uv, "--version"], capture_output=True).returncode == 0


def test_a_python_without_pip_and_ensurepip_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = write_script(tmp_path / "python", 'echo "no module named $2"; exit 1')
    monkeypatch.setattr(bootstrap, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "executable", str(python))
    assert bootstrap.main(["uv", "--version"]) == 1
    said = capsys.readouterr().err
    assert "has neither ensurepip nor pip" in said
    assert "python3-venv" in said


def test_a_second_install_is_quick(root: Path) -> None:
    def install() -> float:
        start = time.perf_counter()
        subprocess.run(["make", "-s", "install"], cwd=root, check=True, capture_output=True)
        return time.perf_counter() - start

    install()
    assert min(install() for _ in range(3)) < 2
