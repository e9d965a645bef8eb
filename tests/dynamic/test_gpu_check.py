"""What the GPU check does where something goes wrong: wrong arguments, late and early ends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import gpu_check
import gpu_check_parts
import gpu_check_speed
import pytest

from tests.dynamic import cpu_facade
from tests.dynamic.dynamic_engines import open_engine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--deadline-s", "nan"], "expected a time above 0, got 'nan'"),
        (["--deadline-s", "-5"], "expected a time above 0, got '-5'"),
        (["--switch-interval-s", "0"], "expected a time above 0, got '0'"),
        (["--pairs", "0"], "expected 1 or more, got '0'"),
        (["--load", "x"], "invalid choice: 'x'"),
        (["--only", "x"], "invalid choice: 'x'"),
        (["--out", __file__], "expected a folder, got the file"),
    ],
)
def test_a_wrong_argument_ends_before_anything_runs(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        gpu_check.main(["--rehearse", *argv])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_rehearsal_takes_what_is_asked_of_the_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[gpu_check_parts.Plan] = []

    async def step(plan: gpu_check_parts.Plan) -> str:
        plans.append(plan)
        return "done"

    monkeypatch.setitem(gpu_check.CHECKS, "throughput", step)
    monkeypatch.setattr(cpu_facade, "install", lambda: None)  # this file's fixture did
    asked = ["--only", "throughput", "--only", "throughput", "--load", "in_step", "--pairs", "5"]
    assert gpu_check.main(["--rehearse", *asked, "--out", str(tmp_path)]) == 0
    ((pairs, loads),) = [(plan.pairs, plan.loads) for plan in plans]
    assert (pairs, loads) == (5, ("in_step",))
    assert "--load in_step --pairs 5" in (tmp_path / "report.md").read_text()


def test_a_step_that_hangs_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_plan: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setitem(gpu_check.CHECKS, "rollout", hang)
    began = time.monotonic()
    plan = gpu_check_parts.Plan(True, 8, 1, "none", deadline_s=0.2)
    with pytest.raises(gpu_check_parts.CheckError, match="deadline of all steps"):
        gpu_check.run_check("rollout", plan)
    assert time.monotonic() - began < 20


def test_waiting_for_tokens_ends_with_the_call_that_was_to_make_them() -> None:
    async def scenario() -> None:
        engine = open_engine()
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ended.set_result("HTTP 500")
        try:
            async with asyncio.timeout(20):
                with pytest.raises(gpu_check_parts.CheckError, match="too early, with HTTP 500"):
                    await gpu_check_parts.tokens_made(engine, 1, ended)
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_a_call_that_was_not_captured_spoils_the_throughput() -> None:
    calls = gpu_check_speed.TURNS * gpu_check_speed.CONCURRENCY
    gpu_check_speed.check_captured(3 * calls, 3, {})
    for staged, failures in ((3 * calls - 1, {}), (3 * calls, {"unproven": 1})):
        with pytest.raises(gpu_check_parts.CheckError, match=f"of {3 * calls} calls"):
            gpu_check_speed.check_captured(staged, 3, failures)
