"""A TCP relay between NeMo-Gym and an engine that can lose replies and deliver requests twice."""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import threading
from collections import deque
from typing import Literal, Self

type Fault = Literal["lose_reply", "twice_first", "twice_last"]
"""lose_reply: the engine answers, then the connection breaks. twice_*: the same bytes reach the
engine on two connections at once; Gym gets the reply that comes first, or the one that comes last.
"""

_TIMEOUT_S = 60.0


class EngineProxy:
    """One listening port for a whole session; the engine behind it changes from test to test."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._upstream: tuple[str, int] | None = None
        self._faults: deque[Fault] = deque()
        self._threads: list[threading.Thread] = []
        self.bodies: list[bytes] = []
        """The bodies that Gym sent since ``route``, in order."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Base URL for Gym, with ``/v1``."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def route(self, port: int | None) -> None:
        """Send requests to this port of this machine from now on; None refuses them."""
        self._upstream = None if port is None else ("127.0.0.1", port)
        self._faults.clear()
        self.bodies.clear()

    def inject(self, *faults: Fault) -> None:
        """The next requests meet these faults, one each."""
        self._faults.extend(faults)

    def settle(self) -> None:
        """Wait until every delivery has been answered by the engine."""
        for thread in list(self._threads):
            thread.join(_TIMEOUT_S)
            assert not thread.is_alive()
        self._threads.clear()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        client.settimeout(_TIMEOUT_S)
        with client, contextlib.suppress(OSError):
            request = _read_request(client)
            if request is None or self._upstream is None:
                return
            self.bodies.append(request.partition(b"\r\n\r\n")[2])
            fault = self._faults.popleft() if self._faults else None
            twice = fault is not None and fault.startswith("twice")
            replies: queue.Queue[bytes] = queue.Queue()
            for _ in range(2 if twice else 1):
                thread = threading.Thread(target=self._deliver, args=(request, replies))
                self._threads.append(thread)
                thread.start()
            reply = replies.get(timeout=_TIMEOUT_S)
            if fault == "twice_last":
                reply = replies.get(timeout=_TIMEOUT_S)
            if fault != "lose_reply":
                client.sendall(reply)

    def _deliver(self, request: bytes, replies: queue.Queue[bytes]) -> None:
        reply = b""
        assert self._upstream is not None
        with (
            contextlib.suppress(OSError),
            socket.create_connection(self._upstream, timeout=_TIMEOUT_S) as engine,
        ):
            engine.sendall(request)
            while part := engine.recv(65536):
                reply += part
        replies.put(reply)


def _read_request(client: socket.socket) -> bytes | None:
    """One whole request, asking the engine to close the connection after its reply."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?im)^content-length: *(\d+)", head)
    length = int(found[1]) if found else 0
    while len(body) < length:
        part = client.recv(65536)
        if not part:
            return None
        body += part
    head = re.sub(rb"(?im)^connection:.*\r?\n?", b"", head).rstrip(b"\r\n")
    return head + b"\r\nConnection: close\r\n\r\n" + body
