"""A file store's directory: its layout, its format version, and durable file operations.

::

    tokenplane-store.json   format version; a directory without it is no store
    open.lock               held while a process opens the store
    rows.sqlite             rows, index and claims (with -wal and -shm beside it)
    blobs/ab/ab12...        big buffers, named by their SHA-256
    sealed/...              one Arrow file per sealed partition
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Buffer, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tokenplane.schemas.errors import UnsupportedStoreError

FORMAT_VERSION: Final = 1
FORMAT_FILE: Final = "tokenplane-store.json"
LOCK_FILE: Final = "open.lock"
DATABASE_FILE: Final = "rows.sqlite"
BLOBS: Final = "blobs"
SEALED: Final = "sealed"
TEMPORARY: Final = ".tmp-"
"""How the name of a file that is still being written starts."""


@contextmanager
def open_lock(root: Path) -> Iterator[None]:
    """Held by one process at a time while it creates or opens the database."""
    with (root / LOCK_FILE).open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make_directory(root: Path) -> None:
    """Create the store's directory, or check that what is there is a store of ours.

    Raises:
        UnsupportedStoreError: something else is there, or a newer format.
    """
    if not root.exists():
        root.mkdir(parents=True, exist_ok=True)
        sync_directory(root.parent)
    if not root.is_dir():
        raise UnsupportedStoreError("not a directory", key=str(root))
    _refuse_strange(root)  # before the lock: what is somebody else's stays as it is
    with open_lock(root):
        if not (root / FORMAT_FILE).exists():
            _refuse_strange(root)
            text = json.dumps({"store": "tokenplane", "format": FORMAT_VERSION}) + "\n"
            write_file(root / FORMAT_FILE, text.encode(), durable=True)
        check_format(root)
        for name in (BLOBS, SEALED):
            (root / name).mkdir(exist_ok=True)
        sync_directory(root)


def _refuse_strange(root: Path) -> None:
    """Raises:
    UnsupportedStoreError: no store of ours is there, but something else.
    """
    if (root / FORMAT_FILE).exists():
        return
    # A killed process may have left the lock and a temporary file, nothing else.
    strange = sorted(
        path.name
        for path in root.iterdir()
        if path.name != LOCK_FILE and not path.name.startswith(TEMPORARY)
    )
    if strange and not (root / FORMAT_FILE).exists():
        raise UnsupportedStoreError(
            "the directory holds something else", got=strange[:8], key=str(root)
        )


def check_format(root: Path) -> None:
    """Raises:
    UnsupportedStoreError: no store of ours, or one of a newer format.
    """
    try:
        content = json.loads((root / FORMAT_FILE).read_bytes())
        kind, version = content["store"], content["format"]
    except FileNotFoundError as exc:
        raise UnsupportedStoreError("no tokenplane store", key=str(root)) from exc
    except (ValueError, TypeError, KeyError) as exc:
        raise UnsupportedStoreError("the format file is unreadable", key=str(root)) from exc
    if kind != "tokenplane" or type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise UnsupportedStoreError(
            "the store has another format",
            expected=f"tokenplane, format <= {FORMAT_VERSION}",
            got=f"{kind}, format {version}",
            key=str(root),
        )


def write_file(path: Path, data: Buffer, *, durable: bool) -> None:
    """Place a whole file under its name at once; nothing remains of a failed attempt.

    Args:
        durable: the file and its name survive a power cut when this returns.
    """
    temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb", buffering=0) as handle:
            view = memoryview(data).cast("B")
            while view:
                view = view[handle.write(view) :]
            if durable:
                os.fdatasync(handle.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
