"""Opening a file store: what is created, what is refused, and what each option does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import apsw
import pytest

from tokenplane.schemas.errors import (
    ConfigError,
    StoreError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.file_backend.schema import check_sqlite_version
from tokenplane.staging.file_backend.store import FileStore
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store_types import RetentionPolicy, to_blob


@pytest.mark.parametrize(
    "form", ["file://{path}", "file://localhost{path}", "file:{path}", "{path}"]
)
def test_every_form_of_a_path_opens_one_store(tmp_path: Path, form: str) -> None:
    with FileStore(tmp_path / "a store") as store:
        store.put("p", "k", plain_row())
    path = f"{tmp_path}/a store"
    url = form.format(path=path.replace(" ", "%20") if ":" in form else path)
    with open_store(url) as again:
        assert again.keys("p") == ["k"]


def test_a_relative_path_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store("file:sub/store") as store:
        store.put("p", "k", plain_row())
    with open_store("sub/store") as store:
        assert store.keys("p") == ["k"]
        assert store.url == (tmp_path / "sub" / "store").as_uri()


@pytest.mark.parametrize(
    "url",
    [
        "file://otherhost/x",
        "file:",
        "file://",
        "file:{path}?no_such_option=1",
        "file:{path}?max_bytes=many",
        "file:{path}?max_bytes=0",
        "file:{path}?full_wait_s=-1",
        "file:{path}?mode=rx",
        "file:{path}?durability=none",
        "file:{path}?durability=process&durability=process",
        "file:{path}?synchronous=off",
    ],
)
def test_a_wrong_url_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url.format(path=tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_the_options_reach_the_store(tmp_path: Path) -> None:
    with open_store(f"file:{tmp_path}/s?max_bytes=12345&durability=process") as store:
        assert store.stats().max_bytes == 12345
        assert store.durable == "process"
    with open_store(f"file:{tmp_path}/s") as store:
        assert store.durable == "power"


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UnsupportedStoreError, match=r"notes\.txt"):
        FileStore(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UnsupportedStoreError):
        FileStore(tmp_path / "notes.txt")
    with pytest.raises(UnsupportedStoreError):
        FileStore(tmp_path / "nothing here", mode="ro")
    assert not (tmp_path / "nothing here").exists()


@pytest.mark.parametrize(
    "content",
    [
        '{"store": "tokenplane", "format": 2}',
        '{"store": "tokenplane", "format": 0}',
        '{"store": "tokenplane", "format": true}',
        '{"store": "something", "format": 1}',
        '{"store": "tokenplane"}',
        "[]",
        "not json",
        "",
    ],
)
@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_another_format_is_refused(tmp_path: Path, content: str, mode: str) -> None:
    FileStore(tmp_path / "s").close()
    assert json.loads((tmp_path / "s" / "tokenplane-store.json").read_text())["format"] == 1
    (tmp_path / "s" / "tokenplane-store.json").write_text(content)
    with pytest.raises(UnsupportedStoreError):
        FileStore(tmp_path / "s", mode=mode)


def test_a_database_of_another_format_is_refused(tmp_path: Path) -> None:
    FileStore(tmp_path / "s").close()
    db = apsw.Connection(str(tmp_path / "s" / "rows.sqlite"))
    db.execute("PRAGMA user_version=2")
    db.close()
    for mode in ("rw", "ro"):
        with pytest.raises(UnsupportedStoreError):
            FileStore(tmp_path / "s", mode=mode)


def test_what_a_killed_creation_left_is_taken_over(tmp_path: Path) -> None:
    root = tmp_path / "s"
    root.mkdir()
    (root / "open.lock").touch()
    (root / ".tmp-0123").write_bytes(b"half")
    with FileStore(root) as store:
        assert store.put("p", "k", plain_row())


@pytest.mark.parametrize("version", ["3.40.1", "3.51.2", "3.7.0"])
def test_an_old_sqlite_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedStoreError, match=version):
        check_sqlite_version(version)
    check_sqlite_version("3.51.3")
    check_sqlite_version()


def test_a_read_only_store_reads_while_another_writes(tmp_path: Path) -> None:
    blob = to_blob(b"b" * 100)
    with FileStore(tmp_path / "s") as writer:
        writer.put("p", "k", plain_row(1), blobs=[blob])
        with FileStore(tmp_path / "s", mode="ro") as reader:
            writer.put("p", "l", plain_row(2))
            writer.seal("p")
            assert reader.keys("p") == ["k", "l"]
            assert same_bits(reader.get("p", ["l"])[0], plain_row(2))
            assert reader.get_blob(blob.sha256).size == 100
            assert reader.stats().rows == 2
            assert reader.sweep(RetentionPolicy(max_age_s=0), dry_run=True).rows == 2
            for call in (
                lambda: reader.put("p", "m", plain_row()),
                lambda: reader.discard("p", ["k"]),
                lambda: reader.claim("p", "c", max_rows=1, lease_s=1),
                lambda: reader.ack("p", "c", ["k"]),
                lambda: reader.seal("p"),
                lambda: reader.sweep(RetentionPolicy(max_age_s=0)),
            ):
                with pytest.raises(StoreError) as caught:
                    call()
                assert caught.value.code == "read_only"
            assert writer.keys("p") == ["k", "l"]


def test_a_read_only_store_changes_no_file(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with FileStore(root) as store:
        store.put("p", "k", plain_row())
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with FileStore(root, mode="ro") as store:
        assert store.keys("p") == ["k"]
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for leftover in ("rows.sqlite-wal", "rows.sqlite-shm"):
        after.pop(root / leftover, None)
    assert after == before


def test_the_settings_that_durability_rests_on(tmp_path: Path) -> None:
    with FileStore(tmp_path / "s") as store, store._database.write() as db:
        assert db.pragma("synchronous") == 2  # FULL
        assert db.pragma("journal_mode") == "wal"
        assert db.pragma("auto_vacuum") == 2  # incremental
        assert db.pragma("wal_autocheckpoint") == 0


def test_a_blob_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def spy(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: object) -> object:
            events.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    with FileStore(tmp_path / "s") as store:
        spy(os, "fdatasync")
        spy(os, "fsync")
        spy(Path, "rename")
        store.put("p", "k", plain_row(), blobs=[to_blob(b"b" * 100)])
        # The new folder's name, the content, its name, and the name's durability.
        assert events == ["fsync", "fdatasync", "rename", "fsync"]
        events.clear()
        store.put("p", "l", plain_row(2), blobs=[to_blob(b"b" * 100)])
        assert events == ["fsync"]


def test_the_file_shrinks_after_a_sweep(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with FileStore(root, durability="process") as store:
        for number in range(40):
            store.put("p", str(number), plain_row(number, size=50_000))
    full = (root / "rows.sqlite").stat().st_size
    with FileStore(root, durability="process") as store:
        store.sweep(RetentionPolicy(max_age_s=0))
    assert (root / "rows.sqlite").stat().st_size < full / 10


def test_the_log_is_checkpointed_in_the_background(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with FileStore(root, durability="process") as store:
        for number in range(600):
            store.put("p", str(number), plain_row(number, size=30_000))
        written = 600 * 30_000
        assert (root / "rows.sqlite-wal").stat().st_size < written
        assert (root / "rows.sqlite").stat().st_size > written / 4


def test_a_path_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailableError):
        FileStore(tmp_path / "file" / "store")
