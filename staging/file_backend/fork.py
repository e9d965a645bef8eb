"""Keeps a forked child from using, or opening anew, a database that its parent had open.

SQLite's locks belong to a process, and its book-keeping of them is copied by ``fork``: a child
would believe that it holds locks that only its parent has. A child may open such a directory after
``exec`` (``subprocess``, the ``spawn`` and ``forkserver`` start methods), or if the parent closed
its store before forking.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

from tokenplane.schemas.errors import StoreError

_ADVICE = "open the store after the fork, or start the process with spawn or forkserver"


class ForkGuard:
    """Which databases this process has open, and which its parent had open when it forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], int] = {}
        self._inherited: frozenset[tuple[int, int]] = frozenset()
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: list[Any] = []
        os.register_at_fork(
            before=self._lock.acquire,
            after_in_parent=self._lock.release,
            after_in_child=self._after_fork,
        )

    def enter(self, database: Path, owner: object) -> tuple[int, int]:
        """Note an open database and the object that holds its connections.

        Raises:
            StoreError: it was open in the parent when this process was forked (code ``forked``).
        """
        status = database.stat()
        identity = (status.st_dev, status.st_ino)
        with self._lock:
            if identity in self._inherited:
                raise forked_error(str(database.parent))
            self._open[identity] = self._open.get(identity, 0) + 1
            self._owners.add(owner)
        return identity

    def leave(self, identity: tuple[int, int]) -> None:
        """The database was closed by one of its users."""
        with self._lock:
            self._open[identity] -= 1
            if not self._open[identity]:
                del self._open[identity]

    def _after_fork(self) -> None:
        self._inherited |= self._open.keys()
        # Never let go of a parent's connections: closing them here would touch its files.
        self._kept += self._owners
        self._owners.clear()
        self._open = {}
        self._lock.release()


def forked_error(root: str) -> StoreError:
    """The error of a store that crossed a fork."""
    return StoreError(
        f"the store was open in the parent when this process was forked; {_ADVICE}",
        code="forked",
        key=root,
    )


GUARD = ForkGuard()
"""One for the process: SQLite's book-keeping is per process as well."""
