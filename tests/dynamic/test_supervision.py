"""Processes and ports after a death: of the coordinator, of the worker, of a killed parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dynamic.dynamic_engines import open_engine
from tests.dynamic.dynamic_requests import ask
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.replicas import process_tree
from tokenplane.schemas.errors import DeadlineError, EngineDeadError
from tokenplane.staging import open_store

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
READY_S = 400.0
"""Importing torch and megatron-core takes most of it where other work goes on."""
_PARENT = """
import sys
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
process = CoordinatorProcess(vocab_size=10, max_requests=4, block_tokens=16)
print(process.pid, process.address(60), flush=True)
sys.stdin.read()
"""

_WORKER = """
import sys
from tests.dynamic import cpu_facade
cpu_facade.install()
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
from tokenplane.engine_adapter.worker.generation_config import parse_generation_config
from tokenplane.staging.open_store import open_store
own = {"max_sequence_length": 512, "block_size_tokens": 16, "expose_http_server": True}
config = parse_generation_config({"megatron": own, "stop_token_ids": []})
worker = MegatronGenerationWorker(load_model("tiny"), config, store=open_store(sys.argv[1]))
worker.set_rollout_weight_version(1)
worker.prepare_for_generation()
print("tokenplane: ready", worker.report_dp_openai_server_base_url(), flush=True)
sys.stdin.read()
"""
_SERVE = """
import sys
from tests.dynamic import cpu_facade
cpu_facade.install()
from tokenplane.tools import serve
words = ["--model", "tiny", "--engine", "coordinated", "--store", sys.argv[1]]
sys.exit(serve.main([*words, "--max-live-requests", "4", "--max-sequence-length", "512"]))
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


@contextmanager
def serving_process(script: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the genuine engine behind its coordinator, and its URL's root."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script, f"file://{folder}/store"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
    assert process.stdout is not None
    assert process.stdin is not None
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    try:
        with process.stdin, process.stdout:
            line = process.stdout.readline()
            assert line.startswith("tokenplane: ready http://"), (folder / "log").read_text()
            yield process, line.split()[2].removesuffix("/v1")
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def kill_while_it_answers(process: subprocess.Popen[str], url: str, body: Any) -> None:
    """SIGKILL at the first sign of a streamed answer."""
    with httpx.stream("POST", url, json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line:
                process.send_signal(signal.SIGKILL)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", [_WORKER, _SERVE], ids=["worker", "serve"])
def test_killing_a_serving_process_leaves_neither_process_nor_port(
    script: str, tmp_path: Path
) -> None:
    """Killed while it answers; the call that was not acknowledged is nowhere."""
    with serving_process(script, tmp_path) as (process, root):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        path = f"{root}/rollouts/r1/v1/chat/completions"
        first = httpx.post(path, json=body, timeout=60)
        assert first.headers["x-tokenplane-capture"] == "staged", first.text
        below = process_tree.descendants([process.pid])
        assert any("coordinator_main" in process_tree.command_of(pid) for pid in below)
        endless = body | {"max_tokens": 480, "ignore_eos": True, "stream": True}
        with pytest.raises(httpx.TransportError):
            kill_while_it_answers(process, path, endless)
        process.wait(30)
        left = process_tree.await_gone(below, 30)
        assert not left, [process_tree.command_of(pid) for pid in left]
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(root.rpartition(":")[2]))) != 0
    with open_store(f"file://{tmp_path}/store?mode=ro") as store:
        assert len(store.keys("staged")) == 1
