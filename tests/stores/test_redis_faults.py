"""Faults of a Redis server, of the way to it, and of its clients, for real."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stores.proxy import Proxy
from tests.stores.redis_server import RedisServer, free_port
from tests.stores.writers import Writer, check_acked
from tokenplane.schemas.errors import (
    StoreFullError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tokenplane.staging.contract_suite.backend import FakeClock, plain_row, same_bits, staged_row
from tokenplane.staging.open_store import open_store
from tokenplane.staging.redis_backend.store import RedisStore
from tokenplane.staging.store_types import RetentionPolicy, to_blob


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop(kill=True)


def test_killed_writers_and_servers_lose_no_acknowledged_row(
    server: RedisServer, tmp_path: Path
) -> None:
    doomed, *rest = writers = [Writer(server.url, tmp_path, number) for number in range(3)]
    try:
        doomed.wait_for(20 + random.randrange(10))
        doomed.kill()
        for target, kill in ((20, True), (40, False), (60, True)):
            for writer in rest:
                writer.wait_for(target)
            server.stop(kill=kill)
            time.sleep(0.2)
            server.start()
        for writer in rest:
            writer.wait_for(80)
    finally:
        for writer in writers:
            writer.kill()
    server.stop(kill=True)
    server.start()
    with RedisStore(server.url) as store:
        assert check_acked(store, writers) >= 180


def test_calls_wait_for_a_server_that_comes_back(server: RedisServer) -> None:
    with RedisStore(server.url, timeout_s=20) as store:
        store.put("p", "k", plain_row(1))
        server.stop(kill=True)
        restart = threading.Timer(0.5, server.start)
        restart.start()
        assert store.put("p", "l", plain_row(2)) is True
        restart.join()
        assert store.keys("p") == ["k", "l"]


def test_a_server_that_is_gone_is_an_error_in_bounded_time(server: RedisServer) -> None:
    with RedisStore(server.url, timeout_s=0.5) as store:
        store.put("p", "k", plain_row(1))
        server.stop(kill=True)
        for call in (
            lambda: store.put("p", "l", plain_row(2)),
            lambda: store.get("p", ["k"]),
            lambda: store.claim("p", "c", max_rows=1, lease_s=1),
        ):
            started = time.monotonic()
            with pytest.raises(StoreUnavailableError):
                call()
            assert time.monotonic() - started < 3


def test_a_replica_is_read_and_takes_writes_once_it_is_the_primary(
    server: RedisServer, tmp_path: Path
) -> None:
    with RedisStore(server.url) as store:
        store.put("p", "k", plain_row(1))
    replica = RedisServer(tmp_path / "replica", replicaof=f"127.0.0.1 {server.port}")
    try:
        with RedisStore(replica.url, timeout_s=0.5) as store, replica.client() as client:
            deadline = time.monotonic() + 60
            while store.keys("p") != ["k"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert same_bits(store.get("p", ["k"])[0], plain_row(1))
            with pytest.raises(StoreUnavailableError, match="a replica and takes no writes"):
                store.put("p", "l", plain_row(2))
            server.stop(kill=True)
            client.execute_command("REPLICAOF", "NO", "ONE")
            assert store.put("p", "l", plain_row(2)) is True
    finally:
        replica.stop(kill=True)


def test_a_server_that_hangs_is_an_error_in_bounded_time(server: RedisServer) -> None:
    with RedisStore(server.url, timeout_s=0.5) as store:
        store.put("p", "k", plain_row(1))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(StoreTimeoutError):
                store.put("p", "l", plain_row(2))
            # A new connection is not even answered: nothing can have happened.
            with pytest.raises((StoreTimeoutError, StoreUnavailableError)):
                store.get("p", ["k"])
            assert time.monotonic() - started < 6
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert same_bits(store.get("p", ["k"])[0], plain_row(1))
        store.put("p", "l", plain_row(2))  # whether or not the first try arrived
        assert store.keys("p") == ["k", "l"]


def test_a_put_whose_reply_is_lost_still_says_that_it_wrote(server: RedisServer) -> None:
    proxy = Proxy(server.port)
    row = staged_row()
    with RedisStore(f"redis://127.0.0.1:{proxy.port}/0", timeout_s=5) as store:
        store.put("p", "warm", plain_row())
        proxy.lose_replies_to = row.staging_key.encode()
        assert store.put("staged", row.staging_key, row.to_batch()) is True
        assert proxy.lost == 1
        assert store.put("staged", row.staging_key, row.to_batch()) is False
        assert store.stats("staged").rows == 1
    proxy.close()


def test_a_full_disk_loses_no_acknowledged_row(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis", file_limit=400_000)
    acked: list[int] = []

    def fill(store: RedisStore) -> None:
        while len(acked) < 100:
            store.put("p", str(len(acked)), plain_row(len(acked), size=20_000))
            acked.append(len(acked))

    try:
        # A server that must sync its log and cannot write it ends itself.
        with (
            RedisStore(server.url, timeout_s=1) as store,
            pytest.raises((StoreFullError, StoreUnavailableError)),
        ):
            fill(store)
        assert 5 < len(acked) < 40
        server.stop()
        server.file_limit = None
        server.start()
        with RedisStore(server.url) as store:
            keys = store.keys("p")
            assert keys[: len(acked)] == [str(number) for number in acked]
            assert len(keys) <= len(acked) + 1
            for key, row in store.scan("p"):
                assert same_bits(row, plain_row(int(key), size=20_000))
            assert store.put("p", "more", plain_row(1)) is True
    finally:
        server.stop(kill=True)


def test_a_server_whose_memory_is_full_is_read_and_drained(server: RedisServer) -> None:
    media = to_blob(b"m" * 100_000)
    with RedisStore(server.url, full_wait_s=0.1) as store, server.client() as client:
        for number in range(6):
            store.put("p", str(number), plain_row(number), blobs=[media])
        store.put("sealed", "k", plain_row())
        store.claim("p", "c", max_rows=1, lease_s=600)
        hold = store.hold("p", "5", lease_s=600)
        client.config_set("maxmemory", 1)
        for blobs in ([], [to_blob(b"n" * 100_000)]):
            started = time.monotonic()
            with pytest.raises(StoreFullError, match="no room"):
                store.put("p", "more", plain_row(), blobs=blobs)
            assert time.monotonic() - started >= 0.1  # it waited, as for a budget
        # A put that was sent again because its reply was lost, here with another's nonce.
        assert store.put("sealed", "k", plain_row()) is False
        assert [key for key, _ in store.scan("p")] == ["0", "1", "2", "3", "4", "5"]
        assert store.get_blob(media.sha256).to_pybytes() == media.data
        assert store.extend_hold(hold, lease_s=600)
        store.end_hold(store.hold("p", "4", lease_s=600))
        assert [claim.key for claim in store.claim("p", "c", max_rows=2, lease_s=600)] == ["1", "2"]
        assert store.claim("p", "g", max_rows=1, lease_s=600, group_column="group")
        assert store.release("p", "c", ["2"]) == 1
        assert store.ack("p", "c", ["0", "1"]) == 2
        store.seal("sealed")
        report = store.sweep(RetentionPolicy(max_age_s=0, partition="p", include_backlog=True))
        assert (report.rows, report.kept_leased, report.kept_held) == (4, 1, 1)
        # A put that waits goes on when there is room.
        more_room = threading.Timer(0.3, lambda: client.config_set("maxmemory", 0))
        with RedisStore(server.url, full_wait_s=20) as waiting:
            more_room.start()
            assert waiting.put("p", "more", plain_row(), blobs=[to_blob(b"n" * 100_000)])
        more_room.join()


def test_a_torn_log_keeps_the_whole_puts_before_the_tear(server: RedisServer) -> None:
    with RedisStore(server.url) as store:
        for number in range(10):
            store.put("p", str(number), plain_row(number))
    server.stop(kill=True)
    (log,) = (server.folder / "appendonlydir").glob("*.incr.aof")
    content = log.read_bytes()
    log.write_bytes(content[: len(content) - 200])  # inside the last put
    server.start()
    with RedisStore(server.url) as store:
        assert store.keys("p") == [str(number) for number in range(9)]
        assert [same_bits(row, plain_row(int(key))) for key, row in store.scan("p")] == [True] * 9
        assert store.stats().rows == 9
        assert store.put("p", "9", plain_row(9)) is True


def test_a_clock_that_jumps(server: RedisServer) -> None:
    clock = FakeClock()
    with RedisStore(server.url, clock=clock) as store:
        store.put("p", "before", plain_row(1))
        clock.advance(-1e6)
        store.put("p", "after", plain_row(2))
        assert store.keys("p") == ["before", "after"]
        (claim,) = store.claim("p", "c", max_rows=1, lease_s=10)
        assert claim.key == "before"
        clock.advance(1e6 + 11)
        claims = store.claim("p", "c", max_rows=9, lease_s=10)
        assert [(claim.key, claim.attempt) for claim in claims] == [("before", 2), ("after", 1)]


def test_a_cluster_is_followed_to_the_node_that_holds_the_slot(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cluster_enabled": "yes", "cluster_announce_ip": "127.0.0.1"}
    nodes = [
        RedisServer(tmp_path / name, cluster_port=str(free_port()), **settings) for name in "ab"
    ]
    try:
        clients = [node.client() for node in nodes]
        clients[0].cluster("ADDSLOTSRANGE", 0, 8191)
        clients[1].cluster("ADDSLOTSRANGE", 8192, 16383)
        other = nodes[1]
        clients[0].cluster("MEET", "127.0.0.1", other.port, other.settings["cluster_port"])
        deadline = time.monotonic() + 20
        while not all(c.cluster("INFO")["cluster_state"] == "ok" for c in clients):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for namespace in ("a", "b", "c", "d"):
            with open_store(f"{nodes[0].url}?namespace={namespace}") as store:
                row = staged_row()
                assert store.put("staged", row.staging_key, row.to_batch())
                assert same_bits(store.get("staged", [row.staging_key])[0], row.to_batch())
                assert store.claim("staged", "c", max_rows=1, lease_s=9)[0].key == row.staging_key
                assert store.discard("staged", store.keys("staged")) == 1
        held = [client.dbsize() for client in clients]
        assert sum(held) == 4 * 3
        assert all(held)
    finally:
        for node in nodes:
            node.stop(kill=True)
