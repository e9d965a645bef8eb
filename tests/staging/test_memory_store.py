"""The memory store passes the contract suite."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest

from tokenplane.staging.contract_suite.backend import StoreBackend, plain_row
from tokenplane.staging.contract_suite.stateful import run_random_operations
from tokenplane.staging.memory_backend.state import MemoryState
from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.testing import StagingStoreContract


class MemoryBackend(StoreBackend):
    def open(
        self,
        *,
        clock: Callable[[], float] | None = None,
        max_bytes: int | None = None,
        full_wait_s: float = 0.2,
    ) -> StagingStore:
        return MemoryStore(max_bytes=max_bytes, full_wait_s=full_wait_s, clock=clock or time.time)

    def raw_read(self, store: StagingStore, partition: str, key: str) -> bytes:
        return _state(store).partitions[partition].rows[key].packed.message

    def raw_write(self, store: StagingStore, partition: str, key: str, message: bytes) -> None:
        rows = _state(store).partitions[partition].rows
        packed = dataclasses.replace(rows[key].packed, message=message)
        rows[key] = dataclasses.replace(rows[key], packed=packed)

    def raw_write_blob(self, store: StagingStore, sha256: bytes, data: bytes) -> None:
        _state(store).blobs[sha256].data = data


def _state(store: StagingStore) -> MemoryState:
    assert isinstance(store, MemoryStore)
    state = store._content
    assert state is not None
    return state


class TestMemoryStore(StagingStoreContract):
    DURABLE = "none"
    SHARED = "private"

    @pytest.fixture
    def backend(self) -> StoreBackend:
        return MemoryBackend()


def test_every_memory_url_is_a_store_of_its_own() -> None:
    with open_store("memory:") as left, open_store("memory:") as right:
        left.put("p", "k", plain_row())
        assert right.partitions() == []


def test_random_operations() -> None:
    run_random_operations(MemoryBackend(), reopens=False)
