"""``tokenplane serve`` as its own process, for tests that need a real socket, signal or restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.server.forked_serve import ForkedServe, zygote

READY_S = 120.0
"""Importing torch and megatron-core takes most of it where other tests run at the same time."""


@dataclass
class ServeProcess:
    """A started server; ``url`` is what its ready line named."""

    process: subprocess.Popen[bytes] | ForkedServe
    url: str
    ready_line: str
    stdout: Path

    @property
    def output(self) -> list[str]:
        """Lines on stdout after the ready line."""
        return self.stdout.read_text().splitlines()[1:]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; gives the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def serve_process(
    store: str,
    log: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    ready_s: float = READY_S,
    fresh: bool = False,
) -> Iterator[ServeProcess]:
    """A server over the tiny model; killed at the end if the test has not stopped it.

    ``fresh`` starts the installed command itself and not a fork of a process that has imported
    everything: as users do, and several seconds later.
    """
    argv = ["--model", "tiny", "--store", store, *arguments]
    out = log.with_name(f"{log.name}.{time.monotonic_ns()}.out")
    if fresh:
        command = [sys.executable, "-m", "tokenplane.tools.cli", "serve", *argv]
        with out.open("wb") as output, log.open("ab") as errors:
            process: subprocess.Popen[bytes] | ForkedServe = subprocess.Popen(
                command, stdout=output, stderr=errors, env=os.environ | (env or {})
            )
    else:
        process = zygote().fork(argv, out=out, err=log, env=env or {})
    try:
        line = _ready_line(process, out, log, ready_s)
        yield ServeProcess(process, line.split()[2], line, out)
    finally:
        process.kill()
        process.wait(60)


def _ready_line(
    process: subprocess.Popen[bytes] | ForkedServe, out: Path, log: Path, ready_s: float
) -> str:
    end = time.monotonic() + ready_s
    while True:
        ended = process.poll() is not None
        text = out.read_text() if out.exists() else ""
        if text.endswith("\n"):
            line = text.splitlines()[0]
            assert line.startswith("tokenplane: ready http://"), (line, log.read_text())
            return line
        assert not ended, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
