"""Processes and ports after a death: of the coordinator, of the worker, of a killed parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dynamic.dynamic_engines import open_engine
from tests.dynamic.dynamic_requests import ask
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.engine import EngineState
from tokenplane.schemas.errors import DeadlineError, EngineDeadError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
_PARENT = """
import sys
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
process = CoordinatorProcess(vocab_size=10, max_requests=4, block_tokens=16)
print(process.pid, process.address(60), flush=True)
sys.stdin.read()
"""


def gone(pid: int) -> bool:
    """True once the process has ended (a zombie has: its new parent may be slow to reap)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def await_gone(pid: int) -> None:
    ends = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < ends, f"process {pid} outlived its parent"
        time.sleep(0.05)


def test_a_dead_coordinator_ends_the_engine_within_its_deadline_and_a_close_leaves_nothing() -> (
    None
):
    async def scenario() -> None:
        engine = open_engine(mode="coordinator")
        pid = engine.coordinator_pid()
        assert pid is not None
        await engine.generate(ask([5, 6]))
        task = asyncio.create_task(engine.generate(ask([5, 6], max_tokens=400)))
        while not engine.stats().live_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.pause()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            with pytest.raises(EngineDeadError, match="coordinator process has ended"):
                await task
        assert engine.state() is EngineState.DEAD
        with pytest.raises(EngineDeadError):
            await engine.unpause()
        with pytest.raises(EngineDeadError):
            await engine.generate(ask([5, 6]))
        await engine.close()
        assert gone(pid)

    asyncio.run(scenario())


def test_killing_the_parent_ends_the_coordinator() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        pid, address = parent.stdout.readline().split()
        assert address.startswith("tcp://127.0.0.1:")
        assert not gone(int(pid))
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        await_gone(int(pid))


def test_a_coordinator_that_does_not_start_in_time_is_reported_and_ended() -> None:
    process = CoordinatorProcess(vocab_size=10, max_requests=4, block_tokens=16)
    with pytest.raises(DeadlineError, match="did not start"):
        process.address(0.01)
    process.close(0.1)
    process.close(0.1)
    assert process.poll() is not None


def test_a_coordinator_that_fails_is_reported() -> None:
    process = CoordinatorProcess(vocab_size=10, max_requests=4, block_tokens=16, policy="none")
    with pytest.raises(EngineDeadError, match="ended while starting"):
        process.address(60)
    process.close()
