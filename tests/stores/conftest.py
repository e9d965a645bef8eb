"""Servers that the tests of a worker share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.stores.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A durable server that no test stops."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A local Ray; the first store starts the queue in it."""
    import ray
    import transfer_queue

    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="tokenplane",
    )
    yield ray.get_runtime_context().gcs_address
    transfer_queue.close()
    ray.shutdown()
