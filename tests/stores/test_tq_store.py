"""What the TransferQueue store does beyond the contract, and its faults, on a real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.stores.tq_backend import QueueBackend
from tests.stores.writers import Writer, check_acked
from tokenplane.schemas.errors import (
    ConfigError,
    CorruptRowError,
    MissingRowError,
    StoreFullError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tokenplane.schemas.staged_row import TOKEN_COLUMNS
from tokenplane.staging.contract_suite.backend import plain_row, same_bits, staged_row
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store_types import RetentionPolicy, to_blob
from tokenplane.staging.token_sink import TokenSink
from tokenplane.staging.token_source import TokenSource
from tokenplane.staging.tq_backend.payload import Entry, row_name
from tokenplane.staging.tq_backend.store import TransferQueueStore

if TYPE_CHECKING:
    from tokenplane.staging.tq_backend.link import QueueLink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECOVERY_S = 300.0


@pytest.fixture
def pair(
    ray_address: str, tmp_path: Path
) -> Iterator[tuple[TransferQueueStore, TransferQueueStore]]:
    """Two hosts of a cluster: stores with a journal each and one queue."""
    with (
        _open(ray_address, tmp_path / "here", tmp_path.name) as here,
        _open(ray_address, tmp_path / "there", tmp_path.name) as there,
    ):
        yield here, there


def _open(address: str, journal: Path, namespace: str, **options: object) -> TransferQueueStore:
    store = open_store(QueueBackend(address, journal, namespace=namespace).url(**options))
    assert isinstance(store, TransferQueueStore)
    return store


def test_another_host_reads_rows_and_blobs_by_key(
    pair: tuple[TransferQueueStore, TransferQueueStore],
) -> None:
    here, there = pair
    rows = {f"k{number}": plain_row(number, size=number * 100) for number in range(40)}
    blob = to_blob(b"b" * 200_000)
    for key, row in rows.items():
        here.put("p", key, row, blobs=[blob] if key == "k7" else [])
    there.put("p", "own", plain_row(99))
    wanted = ["k3", "own", *(f"k{number}" for number in range(39, 3, -1))]
    found = there.get("p", wanted)
    assert same_bits(found[1], plain_row(99))
    assert all(
        same_bits(row, rows[key]) for key, row in zip(wanted, found, strict=True) if key != "own"
    )
    assert there.get_blob(blob.sha256).to_pybytes() == b"b" * 200_000
    with pytest.raises(MissingRowError, match=r"gone.*lost"):
        there.get("p", ["k1", "gone", "lost"])
    assert there.keys("p") == ["own"]  # the rest is the other journal's
    assert there.discard("p", ["k1"]) == 0
    assert here.discard("p", ["k1", "k7"]) == 2
    with pytest.raises(MissingRowError):
        there.get("p", ["k1"])
    assert here.wait_published(30)
    with pytest.raises(MissingRowError):
        there.get_blob(blob.sha256)


def test_a_staged_chain_is_resolved_on_another_host(
    pair: tuple[TransferQueueStore, TransferQueueStore],
) -> None:
    here, there = pair
    root = staged_row("r", "a", prompt=range(1000), generated=range(200))
    child = staged_row("r", "b", prompt=range(300), generated=range(20), parent=root)
    sink, source = TokenSink(here), TokenSource(there)
    for row in (root, child):
        assert sink.stage(row).ok
    keys = [root.staging_key, child.staging_key]
    assert source.fetch_prefix(keys).tolist() == [
        *root.call.token_ids_delta.tolist(),
        *child.call.token_ids_delta.tolist(),
    ]
    assert there.get("staged", keys, TOKEN_COLUMNS)[0].schema.names == list(TOKEN_COLUMNS)


def test_another_rows_data_is_never_served(
    pair: tuple[TransferQueueStore, TransferQueueStore],
) -> None:
    here, there = pair
    rows = [plain_row(1), plain_row(2)]
    staged = [staged_row("r", name, prompt=range(300)) for name in "ab"]
    for key, row in zip("kl", rows, strict=True):
        here.put("p", key, row)
    for record in staged:
        here.put("staged", record.staging_key, record.to_batch())
    link = here._publisher.link
    assert link is not None
    own = here._origin
    for partition, (key, other), row in (
        ("p", ("k", "l"), rows[0]),
        ("staged", [record.staging_key for record in staged], staged[0].to_batch()),
    ):
        name = row_name(partition, key)
        ((head, body),) = link.get([name])
        ((strange, foreign),) = link.get([row_name(partition, other)])
        title, flipped = len(name), bytearray(body)
        flipped[-100] ^= 1
        disguised = head[:80] + name.encode() + strange[80 + title :]
        damaged = [
            (strange, foreign),
            (head, foreign),
            (head, bytes(flipped)),
            (disguised, foreign),
            (head, body[:-9]),
            (b"x", body),
            (head[:82], body),
        ]
        for pair_ in damaged:
            link.put([Entry(name, own, *pair_)])
            with pytest.raises(CorruptRowError):
                there.get(partition, [key])
            assert same_bits(here.get(partition, [key])[0], row)
        if partition == "staged":
            link.put([Entry(name, own, head, b"x")])  # a prefix is resolved from heads alone
            (found,) = there.get(partition, [key], TOKEN_COLUMNS)
            assert same_bits(found, row.select(TOKEN_COLUMNS))
            for at in range(100 + title, len(head), 31):
                hurt = bytearray(head)
                hurt[at] ^= 1
                link.put([Entry(name, own, bytes(hurt), body)])
                with pytest.raises(CorruptRowError):
                    there.get(partition, [key], TOKEN_COLUMNS)
        link.put([Entry(name, own, head, body)])
        assert same_bits(there.get(partition, [key])[0], row)


def test_a_reopened_journal_is_published_again(ray_address: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with open_store(str(journal)) as store:  # written while no queue was there
        for number in range(50):
            store.put("p", str(number), plain_row(number))
        sink = TokenSink(store)
        row = staged_row()
        assert sink.stage(row, attachments={"image": memoryview(bytes(5000))}).ok
    with (
        _open(ray_address, journal, tmp_path.name) as here,
        _open(ray_address, tmp_path / "other", tmp_path.name) as there,
    ):
        keys = [str(number) for number in range(50)]
        assert all(
            same_bits(row, plain_row(int(key)))
            for key, row in zip(keys, there.get("p", keys), strict=True)
        )
        (fetched,) = TokenSource(there).fetch_rows([row.staging_key])
        assert TokenSource(there).fetch_attachments(fetched)["image"].nbytes == 5000
        report = here.sweep(RetentionPolicy(max_age_s=0, partition="p"))
        assert report.rows == 50
        assert here.wait_published(30)
        with pytest.raises(MissingRowError):
            there.get("p", ["3"])
        there.get("staged", [row.staging_key])


def test_a_full_journal_publishes_nothing(ray_address: str, tmp_path: Path) -> None:
    with (
        _open(ray_address, tmp_path / "a", tmp_path.name, max_bytes=20_000, full_wait_s=0) as here,
        _open(ray_address, tmp_path / "b", tmp_path.name) as there,
    ):
        with pytest.raises(StoreFullError):
            here.put("p", "k", plain_row(1, size=30_000))
        with pytest.raises(MissingRowError):
            there.get("p", ["k"])


def test_a_killed_writers_rows_are_read_elsewhere(ray_address: str, tmp_path: Path) -> None:
    backend = QueueBackend(ray_address, tmp_path / "journal", namespace=tmp_path.name)
    writer = Writer(backend.url(), tmp_path, 0)
    writer.wait_for(30, within_s=RECOVERY_S)
    writer.kill()
    with (
        _open(ray_address, tmp_path / "journal", tmp_path.name) as here,
        _open(ray_address, tmp_path / "other", tmp_path.name) as there,
    ):
        assert check_acked(here, [writer]) >= 30
        for number in writer.acked():
            (row,) = there.get("p", [f"0/{number}"])
            assert same_bits(row, plain_row(number))


def test_a_lost_unit_and_a_lost_controller_are_replaced_and_filled_again(
    ray_address: str, tmp_path: Path
) -> None:
    options = {"deadline_s": 1.0}
    rows = {str(number): plain_row(number) for number in range(60)}
    with (
        _open(ray_address, tmp_path / "a", tmp_path.name, **options) as here,
        _open(ray_address, tmp_path / "b", tmp_path.name, **options) as there,
    ):
        for key in list(rows)[:20]:
            here.put("p", key, rows[key])
        for victim, keys in ((_unit, list(rows)[20:40]), (_controller, list(rows)[40:])):
            os.kill(_pid_of(victim()), signal.SIGKILL)
            for key in keys:
                _within(4.0, partial(here.put, "p", key, rows[key]))
                assert same_bits(here.get("p", [key])[0], rows[key])
            assert here.wait_published(RECOVERY_S)
            assert there.wait_published(RECOVERY_S)
            written = list(rows)[: list(rows).index(keys[-1]) + 1]
            found = there.get("p", written)
            assert all(same_bits(row, rows[key]) for key, row in zip(written, found, strict=True))


def test_a_hanging_controller_holds_nobody_up(ray_address: str, tmp_path: Path) -> None:
    with (
        _open(ray_address, tmp_path / "a", tmp_path.name, deadline_s=1.0) as here,
        _open(ray_address, tmp_path / "b", tmp_path.name, deadline_s=1.0) as there,
    ):
        here.put("p", "0", plain_row(0))
        pid = _pid_of(_controller())
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(1, 20):
                _within(4.0, partial(here.put, "p", str(number), plain_row(number)))
            assert same_bits(here.get("p", ["19"])[0], plain_row(19))
            # The call that meets the hang times out; the next ones know.
            with pytest.raises(StoreTimeoutError):
                _within(4.0, lambda: there.get("p", ["19"]))
            with pytest.raises(StoreUnavailableError):
                _within(1.0, lambda: there.get("p", ["19"]))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert here.wait_published(60)
        assert there.wait_published(60)
        assert same_bits(there.get("p", ["19"])[0], plain_row(19))


def _within(seconds: float, call: Callable[[], object]) -> None:
    started = time.monotonic()
    try:
        call()
    finally:
        assert time.monotonic() - started < seconds


def _controller() -> Any:
    import ray

    return ray.get_actor("TransferQueueController", namespace="transfer_queue")


def _unit() -> Any:
    import ray

    return ray.get_actor("TransferQueueStorageUnit#1")


def _pid_of(actor: Any) -> int:
    """Of the actor's process."""
    import ray

    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid


