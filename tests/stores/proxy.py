"""A TCP proxy in threads that can lose replies and speak TLS to its client."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

TLS_NAME = "localhost"


class Proxy:
    """Forwards ``127.0.0.1:port`` to ``target_port``."""

    def __init__(self, target_port: int, *, tls: tuple[Path, Path] | None = None) -> None:
        self._target = target_port
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(*tls)
        self.lose_replies_to: bytes | None = None
        """The next request that contains this reaches the server, and its reply is dropped."""
        self.lost = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._context is not None:
                client = self._context.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            drop = threading.Event()
            threading.Thread(target=self._reply, args=(server, client, drop), daemon=True).start()
            while data := client.recv(1 << 20):
                wanted = self.lose_replies_to
                if wanted is not None and wanted in data:
                    self.lose_replies_to = None
                    drop.set()
                server.sendall(data)

    def _reply(self, server: socket.socket, client: socket.socket, drop: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                if drop.is_set():
                    self.lost += 1
                    break
                client.sendall(data)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._listener.close()
        for end in self._sockets:
            end.close()
