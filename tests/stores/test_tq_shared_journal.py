"""TransferQueue over a Redis journal: hosts that share the rows, and one that only reads them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.redis_server import RedisServer
from tests.stores.tq_backend import QueueBackend, QueueOverRedis
from tokenplane.schemas.errors import KeyConflictError, MissingRowError, StoreError
from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import to_blob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Hosts = tuple[StagingStore, StagingStore, StagingStore]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop(kill=True)


@pytest.fixture
def hosts(ray_address: str, server: RedisServer, tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts that share the journal, and one with a journal of its own."""
    shared = QueueOverRedis(ray_address, server, namespace=tmp_path.name)
    shared.journal_url += "&timeout_s=2"
    own = QueueBackend(ray_address, tmp_path / "own", namespace=tmp_path.name)
    with (
        open_store(shared.url()) as left,
        open_store(shared.url()) as right,
        open_store(own.url()) as other,
    ):
        yield left, right, other


def test_hosts_of_one_journal_see_everything_and_others_read_by_key(hosts: Hosts) -> None:
    left, right, other = hosts
    assert (left.durable, left.shared) == ("power", "network")
    blob = to_blob(b"b" * 100_000)
    assert left.put("p", "k", plain_row(1), blobs=[blob]) is True
    assert right.put("p", "k", plain_row(1), blobs=[blob]) is False
    with pytest.raises(KeyConflictError):
        right.put("p", "k", plain_row(2))
    assert right.keys("p") == ["k"]
    for store in hosts:
        assert same_bits(store.get("p", ["k"])[0], plain_row(1))
        assert store.get_blob(blob.sha256).to_pybytes() == blob.data
    assert other.keys("p") == []
    assert [claim.key for claim in right.claim("p", "c", max_rows=9, lease_s=600)] == ["k"]
    assert left.claim("p", "c", max_rows=9, lease_s=600) == []
    assert right.discard("p", ["k"]) == 1
    for store in hosts:
        with pytest.raises(MissingRowError):
            store.get("p", ["k"])


def test_a_journal_that_hangs_or_dies_is_an_error_in_bounded_time_and_no_row_is_served(
    hosts: Hosts, server: RedisServer
) -> None:
    left, right, other = hosts
    left.put("p", "before", plain_row(1))
    for dies in (False, True):
        if dies:
            server.stop(kill=True)
        else:
            os.kill(server.pid, signal.SIGSTOP)
        started = time.monotonic()
        for store in (left, right):
            with pytest.raises(StoreError) as caught:
                store.put("p", "meanwhile", plain_row(2))
            assert caught.value.retryable
        assert time.monotonic() - started < 15
        # What the queue holds is read all the same; what no journal has acknowledged is not.
        assert same_bits(other.get("p", ["before"])[0], plain_row(1))
        with pytest.raises(MissingRowError):
            other.get("p", ["meanwhile"])
        if dies:
            server.start()
        else:
            os.kill(server.pid, signal.SIGCONT)
    right.put("p", "meanwhile", plain_row(2))  # whether or not an earlier try arrived
    assert same_bits(left.get("p", ["meanwhile"])[0], plain_row(2))
    assert same_bits(other.get("p", ["meanwhile"])[0], plain_row(2))
