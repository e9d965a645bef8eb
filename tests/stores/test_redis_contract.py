"""The Redis store passes the contract suite."""

from __future__ import annotations

import pytest

from tests.stores.redis_backend import RedisBackend
from tests.stores.redis_server import RedisServer
from tokenplane.staging.contract_suite.backend import StoreBackend
from tokenplane.staging.testing import SharedStoreContract


class TestRedisStore(SharedStoreContract):
    DURABLE = "power"
    SHARED = "network"

    @pytest.fixture
    def backend(self, redis_server: RedisServer) -> StoreBackend:
        return RedisBackend(redis_server)
