"""A row's way into TransferQueue beside its journal: early, but never readable too early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.stores.tq_backend import QueueBackend
from tokenplane.schemas.errors import (
    KeyConflictError,
    MissingRowError,
    StoreFullError,
)
from tokenplane.schemas.staged_row import TOKEN_COLUMNS
from tokenplane.staging.contract_suite.backend import plain_row, same_bits, staged_row
from tokenplane.staging.file_backend.store import FileStore
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store_types import Blob, to_blob
from tokenplane.staging.tq_backend import link as link_module
from tokenplane.staging.tq_backend.options import QueueOptions
from tokenplane.staging.tq_backend.payload import blob_name, row_name
from tokenplane.staging.tq_backend.replay import replay
from tokenplane.staging.tq_backend.runtime import connect
from tokenplane.staging.tq_backend.store import TransferQueueStore
from tokenplane.staging.tq_backend.transport import ManagerTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_S = 60.0
MEDIA = bytes(range(256)) * 4096


class GatedStore(FileStore):
    """A journal that writes a row when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked = threading.Event()
        self.allowed = threading.Event()

    def put(
        self, partition: str, key: str, row: pa.RecordBatch, *, blobs: Sequence[Blob] = ()
    ) -> bool:
        self.asked.set()
        assert self.allowed.wait(WAIT_S)
        return super().put(partition, key, row, blobs=blobs)


@pytest.fixture
def options(ray_address: str, tmp_path: Path) -> QueueOptions:
    return QueueOptions(address=ray_address, partition=f"tokenplane.{tmp_path.name}")


@pytest.fixture
def there(ray_address: str, tmp_path: Path) -> Iterator[TransferQueueStore]:
    """Another host."""
    with _open(ray_address, tmp_path / "there", tmp_path.name) as store:
        yield store


def _open(address: str, journal: Path, namespace: str, **more: object) -> TransferQueueStore:
    store = open_store(QueueBackend(address, journal, namespace=namespace).url(**more))
    assert isinstance(store, TransferQueueStore)
    return store


def _link(store: TransferQueueStore) -> Any:
    link = store._publisher.link
    assert link is not None
    return link


def test_nothing_is_readable_before_the_journal_has_it(
    options: QueueOptions, there: TransferQueueStore, tmp_path: Path
) -> None:
    journal, blob = GatedStore(tmp_path / "here"), to_blob(MEDIA)
    with (
        TransferQueueStore("tq://gated", journal, partial(connect, options)) as here,
        ThreadPoolExecutor(1) as pool,
    ):
        writing = pool.submit(here.put, "p", "k", plain_row(), blobs=[blob])
        assert journal.asked.wait(WAIT_S)
        # The places are there, perhaps the blob too: nobody reads them.
        for _ in range(20):
            with pytest.raises(MissingRowError):
                there.get("p", ["k"])
            with pytest.raises(MissingRowError):
                there.get_blob(blob.sha256)
        assert {row_name("p", "k"), blob_name(blob.sha256)} <= _link(there).names().keys()
        journal.allowed.set()
        assert writing.result(WAIT_S) is True
        assert same_bits(there.get("p", ["k"])[0], plain_row())
        assert there.get_blob(blob.sha256).to_pybytes() == MEDIA


def test_a_blob_whose_place_was_cleared_meanwhile_is_sent_again(
    options: QueueOptions, there: TransferQueueStore, tmp_path: Path
) -> None:
    journal, blob = GatedStore(tmp_path / "here"), to_blob(MEDIA)
    with (
        TransferQueueStore("tq://gated", journal, partial(connect, options)) as here,
        ThreadPoolExecutor(1) as pool,
    ):
        writing = pool.submit(here.put, "p", "k", plain_row(), blobs=[blob])
        assert journal.asked.wait(WAIT_S)
        link = _link(there)
        while blob_name(blob.sha256) not in link.names():
            pass
        link.clear([blob_name(blob.sha256), row_name("p", "k")])
        there.put("p", "other", plain_row(7))  # takes one of the places
        journal.allowed.set()
        assert writing.result(WAIT_S) is True
        assert same_bits(there.get("p", ["k"])[0], plain_row())
        assert there.get_blob(blob.sha256).to_pybytes() == MEDIA
        assert same_bits(here.get("p", ["other"])[0], plain_row(7))


