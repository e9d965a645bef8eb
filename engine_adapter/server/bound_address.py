"""A server's socket, and the URL by which clients reach it."""

from __future__ import annotations

import socket

_ELSEWHERE = {
    socket.AF_INET: ("192.0.2.1", "127.0.0.1"),
    socket.AF_INET6: ("2001:db8::1", "::1"),
}
"""By family: an address for documentation (RFC 5737, RFC 3849), to which nothing is sent, and what
stands for this host where it has no network."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that does not listen yet; port 0 takes a free one. The caller owns it.

    Raises: OSError that names the address.
    """
    bound = socket.socket(_family(host), socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"{error.strerror}: {host} port {port}") from error
    return bound


def base_url(host: str, port: int) -> str:
    """``http://host:port``. A bind to every address gets the one by which other hosts reach this
    host, because nobody can connect to 0.0.0.0 from elsewhere."""
    if host in ("0.0.0.0", "::", ""):
        host = _own_address(_family(host))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(family: socket.AddressFamily) -> str:
    elsewhere, alone = _ELSEWHERE[family]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((elsewhere, 9))
            found: str = probe.getsockname()[0]
        except OSError:
            return alone
    return found
