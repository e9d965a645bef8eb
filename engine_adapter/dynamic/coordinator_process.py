"""Starts and ends the coordinator's process, with a deadline on everything."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

from tokenplane.schemas.errors import DeadlineError, EngineDeadError

_MODULE = "tokenplane.engine_adapter.dynamic.coordinator_main"


class CoordinatorProcess:
    """A coordinator on a free loopback port. Thread-safe; ``close`` leaves no process."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_requests: int,
        block_tokens: int,
        prefix_caching: bool = False,
        policy: str = "load_balanced",
        alpha: float = 0.5,
        host: str = "127.0.0.1",
    ) -> None:
        """Starts the process; ``address`` waits for it. Engines register when they connect."""
        settings = {
            "engines": 0,
            "vocab_size": vocab_size,
            "max_requests": max_requests,
            "block_tokens": block_tokens,
            "prefix_caching": prefix_caching,
            "policy": policy,
            "alpha": alpha,
            "host": host,
        }
        # It routes messages: it must not take a GPU's memory, nor more than one core.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._address: str | None = None
        self._reader = threading.Thread(target=self._read, name="coordinator-out", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def address(self, timeout_s: float) -> str:
        """``tcp://host:port``, once the process is ready.

        Raises: EngineDeadError if it ended first, DeadlineError.
        """
        if self._address is None:
            address = self._expect("address", timeout_s)
            self._expect("ready", timeout_s)
            self._address = str(address)
        return self._address

    def kill(self) -> None:
        """End the process at once; ``close`` releases the rest."""
        self._process.kill()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the process; idempotent."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and stream is self._process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout_s)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        stream = self._process.stdout
        if stream is not None:
            for line in stream:
                self._lines.put(line.decode())
        self._lines.put("")

    def _expect(self, name: str, timeout_s: float) -> Any:
        ends = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise DeadlineError(
                    "the coordinator process did not start", expected=f"within {timeout_s} s"
                ) from None
            if not line:
                raise EngineDeadError(
                    "the coordinator process ended while starting", got=self._process.wait()
                )
            with contextlib.suppress(ValueError):  # a library's own print
                values = json.loads(line)
                if isinstance(values, dict) and name in values:
                    return values[name]
