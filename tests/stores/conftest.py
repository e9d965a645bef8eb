"""Servers that the tests of a worker share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A durable server that no test stops."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