def test_a_refused_row_leaves_nothing_in_the_queue(
    ray_address: str, there: TransferQueueStore, tmp_path: Path
) -> None:
    with _open(
        ray_address, tmp_path / "here", tmp_path.name, max_bytes=20_000, full_wait_s=0
    ) as here:
        assert here.put("p", "k", plain_row(1))
        for number in range(3):
            with pytest.raises(StoreFullError):
                here.put("p", f"l{number}", plain_row(2), blobs=[to_blob(MEDIA)])
        with pytest.raises(KeyConflictError):
            here.put("p", "k", plain_row(3), blobs=[to_blob(b"small")])
        assert here.wait_published(WAIT_S)
        assert _link(there).names().keys() == {row_name("p", "k")}
        assert same_bits(there.get("p", ["k"])[0], plain_row(1))


def test_a_refused_row_whose_places_come_late_leaves_nothing_in_the_queue(
    ray_address: str, there: TransferQueueStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, landed = link_module.QueueLink._reserve, threading.Event()

    async def late(link: Any, *request: Any) -> Any:
        await asyncio.sleep(0.5)
        meta = await reserve(link, *request)
        landed.set()
        return meta

    with _open(
        ray_address, tmp_path / "here", tmp_path.name, max_bytes=20_000, full_wait_s=0
    ) as here:
        assert here.wait_published(WAIT_S)
        monkeypatch.setattr(link_module.QueueLink, "_reserve", late)
        with pytest.raises(StoreFullError):
            here.put("p", "k", plain_row(2), blobs=[to_blob(MEDIA)])
        assert here.wait_published(WAIT_S)
        assert landed.wait(WAIT_S)
        assert _link(there).names() == {}


def test_a_row_that_comes_back_while_its_place_is_cleared_is_published(
    ray_address: str, there: TransferQueueStore, tmp_path: Path
) -> None:
    with _open(ray_address, tmp_path / "here", tmp_path.name) as here:
        blob = to_blob(MEDIA)
        assert here.put("p", "k", plain_row(1), blobs=[blob])
        journal, link = here._journal, _link(here)
        journal.discard("p", ["k"])

        class Slow:
            """The row is put again between the look at the journal and the clearing."""

            names, put = link.names, link.put

            def clear(self, names: Sequence[str]) -> None:
                journal.put("p", "k", plain_row(1), blobs=[blob])
                link.clear(names)

        # Tags are set behind the put.
        while sorted(filter(None, link.names().values())) != [here._origin.hex()] * 2:
            pass
        assert replay(journal, here._origin, Slow()) == (0, 2)  # type: ignore[arg-type]
        assert same_bits(there.get("p", ["k"])[0], plain_row(1))
        assert there.get_blob(blob.sha256).to_pybytes() == MEDIA


def test_any_other_storage_backend_is_reached_through_its_manager(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "transport_of", ManagerTransport)
    rows = [staged_row("r", str(number), prompt=range(number, 400)) for number in range(12)]
    keys = [row.staging_key for row in rows]
    blobs = [to_blob(MEDIA), to_blob(b"small")]
    with (
        _open(ray_address, tmp_path / "a", tmp_path.name) as here,
        _open(ray_address, tmp_path / "b", tmp_path.name) as there,
    ):
        for row in rows:
            here.put("staged", row.staging_key, row.to_batch(), blobs=blobs)
        for columns in (TOKEN_COLUMNS, None):
            found = there.get("staged", keys, columns)
            for row, batch in zip(rows, found, strict=True):
                whole = row.to_batch()
                assert same_bits(batch, whole if columns is None else whole.select(columns))
        for blob in blobs:
            assert there.get_blob(blob.sha256).to_pybytes() == blob.data
        here.discard("staged", keys)
        with pytest.raises(MissingRowError):
            there.get("staged", keys[:1])


def test_empty_and_unusual_buffers(
    ray_address: str, there: TransferQueueStore, tmp_path: Path
) -> None:
    blobs = [to_blob(b""), to_blob(bytearray(b"x")), to_blob(memoryview(b"abcdefgh").cast("I"))]
    with _open(ray_address, tmp_path / "here", tmp_path.name) as here:
        assert here.put("p", "k", plain_row(), blobs=blobs)
        for blob, content in zip(blobs, (b"", b"x", b"abcdefgh"), strict=True):
            assert there.get_blob(blob.sha256).to_pybytes() == content
