"""Writes the log's blocks before commits need them.

A commit that makes the log's file grow also waits for the file system's own journal, which notes
the new length; one that overwrites does not. To SQLite whatever follows a log's last frame without
carrying that log's salt is nothing, so zeros may stand there.
"""

from __future__ import annotations

import os
from os import fdatasync, pwrite
from pathlib import Path
from typing import Final

from tokenplane.staging.file_backend.directory import DATABASE_FILE

STEP_BYTES: Final = 2**18
"""Written under the write lock at a time: writers wait no longer than that takes."""
SPARE_BYTES: Final = 2**26
"""A disk with less room than this keeps it for rows."""


class LogSpace:
    """The file of one database's log; used by one thread."""

    def __init__(self, root: Path) -> None:
        self._path = root / f"{DATABASE_FILE}-wal"

    def lengthen(self, nbytes: int) -> bool:
        """One step on the way to a length of ``nbytes``; False when it is reached.

        The caller holds the database's write lock, in this process and against others: SQLite
        writes at the end of this file too.

        Raises:
            OSError: no such file, no room, or beyond the process's file size limit.
        """
        with self._path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            disk = os.statvfs(self._path)
            if size >= nbytes or disk.f_bavail * disk.f_frsize < SPARE_BYTES:
                return False
            pwrite(file.fileno(), bytes(min(STEP_BYTES, nbytes - size)), size)
            return True

    def sync(self) -> None:
        """Have the blocks on the disk before the commits that will overwrite them.

        Raises:
            OSError: as above.
        """
        with self._path.open("r+b", buffering=0) as file:
            fdatasync(file.fileno())
