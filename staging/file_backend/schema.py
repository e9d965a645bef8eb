"""The database of a file store: connections with the right settings, and the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Protocol

import apsw

from tokenplane.schemas.errors import CorruptRowError, UnsupportedStoreError
from tokenplane.staging.file_backend.directory import DATABASE_FILE, FORMAT_VERSION, open_lock

MIN_SQLITE: Final = (3, 51, 3)
"""Earlier ones can corrupt a WAL when two connections write and checkpoint at once."""
APPLICATION_ID: Final = 0x544B504C
BUSY_MS: Final = 30_000
STORE_ROW: Final = 0
"""``partitions.id`` of the row that counts for the whole store, blobs included."""

# ``rows.message`` stands last, so that reading the others does not follow its overflow pages; it is
# null once the partition is sealed. ``last_seq`` never goes back, so that a number names one row
# for ever. Indexes on ``rows`` cost a page per commit each: there are only the two that reads need.
TABLES: Final = """
CREATE TABLE partitions(
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    label TEXT NOT NULL DEFAULT '',
    rows INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    last_seq INTEGER NOT NULL DEFAULT 0,
    sealed INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO partitions(id, name) VALUES (0, '');
CREATE TABLE rows(
    seq INTEGER PRIMARY KEY,
    partition_id INTEGER NOT NULL,
    key TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at REAL NOT NULL,
    binding BLOB NOT NULL,
    chunk_id INTEGER,
    message BLOB
) STRICT;
CREATE UNIQUE INDEX rows_key ON rows(partition_id, key);
CREATE INDEX rows_order ON rows(partition_id);
CREATE TABLE blobs(
    sha256 BLOB PRIMARY KEY,
    bytes INTEGER NOT NULL,
    refs INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE blob_refs(
    seq INTEGER NOT NULL,
    sha256 BLOB NOT NULL,
    PRIMARY KEY(seq, sha256)
) STRICT, WITHOUT ROWID;
CREATE TABLE consumers(
    id INTEGER PRIMARY KEY,
    partition_id INTEGER NOT NULL,
    name TEXT NOT NULL,
    watermark INTEGER NOT NULL DEFAULT 0,
    UNIQUE(partition_id, name)
) STRICT;
CREATE TABLE deliveries(
    consumer_id INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    lease_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    expires_at REAL NOT NULL,
    acked INTEGER NOT NULL,
    PRIMARY KEY(consumer_id, seq)
) STRICT, WITHOUT ROWID;
CREATE TABLE sealed_files(
    id INTEGER PRIMARY KEY,
    partition_id INTEGER NOT NULL,
    name TEXT NOT NULL UNIQUE,
    schema BLOB NOT NULL
) STRICT;
CREATE TABLE chunks(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    file_id INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    length INTEGER NOT NULL,
    sha256 BLOB NOT NULL
) STRICT;
CREATE TABLE holds(
    hold_id TEXT PRIMARY KEY,
    partition TEXT NOT NULL,
    prefix TEXT NOT NULL,
    expires_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""


class Sql(Protocol):
    """A connection as its users see it: rows of a statement have no static types."""

    @property
    def in_transaction(self) -> bool: ...

    @property
    def system_errno(self) -> int: ...

    def execute(self, statements: str, bindings: Any = None) -> Any: ...

    def executemany(self, statements: str, bindings: Any) -> Any: ...

    def pragma(self, name: str) -> Any: ...


def only_row(cursor: Any) -> Any:
    """The row of a statement that always has one in an undamaged database.

    Raises:
        CorruptRowError: it has none.
    """
    row = cursor.fetchone()
    if row is None:
        raise CorruptRowError("the database lacks a row that must be there")
    return row


def check_sqlite_version(version: str | None = None) -> None:
    """Raises:
    UnsupportedStoreError: the linked SQLite is older than ``MIN_SQLITE``.
    """
    found = version or apsw.sqlite_lib_version()
    if tuple(int(part) for part in found.split(".")) < MIN_SQLITE:
        raise UnsupportedStoreError(
            "this SQLite can corrupt a store", expected=f">= {MIN_SQLITE}", got=found
        )


def connect(root: Path, *, read_only: bool, synchronous: str) -> apsw.Connection:
    """A connection to an existing database."""
    flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
    return _prepared(apsw.Connection(str(root / DATABASE_FILE), flags=flags), synchronous)


def _prepared(db: apsw.Connection, synchronous: str) -> apsw.Connection:
    db.set_busy_timeout(BUSY_MS)
    db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
    db.execute(f"PRAGMA synchronous={synchronous}; PRAGMA cell_size_check=ON")
    # A checkpoint inside a commit would be the p99 of a put: another thread does it.
    db.wal_autocheckpoint(0)
    return db


def create_database(root: Path, synchronous: str) -> None:
    """Create the database if it is not there; check it if it is. One process at a time.

    Raises:
        UnsupportedStoreError: a database of something else or of a newer format.
    """
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    with open_lock(root):
        db = apsw.Connection(str(root / DATABASE_FILE), flags=flags)
        try:
            db.set_busy_timeout(BUSY_MS)
            # The very first statement: after any other, the file never shrinks.
            db.execute("PRAGMA auto_vacuum=incremental")
            _prepared(db, synchronous)
            db.execute("PRAGMA journal_mode=WAL")
            if db.pragma("application_id") == 0 and not db.table_exists("main", "rows"):
                db.execute(
                    f"BEGIN EXCLUSIVE; {TABLES}"
                    f"PRAGMA application_id={APPLICATION_ID};"
                    f"PRAGMA user_version={FORMAT_VERSION}; COMMIT"
                )
            check_database(db)
        finally:
            db.close()


def check_database(db: apsw.Connection) -> None:
    """Raises:
    UnsupportedStoreError: a database of something else or of a newer format.
    """
    found = (db.pragma("application_id"), db.pragma("user_version"))
    if found[0] != APPLICATION_ID or not 1 <= found[1] <= FORMAT_VERSION:
        raise UnsupportedStoreError(
            "the database has another format",
            expected=(APPLICATION_ID, f"<= {FORMAT_VERSION}"),
            got=found,
        )
