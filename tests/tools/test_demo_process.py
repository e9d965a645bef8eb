"""The demo's processes: its server ends with it, and no proxy comes between them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


@contextmanager
def demo(out: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A demo on the tiny model, whose progress is read line by line; killed at the end."""
    command = [sys.executable, "-m", "tokenplane.tools.cli", "demo", "--model", "tiny"]
    with subprocess.Popen(
        [*command, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_to(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """What the first line with ``pattern`` holds of it."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError("".join(said))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_of_a_killed_demo_ends(number: signal.Signals, tmp_path: Path) -> None:
    with demo(tmp_path / "out") as process:
        port = int(read_to(process, r"ready: http://127\.0\.0\.1:(\d+)")[1])
        assert listens(port)
        process.send_signal(number)
        assert process.wait(60) == -number
    end = time.monotonic() + 60
    while listens(port):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_proxy_of_the_environment_is_left_alone(tmp_path: Path) -> None:
    """Answers and control calls come from the server, although nothing listens at the proxy."""
    nowhere = "http://127.0.0.1:9"
    with demo(tmp_path / "out", HTTP_PROXY=nowhere, http_proxy=nowhere, NO_PROXY="") as process:
        read_to(process, "turn 3 of 3 answered, staged")
        read_to(process, "collecting the rollouts")
