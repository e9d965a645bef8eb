"""Damaged files give errors of ours, never a wrong row and never a foreign exception."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenplane.schemas.errors import CorruptRowError, StoreError
from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.file_backend.store import FileStore
from tokenplane.staging.store_types import RetentionPolicy, to_blob

ROWS = {f"k/{number}": plain_row(number, size=60 * number) for number in range(25)}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with an open and a sealed partition, blobs and claims."""
    root = tmp_path_factory.mktemp("damage") / "store"
    with FileStore(root) as store:
        for partition in ("p", "q"):
            for key, row in ROWS.items():
                store.put(partition, key, row, blobs=[to_blob(key.encode())])
        store.claim("p", "c", max_rows=5, lease_s=1e9)
        store.ack("p", "c", ["k/1", "k/3"])
        store.seal("q")
    return root


def files_of(root: Path) -> list[Path]:
    return [root / "rows.sqlite", *root.glob("sealed/*.arrow")]


def attempt(call: Callable[[], object]) -> None:
    """Run it; one of our errors is a good answer too."""
    try:
        call()
    except StoreError:
        return


def read_everything(root: Path) -> None:
    with FileStore(root, durability="process") as store:
        for partition in ("p", "q"):
            read_partition(store, partition)
        attempt(store.partitions)
        attempt(store.stats)
        attempt(lambda: store.sweep(RetentionPolicy(max_age_s=0), dry_run=True))
        attempt(lambda: store.sweep(RetentionPolicy(max_age_s=0, include_backlog=True)))


def read_partition(store: FileStore, partition: str) -> None:
    attempt(lambda: check_scan(store, partition))
    for key in ROWS:
        attempt(partial(check_get, store, partition, key))
    attempt(lambda: store.keys(partition))
    attempt(lambda: check_claims(store, partition))
    attempt(lambda: store.stats(partition))
    attempt(lambda: store.put(partition, "new", plain_row(99)))
    attempt(lambda: store.discard(partition, ["k/7"]))


def check_get(store: FileStore, partition: str, key: str) -> None:
    (row,) = store.get(partition, [key])
    assert same_bits(row, ROWS[key])


def check_scan(store: FileStore, partition: str) -> None:
    for key, row in store.scan(partition):
        assert same_bits(row, ROWS[key])


def check_claims(store: FileStore, partition: str) -> None:
    for claim in store.claim(partition, "c", max_rows=50, lease_s=1, group_column="group"):
        assert same_bits(claim.row, ROWS[claim.key])


@settings(max_examples=30)
@given(data=st.data())
def test_a_flipped_bit_anywhere(
    filled: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("flipped") / "store"
    shutil.copytree(filled, root)
    path = data.draw(st.sampled_from(files_of(root)))
    content = bytearray(path.read_bytes())
    used = [at for at, byte in enumerate(content) if byte]
    content[data.draw(st.sampled_from(used))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    attempt(lambda: read_everything(root))


@settings(max_examples=15)
@given(data=st.data())
def test_a_file_cut_short(
    filled: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("torn") / "store"
    shutil.copytree(filled, root)
    path = data.draw(st.sampled_from(files_of(root)))
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    attempt(lambda: read_everything(root))


def test_a_damaged_sealed_chunk_is_noticed_row_by_row(filled: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    (path,) = root.glob("sealed/*.arrow")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with FileStore(root) as store:
        for key in ROWS:
            with pytest.raises(CorruptRowError):
                store.get("q", [key])
            check_get(store, "p", key)
    path.unlink()
    with FileStore(root) as store, pytest.raises(CorruptRowError):
        store.get("q", ["k/0"])


def test_rows_that_changed_places_are_noticed(filled: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    db = apsw.Connection(str(root / "rows.sqlite"))
    db.execute("UPDATE rows SET key='k/3x' WHERE key='k/3'")
    db.execute("UPDATE rows SET key='k/3' WHERE key='k/4'")
    db.close()
    with FileStore(root) as store:
        for partition in ("p", "q"):
            for key in ("k/3", "k/3x"):
                with pytest.raises(CorruptRowError):
                    store.get(partition, [key])


def test_a_row_moved_to_another_partition_is_noticed(filled: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    with FileStore(root) as store:
        store.put("z", "other", plain_row(1))
    db = apsw.Connection(str(root / "rows.sqlite"))
    query = "UPDATE rows SET partition_id=(SELECT id FROM partitions WHERE name=?) WHERE key=?"
    db.execute(query, ("p", "other"))
    db.close()
    with FileStore(root) as store, pytest.raises(CorruptRowError):
        store.get("p", ["other"])


def test_a_damaged_row_is_claimed_by_name_and_can_be_passed_over(
    filled: Path, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    db = apsw.Connection(str(root / "rows.sqlite"))
    db.execute("UPDATE rows SET message=zeroblob(100) WHERE key='k/5' AND message IS NOT NULL")
    db.close()
    with FileStore(root) as store:
        with pytest.raises(CorruptRowError) as caught:
            store.claim("p", "d", max_rows=8, lease_s=60)
        assert caught.value.key == "k/5"
        assert store.stats("p").leased["d"] == 0  # nothing stays leased to a claim that failed
        store.ack("p", "d", ["k/5"])
        keys = [claim.key for claim in store.claim("p", "d", max_rows=6, lease_s=60)]
        assert keys == ["k/0", "k/1", "k/2", "k/3", "k/4", "k/6"]
