"""The connections of one open file store: one writer, pooled readers, a checkpoint thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import apsw

from tokenplane.schemas.errors import StoreClosedError, StoreError, StoreUnavailableError
from tokenplane.staging.file_backend.directory import DATABASE_FILE
from tokenplane.staging.file_backend.errors import file_errors
from tokenplane.staging.file_backend.fork import GUARD, forked_error
from tokenplane.staging.file_backend.log_space import LogSpace
from tokenplane.staging.file_backend.schema import Sql, check_database, connect

CHECKPOINT_PAGES: Final = 1000
"""The log is copied into the database each time it has grown by this much."""
RESTART_PAGES: Final = 4 * CHECKPOINT_PAGES
"""From here on it is also made to start anew: overwriting is quicker than growing."""
AHEAD_PAGES: Final = CHECKPOINT_PAGES // 4
"""Room that the log has beyond its end, as far as the checkpoint thread keeps up."""
FRAME_HEADER_BYTES: Final = 24
CLOSE_POLL_S: Final = 0.02
CHECKPOINT_WAIT_MS: Final = 50
"""Writers stand still while a restarting checkpoint waits for readers."""
POOLED_READERS: Final = 16


class Database:
    """Thread-safe access to one database; every foreign error that leaves it is translated."""

    def __init__(self, root: Path, *, read_only: bool, synchronous: str) -> None:
        self.root = root
        self.read_only = read_only
        self._synchronous = synchronous
        self._pid = os.getpid()
        self._closed = False
        self.write_lock = threading.Lock()
        """Held by whoever uses the writing connection."""
        self._pool_lock = threading.Lock()
        self._readers: list[apsw.Connection] = []
        # Every reader, pooled or in use: in a forked child none may be let go of (and so closed).
        self._lent: set[apsw.Connection] = set()
        self._file = str(root / DATABASE_FILE)
        self._identity = GUARD.enter(root / DATABASE_FILE, self)
        try:
            with file_errors():
                self._writer = self._connect()
                try:
                    check_database(self._writer)
                    # Here, not in its thread: the directory may be gone before that runs.
                    checkpoints = None if read_only else self._connect()
                except BaseException:
                    self._writer.close()
                    raise
        except BaseException:
            GUARD.leave(self._identity)
            raise
        self._log_pages = 0
        self._room_pages = 0
        self._checkpoint_due = False
        self._checkpoint_at, self._restart_at = CHECKPOINT_PAGES, RESTART_PAGES
        self._wake = threading.Event()
        self._checkpointer: threading.Thread | None = None
        if checkpoints is not None:
            self._writer.set_wal_hook(self._on_commit)
            self._checkpointer = threading.Thread(
                target=self._checkpoint_loop,
                args=(checkpoints,),
                name="tokenplane-checkpoint",
                daemon=True,
            )
            self._checkpointer.start()

    def check_open(self) -> None:
        """Raises:
        StoreClosedError: closed.
        StoreError: this process is a fork of the one that opened it (code ``forked``).
        """
        if self._pid != os.getpid():
            raise forked_error(str(self.root))
        if self._closed:
            raise StoreClosedError("the store was closed", key=str(self.root))

    def check_writable(self) -> None:
        """Raises:
        StoreError: opened with ``mode=ro`` (code ``read_only``); or as ``check_open``.
        """
        self.check_open()
        if self.read_only:
            raise StoreError("the store was opened read-only", code="read_only", key=str(self.root))

    @contextmanager
    def read(self) -> Iterator[Sql]:
        """A reading connection of one's own."""
        db = self.take_reader()
        try:
            with file_errors(db):
                yield db
        finally:
            self.give_reader(db)

    def take_reader(self) -> apsw.Connection:
        """A reading connection until ``give_reader``."""
        self.check_open()
        with self._pool_lock:
            if self._readers:
                return self._readers.pop()
        with file_errors():
            db = self._connect()
        with self._pool_lock:
            self._lent.add(db)
        return db

    def give_reader(self, db: apsw.Connection) -> None:
        """Hand a connection back; a transaction still open on it ends."""
        if self._pid != os.getpid():
            return
        with file_errors(db):
            if db.in_transaction:
                db.execute("ROLLBACK")
            with self._pool_lock:
                if not self._closed and len(self._readers) < POOLED_READERS:
                    self._readers.append(db)
                    return
                self._lent.discard(db)
            db.close()

    @contextmanager
    def write(self) -> Iterator[Sql]:
        """The writing connection inside a transaction, committed (durably) if the block ends."""
        self.check_writable()
        with self.write_lock, self.transaction() as db:
            yield db

    @contextmanager
    def transaction(self) -> Iterator[Sql]:
        """As ``write``, for a caller that holds ``write_lock``."""
        self.check_writable()
        db = self._writer
        with file_errors(db):
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
                self._check_place()
            except BaseException:
                # A full disk may have rolled the transaction back already.
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def autocommit(self) -> Iterator[Sql]:
        """The writing connection without a transaction, for a caller that holds ``write_lock``."""
        self.check_writable()
        with file_errors(self._writer):
            yield self._writer

    def close(self) -> None:
        """Idempotent. Connections still in use are closed when they are handed back."""
        if self._pid != os.getpid():
            return
        with self.write_lock:
            if self._closed:
                return
            self._closed = True
            self._wake.set()
            if self._checkpointer is not None:
                self._checkpointer.join()
            with self._pool_lock, file_errors():
                for db in [*self._readers, self._writer]:
                    db.close()
                self._lent.difference_update(self._readers)
                self._readers.clear()
        GUARD.leave(self._identity)

    def _check_place(self) -> None:
        """A database that was removed or replaced while it is open takes rows that nobody else
        will ever see; none of them may be acknowledged.
        """
        try:
            status = os.stat(self._file)
        except FileNotFoundError:
            found = None
        else:
            found = (status.st_dev, status.st_ino)
        if found != self._identity:
            raise StoreUnavailableError(
                "the store's files were removed or replaced while it was open", key=str(self.root)
            )

    def _connect(self) -> apsw.Connection:
        return connect(self.root, read_only=self.read_only, synchronous=self._synchronous)

    def _on_commit(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        if pages < self._log_pages:  # the log has started anew
            self._checkpoint_at, self._restart_at = CHECKPOINT_PAGES, RESTART_PAGES
        self._log_pages = pages
        if pages >= self._checkpoint_at:
            self._checkpoint_at = pages + CHECKPOINT_PAGES
            self._checkpoint_due = True
            self._wake.set()
        elif pages + AHEAD_PAGES // 2 > self._room_pages:
            self._wake.set()
        return 0

    def _checkpoint_loop(self, db: apsw.Connection) -> None:
        db.set_busy_timeout(CHECKPOINT_WAIT_MS)
        try:
            while True:
                if self._synchronous == "FULL":
                    self._make_room(db)
                self._wake.wait()
                self._wake.clear()
                if self._closed:
                    return
                if not self._checkpoint_due:
                    continue
                self._checkpoint_due = False
                # A checkpoint that fails (another process is at it, a reader holds the log, there
                # is no room) leaves rows safe in the log; the next one comes when it has grown.
                with suppress(apsw.Error):
                    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                    if self._log_pages >= self._restart_at:
                        self._restart_at = self._log_pages + RESTART_PAGES
                        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        finally:
            db.close()

    def _make_room(self, db: apsw.Connection) -> None:
        """Let the log's file be longer than the log; without it commits are slower, not worse."""
        self._room_pages = max(self._room_pages, self._log_pages + AHEAD_PAGES)
        space = LogSpace(self.root)
        lengthened = False
        with suppress(apsw.Error, OSError):
            nbytes = self._room_pages * (db.pragma("page_size") + FRAME_HEADER_BYTES)
            while self._lengthen(db, space, nbytes):
                lengthened = True
            if lengthened:
                space.sync()

    def _lengthen(self, db: apsw.Connection, space: LogSpace, nbytes: int) -> bool:
        # Whoever closes the store holds the lock while it waits for this thread.
        while not self.write_lock.acquire(timeout=CLOSE_POLL_S):
            if self._closed:
                return False
        try:
            if self._closed:
                return False
            db.execute("BEGIN IMMEDIATE")
            try:
                return space.lengthen(nbytes)
            finally:
                db.execute("ROLLBACK")
        finally:
            self.write_lock.release()
