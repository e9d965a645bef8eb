"""TransferQueue behind a file store passes the contract suite, on a real Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores.tq_backend import QueueBackend
from tokenplane.staging.contract_suite.backend import StoreBackend
from tokenplane.staging.contract_suite.stateful import run_random_operations
from tokenplane.staging.testing import SharedStoreContract

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class TestTransferQueueStore(SharedStoreContract):
    DURABLE = "power"
    SHARED = "host"

    @pytest.fixture
    def backend(self, ray_address: str, tmp_path: Path) -> StoreBackend:
        return QueueBackend(ray_address, tmp_path / "journal")


def test_random_operations(ray_address: str, tmp_path: Path) -> None:
    backend = QueueBackend(ray_address, tmp_path / "journal", namespace="random")
    run_random_operations(backend, reopens=True, max_examples=6)