_STARTED_IN_A_THREAD = """
import threading, time
import ray
from tokenplane.staging.tq_backend.options import QueueOptions
from tokenplane.staging.tq_backend.runtime import join_cluster

options = QueueOptions(address="local", partition="p", units=1)
thread = threading.Thread(target=join_cluster, args=(options,))
thread.start()
thread.join()
time.sleep(2)
print(ray.get(ray.remote(lambda: "alive").remote(), timeout=120))
"""


def test_a_local_ray_outlives_the_thread_that_started_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _STARTED_IN_A_THREAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip().endswith("alive"), done.stderr[-2000:]


@pytest.mark.parametrize(
    "url",
    [
        "tq://local",
        "tq://?journal=x",
        "tq://local?journal=",
        "tq://local?journal=tq://local%3Fjournal%3Dx",
        "tq://local?journal=x&start=maybe",
        "tq://local?journal=x&deadline_s=0",
        "tq:local?x=1",
    ],
)
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_cluster_without_a_queue_is_an_error_in_bounded_time(tmp_path: Path) -> None:
    def nothing_there() -> QueueLink:
        raise StoreUnavailableError("TransferQueue: the cluster has no controller")

    started = time.monotonic()
    journal = open_store(str(tmp_path / "journal"))
    with pytest.raises(StoreUnavailableError):
        TransferQueueStore("tq://x", journal, nothing_there, connect_s=0.5)
    assert time.monotonic() - started < 10
    journal = open_store(str(tmp_path / "journal"))
    with TransferQueueStore("tq://x", journal, nothing_there, connect_s=0) as store:
        assert store.put("p", "k", plain_row()) is True
        assert same_bits(store.get("p", ["k"])[0], plain_row())
        with pytest.raises(StoreUnavailableError):
            store.get("p", ["k", "perhaps elsewhere"])
        assert store.wait_published(0.1) is False
