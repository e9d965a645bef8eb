"""The demo's server: ``tokenplane serve`` as a child process, and its control routes."""

from __future__ import annotations

import contextlib
import io
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tokenplane.schemas.errors import DeadlineError, EngineDeadError

START_TIMEOUT_S = 600.0
"""The first start converts the model."""
_CALL_TIMEOUT_S = 30.0
_POLL_S = 0.2
_STOP_TIMEOUT_S = 30.0
_TAIL_LINES = 15


class DemoServer:
    """A running ``tokenplane serve``. A context manager: it stops the process, which ends with
    this one in any case.

    Args:
        log: file for the server's own stderr.
        progress: gets what the server says while it starts.

    Raises:
        EngineDeadError: the process ended; the message ends with what it said.
        DeadlineError: it was not ready in time.
    """

    def __init__(self, arguments: list[str], log: Path, progress: Callable[[str], None]) -> None:
        self._log = log
        command = [sys.executable, "-m", "tokenplane.tools.demo.serving", *arguments]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            self.url = self._await_ready(progress)
        except BaseException:
            self._process.kill()
            self._wait()
            raise
        # Loopback is not behind the proxy that the environment may name.
        self._http = httpx.Client(base_url=self.url, timeout=_CALL_TIMEOUT_S, trust_env=False)

    def _await_ready(self, progress: Callable[[str], None]) -> str:
        """The base URL of the ready line."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Reads to the end, so that the server never waits for room in the pipe.
        threading.Thread(target=self._read_lines, args=(lines,), daemon=True).start()
        deadline = time.monotonic() + START_TIMEOUT_S
        shown = ""
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=_POLL_S)
                if line.startswith("tokenplane: ready "):
                    return line.split()[2]
            said = self._last_words(1)
            if said not in ("", shown):
                shown = said
                progress(said.removeprefix("tokenplane: "))
            if self._process.poll() is not None:
                raise EngineDeadError(
                    "the server ended before it was ready: " + self._last_words(_TAIL_LINES),
                    got=f"exit {self._process.returncode}",
                )
        raise DeadlineError("the server was not ready", expected=f"within {START_TIMEOUT_S:g} s")

    def _read_lines(self, lines: queue.SimpleQueue[str]) -> None:
        with contextlib.closing(self._process.stdout or io.StringIO()) as stdout:
            for line in stdout:
                lines.put(line)

    def _last_words(self, lines: int) -> str:
        said = self._log.read_text(errors="replace").strip().splitlines()[-lines:]
        return "\n".join(said)

    def get(self, path: str) -> Any:
        """The JSON of a control route.

        Raises:
            EngineDeadError: the server does not answer, or not with 200.
        """
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that a control route answers to ``body``; see ``get``."""
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineDeadError(
                f"the server does not answer: {error}; it said: {self._last_words(_TAIL_LINES)}",
                key=path,
            ) from error
        if answer.status_code != 200:
            raise EngineDeadError(
                f"HTTP {answer.status_code}: {answer.text[:300]}", key=path, expected=200
            )
        return answer.json()

    def stop(self) -> int:
        """Ask it to finish, and give its exit status. Idempotent."""
        self._http.close()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._wait()

    def _wait(self, timeout_s: float | None = None) -> int:
        status = self._process.wait(timeout_s)
        if self._process.stdin is not None:
            self._process.stdin.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
