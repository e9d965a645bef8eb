"""A process that imports the heavy modules once and forks a real ``tokenplane serve`` per line.

stdin: ``<file for stdout>\\t<file for stderr>\\t<arguments>`` per line; stdout: the child's pid. It
ends with its stdin. Only start-up time is saved: each child runs the command's own ``main``.
"""

from __future__ import annotations

import os
import signal
import sys

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


def run_child(line: str) -> int:
    """Become ``tokenplane serve`` with its own session and files."""
    out, err, arguments = line.rstrip("\n").split("\t")
    os.setsid()
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return serve.main(arguments.split(" "))


def main() -> None:
    """Fork until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run_child(line)
            finally:
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
