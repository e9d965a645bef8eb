"""Every foreign exception that a file store can meet becomes one of ours."""

from __future__ import annotations

import errno
import pickle

import apsw
import pytest

from tokenplane.schemas.errors import (
    CorruptRowError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from tokenplane.staging.file_backend.errors import file_errors, to_store_error

FOREIGN = [
    value
    for name, value in vars(apsw).items()
    if name.endswith("Error") and isinstance(value, type) and issubclass(value, apsw.Error)
]
EXPECTED: dict[type[apsw.Error], type[StoreError]] = {
    apsw.FullError: StoreFullError,
    apsw.CorruptError: CorruptRowError,
    apsw.NotADBError: CorruptRowError,
    apsw.FormatError: CorruptRowError,
    apsw.BusyError: StoreUnavailableError,
    apsw.LockedError: StoreUnavailableError,
    apsw.ProtocolError: StoreUnavailableError,
    apsw.IOError: StoreUnavailableError,
    apsw.CantOpenError: StoreUnavailableError,
    apsw.PermissionsError: StoreUnavailableError,
    apsw.ConnectionClosedError: StoreClosedError,
    apsw.CursorClosedError: StoreClosedError,
}


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda kind: kind.__name__)
def test_every_sqlite_error_is_translated(foreign: type[apsw.Error]) -> None:
    with pytest.raises(StoreError) as caught, file_errors(key="k"):
        raise foreign("what happened")
    error = caught.value
    assert type(error) is EXPECTED.get(foreign, StoreError)
    assert error.key == "k"
    assert "what happened" in str(error)
    assert isinstance(error.__cause__, foreign)
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_a_full_store(number: int) -> None:
    assert isinstance(to_store_error(OSError(number, "no room")), StoreFullError)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE])
def test_other_system_errors_make_the_store_unavailable(number: int) -> None:
    assert isinstance(to_store_error(OSError(number, "gone")), StoreUnavailableError)


def test_text_that_is_none_is_corruption() -> None:
    with pytest.raises(CorruptRowError), file_errors():
        b"\xff".decode()


def test_our_own_errors_pass_through() -> None:
    with pytest.raises(KeyError), file_errors():
        raise KeyError("not foreign")
