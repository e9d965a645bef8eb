"""The one place where errors of SQLite and of the file system become ours."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import apsw

from tokenplane.schemas.errors import (
    CorruptRowError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from tokenplane.staging.file_backend.schema import Sql

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No room on the device, in the quota, or under the process's file size limit."""

_CORRUPT = (apsw.CorruptError, apsw.NotADBError, apsw.FormatError)
_CLOSED = (apsw.ConnectionClosedError, apsw.CursorClosedError)
_BUSY = (apsw.BusyError, apsw.LockedError, apsw.ProtocolError)


@contextmanager
def file_errors(db: Sql | None = None, *, key: str | None = None) -> Iterator[None]:
    """Translate what leaves the block.

    Args:
        db: the connection in use: it knows the system error behind a failed write.
    """
    try:
        yield
    except (apsw.Error, OSError) as exc:
        raise to_store_error(exc, db, key=key) from exc
    except UnicodeDecodeError as exc:
        raise CorruptRowError("the database holds text that is none", got=exc, key=key) from exc


def to_store_error(
    error: apsw.Error | OSError, db: Sql | None = None, *, key: str | None = None
) -> StoreError:
    """Our error for a foreign one."""
    got = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        if error.errno in FULL_ERRNOS:
            return StoreFullError("no room for the file", got=got, key=key)
        return StoreUnavailableError("the store's directory does not answer", got=got, key=key)
    full = isinstance(error, apsw.FullError)
    if isinstance(error, apsw.IOError) and db is not None and not full:
        full = _system_errno(db) in FULL_ERRNOS
    if full:
        return StoreFullError("no room for the row", got=got, key=key)
    if isinstance(error, _CORRUPT):
        return CorruptRowError("the database file is damaged", got=got, key=key)
    if isinstance(error, _CLOSED):
        return StoreClosedError("the store was closed", got=got, key=key)
    if isinstance(error, _BUSY):
        return StoreUnavailableError("the database stayed locked", got=got, key=key)
    if isinstance(error, (apsw.IOError, apsw.CantOpenError, apsw.PermissionsError)):
        return StoreUnavailableError("the database does not answer", got=got, key=key)
    return StoreError("the database refused", got=got, key=key)


def _system_errno(db: Sql) -> int:
    try:
        return db.system_errno
    except apsw.Error:
        return 0
