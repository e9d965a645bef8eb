"""``tokenplane serve`` processes, forked from one that has imported everything."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

STARTED_S = 120.0


class ForkedServe:
    """One server, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, status: int) -> None:
        """Its parent has reaped it."""
        self.returncode = status
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("serve", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended, also where that is not known yet."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The parent of the servers of this process's tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("serve_zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._children: dict[int, ForkedServe] = {}
        self._started: queue.SimpleQueue[ForkedServe] = queue.SimpleQueue()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def fork(self, argv: list[str], *, out: Path, err: Path, env: dict[str, str]) -> ForkedServe:
        """A new server; it has not said yet that it is ready."""
        request = {"argv": argv, "out": str(out), "err": str(err), "env": env}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._started.get(timeout=STARTED_S)

    def close(self) -> None:
        """End it; a server that still runs belongs to a test that has failed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(30)
        for child in self._children.values():
            child.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, *numbers = line.split()
            pid = int(numbers[0])
            if word == "started":
                self._children[pid] = child = ForkedServe(pid)
                self._started.put(child)
            else:
                self._children.pop(pid).end(int(numbers[1]))


@functools.cache
def zygote() -> Zygote:
    """Started by the first test that wants it."""
    return Zygote()
