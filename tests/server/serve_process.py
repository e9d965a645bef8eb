"""``tokenplane serve`` as its own process, for tests that need a real socket, signal or restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

READY_S = 120.0
"""Importing torch and megatron-core takes most of it where other tests run at the same time."""


@dataclass
class ServeProcess:
    """A started server; ``url`` is what its ready line named."""

    process: subprocess.Popen[str]
    url: str
    ready_line: str
    output: list[str] = field(default_factory=list)
    """Lines on stdout after the ready line."""

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
) -> Iterator[ServeProcess]:
    """A server over the tiny model; killed at the end if the test has not stopped it."""
    command = [sys.executable, "-m", "tokenplane.tools.cli", "serve", "--model", "tiny"]
    with log.open("a") as errors:
        process = subprocess.Popen(
            [*command, "--store", store, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | (env or {}),
        )
    try:
        assert process.stdout is not None
        timer = threading.Timer(ready_s, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        assert line.startswith("tokenplane: ready http://"), (line, log.read_text())
        server = ServeProcess(process, line.split()[2], line.strip())
        reader = threading.Thread(target=server.output.extend, args=(process.stdout,), daemon=True)
        reader.start()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
