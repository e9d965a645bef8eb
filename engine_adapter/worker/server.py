"""The OpenAI server of a worker: uvicorn on a thread of its own, over the worker's engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import httpx
import uvicorn

from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.server.app import create_app
from tokenplane.engine_adapter.server.bound_address import base_url, bind_socket
from tokenplane.engine_adapter.server.config import check_bind, parse_config
from tokenplane.engine_adapter.server.parts import ServerParts, build_parts
from tokenplane.schemas.errors import DeadlineError
from tokenplane.staging.store import StagingStore

_POLL_S = 0.05


def build_worker_parts(
    engine: Engine,
    loaded: LoadedModel,
    store: StagingStore,
    defaults: Mapping[str, float | int],
    *,
    host: str = "127.0.0.1",
) -> ServerParts:
    """A server's parts over a worker's engine, which stays the worker's. For one event loop.

    ``defaults``: sampling of requests that omit it.
    """
    return build_parts(
        parse_config({"model": loaded.info.name, "host": host, **defaults}),
        engine=engine,
        tokenizer=loaded.tokenizer,
        generation_config=loaded.generation_config,
        detokenize=loaded.detokenize,
        store=store,
    )


class WorkerServer:
    """Serves from the end of the constructor to ``close``."""

    def __init__(
        self,
        engine: Engine,
        loaded: LoadedModel,
        store: StagingStore,
        *,
        defaults: Mapping[str, float | int],
        host: str = "127.0.0.1",
        port: int | None = None,
        control_token: str | None = None,
        start_timeout_s: float,
    ) -> None:
        """``defaults``: sampling of requests that omit it. ``port``: one that the driver reserved;
        None takes a free one.

        Raises: ConfigError for a bind to other hosts without a token; OSError if the port is
        taken; DeadlineError if ``/health`` does not answer in time.
        """
        check_bind(host, control_token)
        self._socket = bind_socket(host, port or 0)
        self._parts = build_worker_parts(engine, loaded, store, defaults, host=host)
        app = create_app(self._parts, control_token=control_token)
        bound = self._socket.getsockname()[1]
        root = base_url(host, bound)
        self.base_url = f"{root}/v1"
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
        )
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._socket]},
            name="tokenplane-openai",
            daemon=True,
        )
        self._thread.start()
        try:
            self._await_health(f"{root}/health", start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def parts(self) -> ServerParts:
        """The server's parts, for capture counters and the ledger."""
        return self._parts

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop serving and release the port; the engine stays its owner's. Idempotent.

        Raises: DeadlineError if the thread does not end.
        """
        self._server.should_exit = True
        self._thread.join(timeout_s)
        self._socket.close()
        self._parts.path.close()
        if self._thread.is_alive():
            raise DeadlineError("the HTTP server did not stop", expected=f"within {timeout_s} s")

    def _await_health(self, url: str, timeout_s: float) -> None:
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            try:
                if httpx.get(url, timeout=1.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not up yet: the deadline decides
            time.sleep(_POLL_S)
        raise DeadlineError("the HTTP server is not healthy", expected=f"within {timeout_s} s")
