"""Two generation workers behind one base URL; their parent is killed, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenplane.engine_adapter.replicas.process_tree import await_gone, command_of, descendants
from tokenplane.schemas.staged_row import parse_staged_row
from tokenplane.staging import open_store

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
READY_S = 480.0
ENGINES_GONE_S = 30.0
AGENTS_GONE_S = 120.0
"""Ray's two agents first try to tell its dead control process that they end."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The parent process and the base URL that it reports."""
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.replicas.worker_fleet", f"file://{tmp_path}/store"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        assert process.stdout is not None
        timer = threading.Timer(READY_S, process.kill)
        timer.start()
        line = process.stdout.readline().strip()
        timer.cancel()
        assert line.startswith("http://127.0.0.1:"), (line, (tmp_path / "log").read_text()[-4000:])
        yield process, line
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def is_agent(command: str) -> bool:
    return "Agent" in command.split(" ")[0]


def ask(root: str, messages: list[dict[str, Any]]) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 8, "temperature": 1.0}
    reply = httpx.post(f"{root}/rollouts/r1/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tokenplane-capture"] == "staged"
    return reply


def test_workers_share_rollouts_and_die_with_their_parent(
    fleet: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, url = fleet
    root = url.removesuffix("/v1")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    by_whom: list[str] = []
    # Serve chooses. Every turn finds its prefix wherever it lands; both must have had one.
    while len(set(by_whom)) < 2 or len(by_whom) < 4:
        assert len(by_whom) < 40, by_whom
        reply = ask(root, messages)
        by_whom.append(reply.headers["x-tokenplane-replica"])
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
    with open_store(f"file://{tmp_path}/store?mode=ro") as store:
        rows = [parse_staged_row(batch, key=key) for key, batch in store.scan("staged")]
    assert {row.call.weight_version for row in rows} == {3}
    for before, now, row in zip(by_whom, by_whom[1:], rows[1:], strict=False):
        if before != now:
            assert row.evidence.prefix_source == "store"
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("4\n")
    process.stdin.flush()
    assert process.stdout.readline() == "named 4\n"
    told = httpx.get(f"{root}/admin/weight_version", timeout=120).json()
    assert [one["version"] for one in told["replicas"].values()] == [4, 4]

    below = descendants([process.pid])
    commands = {pid: command_of(pid) for pid in below}
    assert sum("coordinator_main" in command for command in commands.values()) == 2
    assert sum("ServeReplica" in command for command in commands.values()) == 2
    assert any("raylet" in command for command in commands.values())
    process.send_signal(signal.SIGKILL)
    process.wait()
    engines = {pid: at for pid, at in below.items() if not is_agent(commands[pid])}
    left = await_gone(engines, ENGINES_GONE_S)
    assert not left, [command_of(pid) for pid in left]
    assert not await_gone(below, AGENTS_GONE_S)
    port = int(root.rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
