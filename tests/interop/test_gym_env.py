"""The Gym environment: made from the locks, found again at once, and missed loudly."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import bootstrap
import gym_env
import pytest

SCRIPT = Path(gym_env.__file__)


def test_it_holds_what_the_locks_say(gym_python: Path) -> None:
    code = (
        "import importlib.metadata as m, sys, nemo_gym.token_id_capture.staging;"
        "print(m.version('nemo-gym'), m.version('ray'), '%d.%d' % sys.version_info[:2],"
        "      'ray' in sys.modules, 'tokenplane' in sys.modules)"
    )
    done = subprocess.run(
        [gym_python, "-I", "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["0.7.0", "2.60.0", "3.12", "False", "False"]


def test_a_second_run_only_looks(gym_python: Path) -> None:
    assert gym_python.exists()  # made before, so that what follows is a second run
    started = time.monotonic()
    done = subprocess.run([sys.executable, SCRIPT], check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == gym_python
    assert done.stderr == ""
    assert time.monotonic() - started < 10


def test_nothing_of_it_is_in_the_product_s_environment() -> None:
    done = subprocess.run([sys.executable, "-c", "import nemo_gym"], capture_output=True, text=True)
    assert "No module named 'nemo_gym'" in done.stderr


def test_an_environment_that_is_missing_or_half_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENPLANE_CACHE", str(tmp_path))
    assert gym_env.gym_env_folder().parent == tmp_path
    with pytest.raises(bootstrap.SetupError, match="make install-test"):
        gym_env.gym_python()
    python = gym_env.gym_env_folder() / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(bootstrap.SetupError, match="make install-test"):
        gym_env.gym_python()
    (gym_env.gym_env_folder() / "done").touch()
    assert gym_env.gym_python() == python


@pytest.mark.parametrize("kind", gym_env.KINDS.values(), ids=gym_env.KINDS)
def test_other_locks_make_another_environment(kind: gym_env.Kind, tmp_path: Path) -> None:
    before = gym_env.gym_env_folder(kind)
    first, second = kind.locks
    for at, lock in enumerate(kind.locks):
        changed = tmp_path / lock.name
        changed.write_bytes(lock.read_bytes() + b"\n")
        locks = (changed, second) if at == 0 else (first, changed)
        assert gym_env.gym_env_folder(dataclasses.replace(kind, locks=locks)) != before
    assert gym_env.gym_env_folder(dataclasses.replace(kind)) == before


def test_the_kinds_have_folders_of_their_own() -> None:
    folders = {gym_env.gym_env_folder(kind) for kind in gym_env.KINDS.values()}
    assert len(folders) == len(gym_env.KINDS)


def test_make_runs_the_step() -> None:
    step = bootstrap.ROOT / "scripts" / "test_setup" / "nemo_gym"
    assert os.access(step, os.X_OK)
    assert "scripts/gym_env.py" in step.read_text()
