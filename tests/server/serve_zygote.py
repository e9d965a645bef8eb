"""A process that imports the heavy modules once and forks a real ``tokenplane serve`` per request.

A JSON object per line on stdin: ``out`` and ``err`` (files), ``env`` (added), ``argv``. On stdout a
line ``started PID`` for each, and ``ended PID STATUS`` when it ends (-N: by signal N). It ends with
its stdin. Only start-up time is saved: each child runs the command's own ``main``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import megatron.core
import torch
import transformers
import uvicorn

from tokenplane.engine_adapter.cpu import engine
from tokenplane.engine_adapter.models import megatron_tiny, source
from tokenplane.engine_adapter.server import app, parts
from tokenplane.tools import serve

LOADED = (
    *(megatron.core, torch, transformers, uvicorn),
    *(engine, megatron_tiny, source, app, parts),
)
ENDED = {signal.SIGCHLD}


def run_child(request: dict[str, Any]) -> int:
    """Become ``tokenplane serve`` with its own session, files and environment."""
    os.setsid()
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDED)
    os.environ.update(request["env"])
    return serve.main(request["argv"])


def say(*words: object) -> None:
    """One line, whole, also from within a signal handler."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def reap(_number: int, _frame: object) -> None:
    """Report every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        say("ended", pid, os.waitstatus_to_exitcode(status))


def main() -> None:
    """Fork until stdin ends."""
    signal.signal(signal.SIGCHLD, reap)
    say("ready")
    for line in sys.stdin:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDED)  # "started" comes before "ended"
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run_child(json.loads(line))
            finally:
                os._exit(code)
        say("started", pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDED)


if __name__ == "__main__":
    main()
