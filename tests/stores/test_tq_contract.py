"""TransferQueue passes the contract suite, behind a file store and Redis, on a real Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores.redis_server import RedisServer
from tests.stores.tq_backend import QueueBackend, QueueOverRedis
from tokenplane.staging.contract_suite.backend import StoreBackend
from tokenplane.staging.contract_suite.stateful import run_random_operations
from tokenplane.staging.testing import SharedStoreContract, StagingStoreContract

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class TestTransferQueueStore(SharedStoreContract):
    DURABLE = "power"
    SHARED = "host"

    @pytest.fixture
    def backend(self, ray_address: str, tmp_path: Path) -> StoreBackend:
        return QueueBackend(ray_address, tmp_path / "journal")


class TestTransferQueueOverRedis(StagingStoreContract):
    """A journal that several hosts share; Redis itself passes the shared store's contract."""

    DURABLE = "power"
    SHARED = "network"

    @pytest.fixture
    def backend(self, ray_address: str, redis_server: RedisServer) -> StoreBackend:
        return QueueOverRedis(ray_address, redis_server)


def test_random_operations(ray_address: str, tmp_path: Path) -> None:
    backend = QueueBackend(ray_address, tmp_path / "journal", namespace="random")
    run_random_operations(backend, reopens=True, max_examples=6)
