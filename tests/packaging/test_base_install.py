"""The wheel in a fresh environment without extras: it imports, quickly, and nothing heavy comes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import gym_env
import pytest
from bootstrap import private_uv
from interpreters import find_python

pytestmark = pytest.mark.slow

# 3.13 is tested wherever one is found; 3.12 is what the tests themselves run on.
VERSIONS = [v for v in ("3.12", "3.13") if find_python(v, private_uv()) is not None]
HEAVY = ["torch", "ray", "transformers", "fastapi", "redis", "transfer_queue", "megatron"]
MAX_IMPORT_S = 1.5

IMPORT = """
import json, sys, time
start = time.perf_counter()
import tokenplane.schemas, tokenplane.staging, tokenplane.capture
seconds = time.perf_counter() - start
tops = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"seconds": seconds, "tops": tops, "file": tokenplane.schemas.__file__}))
"""

USE = """
from tokenplane.staging import open_store
with open_store("memory:") as store:
    assert store.partitions() == []
"""


def run_python(environment: Path, code: str) -> str:
    done = subprocess.run(
        [environment / "bin" / "python", "-I", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=VERSIONS)
def environment(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    root: Path,
    wheel: Path,
    uv: Callable[..., str],
) -> Path:
    """A new environment that holds the base lock and the wheel."""
    version = str(request.param)
    path = tmp_path_factory.mktemp("base") / version
    python = find_python(version, private_uv())
    assert python is not None
    uv("venv", "--no-project", "--python", python, path)
    base = root / "requirements" / "base.txt"
    uv("pip", "sync", "--python", path / "bin" / "python", "--require-hashes", base)
    uv("pip", "install", "--python", path / "bin" / "python", "--no-deps", wheel)
    return path


def test_the_tests_own_python_is_among_them() -> None:
    assert "3.12" in VERSIONS


def test_the_three_base_packages_import_quickly_and_alone(environment: Path) -> None:
    runs = [json.loads(run_python(environment, IMPORT)) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < MAX_IMPORT_S
    assert not set(HEAVY) & set(runs[0]["tops"])
    assert Path(runs[0]["file"]).is_relative_to(environment)


def test_no_requirement_is_missing(environment: Path, uv: Callable[..., str]) -> None:
    uv("pip", "check", "--python", environment / "bin" / "python")


def test_a_store_opens(environment: Path) -> None:
    run_python(environment, USE)


def test_gym_s_library_loads_our_ledger_by_name(
    environment: Path, root: Path, tmp_path: Path
) -> None:
    """Gym's loader, its conformance checks and its own ledger beside ours: on this Python, with
    nothing but the base install and Gym's capture library."""
    (gym,) = gym_env.gym_python().parents[1].glob("lib/python3*/site-packages/nemo_gym")
    (tmp_path / "gym").mkdir()
    (tmp_path / "gym" / "nemo_gym").symlink_to(gym)
    checks = root / "tests" / "interop" / "gym_ledger_checks.py"
    done = subprocess.run(
        [environment / "bin" / "python", "-B", checks, f"file://{tmp_path}/store", tmp_path, "3"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "gym")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["type"] == "tokenplane.capture.gym_ledger:GymLedger"
    assert found["is_capture_ledger"]
    assert found["conformance"] == ["lineage_visibility", "fresh_client_lineage_visibility"]
    assert not set(HEAVY) & set(found["loaded"])


def test_the_command_explains_itself(environment: Path) -> None:
    done = subprocess.run(
        [environment / "bin" / "tokenplane", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
