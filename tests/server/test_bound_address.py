"""The socket of a server and the URL that others use."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from tokenplane.engine_adapter.server.bound_address import base_url, bind_socket


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:7"), ("::1", "http://[::1]:7"), ("node-3", "http://node-3:7")],
)
def test_a_named_host_is_the_urls(host: str, url: str) -> None:
    assert base_url(host, 7) == url


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_bind_to_every_address_names_one_that_answers(host: str) -> None:
    with bind_socket(host, 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        parts = urlsplit(base_url(host, port))
        assert parts.hostname not in (None, "0.0.0.0", "::")
        assert parts.port == port
        with socket.create_connection((parts.hostname, port), timeout=10):
            accepted, _ = listener.accept()
            accepted.close()


def test_a_host_without_a_network_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_socket: socket.socket, _address: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert base_url("0.0.0.0", 7) == "http://127.0.0.1:7"
    assert base_url("::", 7) == "http://[::1]:7"


def test_a_taken_port_is_named() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1 port {port}"):
            bind_socket("127.0.0.1", port)
