"""Contract of every store: blobs and byte budgets."""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np
import pytest

from tokenplane.schemas.errors import (
    CorruptRowError,
    InvalidRecordError,
    KeyConflictError,
    MissingRowError,
    StoreFullError,
)
from tokenplane.staging.contract_suite.backend import StoreBackend, plain_row
from tokenplane.staging.contract_suite.rows import run_together
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import Blob, to_blob


class BlobContract:
    """See ``StagingStoreContract``."""

    @pytest.mark.parametrize("size", [0, 1, 4096, 300_000])
    def test_a_blob_comes_back_whole(self, store: StagingStore, size: int) -> None:
        data = np.random.default_rng(size).bytes(size)
        blob = to_blob(data)
        assert blob == Blob(hashlib.sha256(data).digest(), data)
        assert store.put("p", "k", plain_row(), blobs=[blob, blob])
        assert store.get_blob(blob.sha256).to_pybytes() == data

    def test_a_blob_may_be_any_contiguous_buffer(self, store: StagingStore) -> None:
        array = np.arange(12, dtype=np.int32).reshape(3, 4)
        blob = to_blob(array)
        assert store.put("p", "k", plain_row(), blobs=[blob])
        assert store.get_blob(blob.sha256).to_pybytes() == array.tobytes()

    def test_a_blob_is_named_by_its_content(self) -> None:
        with pytest.raises(InvalidRecordError):
            Blob(bytes(32), b"something")

    def test_an_unknown_blob_is_missing(self, store: StagingStore) -> None:
        with pytest.raises(MissingRowError) as caught:
            store.get_blob(bytes(32))
        assert caught.value.key == "00" * 32

    def test_equal_blobs_are_stored_once_and_live_as_long_as_a_row(
        self, store: StagingStore
    ) -> None:
        blob = to_blob(b"x" * 5000)
        store.put("p", "k", plain_row(1), blobs=[blob])
        store.put("p", "l", plain_row(2), blobs=[blob])
        store.put("q", "m", plain_row(3), blobs=[blob, to_blob(b"y")])
        assert (store.stats().blobs, store.stats().blob_bytes) == (2, 5001)
        assert (store.stats("p").blobs, store.stats("p").blob_bytes) == (1, 5000)
        store.discard("p", ["k", "l"])
        assert store.get_blob(blob.sha256).size == 5000
        store.discard("q", ["m"])
        with pytest.raises(MissingRowError):
            store.get_blob(blob.sha256)
        assert (store.stats().blobs, store.stats().blob_bytes) == (0, 0)
        assert store.put("p", "k", plain_row(1), blobs=[blob])
        assert store.get_blob(blob.sha256).size == 5000

    def test_a_refused_row_leaves_no_blob(self, store: StagingStore) -> None:
        store.put("p", "k", plain_row(1))
        blob = to_blob(b"z" * 100)
        with pytest.raises(KeyConflictError):
            store.put("p", "k", plain_row(2), blobs=[blob])
        with pytest.raises(MissingRowError):
            store.get_blob(blob.sha256)

    def test_a_damaged_blob_is_noticed(self, store: StagingStore, backend: StoreBackend) -> None:
        data = b"z" * 1000
        blob = to_blob(data)
        store.put("p", "k", plain_row(), blobs=[blob])
        for damaged in (data[:-1], b"", b"a" + data[1:], data + b"z"):
            backend.raw_write_blob(store, blob.sha256, damaged)
            with pytest.raises(CorruptRowError):
                store.get_blob(blob.sha256)
        backend.raw_write_blob(store, blob.sha256, data)
        assert store.get_blob(blob.sha256).to_pybytes() == data

    def test_whoever_sees_a_row_finds_its_blobs(self, store: StagingStore) -> None:
        contents = [bytes([number % 7]) * 20_000 for number in range(30)]
        blobs = [to_blob(content) for content in contents]
        done = threading.Event()

        def write() -> None:
            for number, blob in enumerate(blobs):
                store.put("p", str(number), plain_row(number), blobs=[blob])
            done.set()

        def read() -> int:
            seen = 0
            while not done.is_set() or seen < len(blobs):
                for key in store.keys("p")[seen:]:
                    found = store.get_blob(blobs[int(key)].sha256)
                    assert found.to_pybytes() == contents[int(key)]
                    seen += 1
            return seen

        assert run_together(write, read, read) == [None, 30, 30]


class BudgetContract:
    """See ``StagingStoreContract``."""

    def test_a_full_store_refuses_after_a_bounded_wait(self, backend: StoreBackend) -> None:
        with backend.open(max_bytes=20_000, full_wait_s=0.3) as store:
            store.put("p", "k", plain_row(1, size=15_000))
            before = store.stats()
            assert before.max_bytes == 20_000
            started = time.monotonic()
            with pytest.raises(StoreFullError) as caught:
                store.put("p", "l", plain_row(2, size=15_000), blobs=[to_blob(b"b" * 100)])
            assert 0.25 <= time.monotonic() - started < 20
            assert caught.value.retryable
            assert store.stats() == before
            assert store.put("p", "small", plain_row(3, size=10))

    def test_blobs_count_once_against_the_budget(self, backend: StoreBackend) -> None:
        with backend.open(max_bytes=20_000, full_wait_s=0.0) as store:
            blob = to_blob(b"b" * 12_000)
            store.put("p", "k", plain_row(1), blobs=[blob])
            store.put("p", "l", plain_row(2), blobs=[blob])
            with pytest.raises(StoreFullError):
                store.put("p", "m", plain_row(3), blobs=[to_blob(b"c" * 12_000)])
            store.discard("p", ["k", "l"])
            assert store.put("p", "m", plain_row(3), blobs=[to_blob(b"c" * 12_000)])

    def test_what_can_never_fit_is_refused_at_once(self, backend: StoreBackend) -> None:
        with backend.open(max_bytes=5_000, full_wait_s=60.0) as store:
            started = time.monotonic()
            with pytest.raises(StoreFullError):
                store.put("p", "k", plain_row(1, size=10_000))
            assert time.monotonic() - started < 30

    def test_a_waiting_put_goes_on_when_there_is_room(self, backend: StoreBackend) -> None:
        with backend.open(max_bytes=20_000, full_wait_s=60.0) as store:
            store.put("p", "k", plain_row(1, size=15_000))

            def make_room() -> int:
                time.sleep(0.2)
                return store.discard("p", ["k"])

            results = run_together(
                lambda: store.put("p", "l", plain_row(2, size=15_000)), make_room
            )
            assert results == [True, 1]
            assert store.keys("p") == ["l"]

    def test_identical_rows_need_no_room(self, backend: StoreBackend) -> None:
        with backend.open(max_bytes=20_000, full_wait_s=0.0) as store:
            store.put("p", "k", plain_row(1, size=15_000))
            assert store.put("p", "k", plain_row(1, size=15_000)) is False
