"""Damage to a store that was not closed: its log, its shared index, its blobs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.staging.test_file_damage import attempt
from tokenplane.schemas.errors import CorruptRowError, MissingRowError
from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.file_backend.store import FileStore
from tokenplane.staging.store_types import RetentionPolicy, to_blob

KEYS = [f"k/{number}" for number in range(25)]


def row_of(key: str) -> pa.RecordBatch:
    return plain_row(KEYS.index(key), size=60 * KEYS.index(key))


def blob_of(key: str) -> bytes:
    return key.encode() * 50


@pytest.fixture(scope="module")
def unclosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a killed writer leaves: everything is in the log still."""
    root = tmp_path_factory.mktemp("log") / "store"
    copy = root.with_name("copy")
    with FileStore(root) as store:
        for key in KEYS:
            store.put("p", key, row_of(key), blobs=[to_blob(blob_of(key))])
        shutil.copytree(root, copy)
    assert (copy / "rows.sqlite-wal").stat().st_size > 20_000
    return copy


def read_prefix(root: Path) -> list[str]:
    """The keys that are left: the first so many, whole, with their blobs."""
    with FileStore(root, durability="process") as store:
        keys = store.keys("p")
        assert keys == KEYS[: len(keys)]
        for key, row in store.scan("p"):
            assert same_bits(row, row_of(key))
            assert store.get_blob(to_blob(blob_of(key)).sha256).to_pybytes() == blob_of(key)
        assert store.stats("p").rows == len(keys)
        for key in KEYS[len(keys) :]:  # what the tear took can be written again
            assert store.put("p", key, row_of(key), blobs=[to_blob(blob_of(key))])
        assert store.keys("p") == KEYS
        return keys


def test_an_unclosed_store_has_everything(unclosed: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(unclosed, root)
    assert read_prefix(root) == KEYS


@settings(max_examples=15)
@given(data=st.data())
def test_a_log_cut_short_keeps_the_rows_before_the_tear(
    unclosed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("torn") / "store"
    shutil.copytree(unclosed, root)
    path = root / "rows.sqlite-wal"
    content = path.read_bytes().rstrip(b"\0")
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    attempt(lambda: read_prefix(root))


@settings(max_examples=25)
@given(data=st.data())
def test_a_flipped_bit_in_the_log_or_its_index_serves_no_wrong_row(
    unclosed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("flipped") / "store"
    shutil.copytree(unclosed, root)
    path = root / data.draw(st.sampled_from(["rows.sqlite-wal", "rows.sqlite-shm"]))
    content = bytearray(path.read_bytes())
    used = [at for at, byte in enumerate(content) if byte]
    content[data.draw(st.sampled_from(used))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    attempt(lambda: read_prefix(root))


def damaged_forms(content: bytes) -> list[bytes]:
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    return [b"", content[:-1], content + b"x", bytes(flipped), bytes(len(content))]


def test_a_damaged_blob_harms_its_row_alone_and_the_next_put_mends_it(
    unclosed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(unclosed, root)
    blob = to_blob(blob_of("k/3"))
    (path,) = root.glob(f"blobs/*/{blob.sha256.hex()}")
    with FileStore(root) as store:
        for number, content in enumerate(damaged_forms(blob_of("k/3"))):
            path.write_bytes(content)
            with pytest.raises(CorruptRowError):
                store.get_blob(blob.sha256)
            assert same_bits(store.get("p", ["k/3"])[0], row_of("k/3"))
            other = to_blob(blob_of("k/4"))
            assert store.get_blob(other.sha256).to_pybytes() == blob_of("k/4")
            store.put("p", f"mends/{number}", plain_row(number), blobs=[blob])
            assert store.get_blob(blob.sha256).to_pybytes() == blob_of("k/3")
        path.unlink()
        with pytest.raises(MissingRowError):
            store.get_blob(blob.sha256)
        store.put("p", "mends", plain_row(9), blobs=[blob])
        assert store.get_blob(blob.sha256).to_pybytes() == blob_of("k/3")
        path.unlink()  # a file that is gone keeps nobody from removing its rows
        assert store.sweep(RetentionPolicy(max_age_s=0)).rows == len(KEYS) + 6
        assert store.stats().blobs == 0


def test_strange_files_are_nobodys_rows_and_hold_up_no_sweep(
    unclosed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(unclosed, root)
    strange = [root / "blobs" / "zz" / "no hash", root / "sealed" / "notes.txt"]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"?")
    with FileStore(root) as store:
        assert store.sweep(RetentionPolicy(orphan_age_s=0)).rows == 0
        assert store.keys("p") == KEYS
    assert all(path.exists() for path in strange)
