"""Runs the application on a bound socket until a signal, or until the engine is dead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.server.bound_address import base_url
from tokenplane.engine_adapter.server.parts import ServerParts

logger = logging.getLogger("tokenplane.server")

_ENGINE_POLL_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Ours end the process with a status of its own, uvicorn's with the same signal again.
        yield


async def run_http(
    app: FastAPI, parts: ServerParts, listener: socket.socket, announce: Callable[[str], None]
) -> bool:
    """Serve; True after a signal and an orderly drain, False if the engine died.

    Must run in the main thread, whose SIGTERM and SIGINT it takes meanwhile.

    Args:
        listener: bound; closed at the end.
        announce: told the base URL once ``/health`` answers 200.
    """
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=max(1, round(parts.config.drain_timeout_s)),
    )
    server = _Server(config)

    def stop() -> None:
        server.force_exit = server.should_exit  # the second signal does not wait
        parts.path.stopping = True
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    announcing = asyncio.ensure_future(_announce(server, listener, announce))
    watching = asyncio.ensure_future(_watch_engine(parts, stop))
    try:
        await server.serve([listener])
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        announcing.cancel()
        watching.cancel()
    return not watching.done()


async def _announce(
    server: uvicorn.Server, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    url = base_url(*listener.getsockname()[:2])
    while not server.started:  # noqa: ASYNC110 - uvicorn has a flag, no event
        await asyncio.sleep(0.01)
    announce(url)


async def _watch_engine(parts: ServerParts, stop: Callable[[], None]) -> None:
    """A dead engine answers nothing any more: end, so that a supervisor starts a new one."""
    while parts.engine.state() is not EngineState.DEAD:  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(_ENGINE_POLL_S)
    logger.error("the engine is dead; stopping")
    stop()
