"""Big buffers as content-addressed files: durable before the row that names them."""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pyarrow as pa

from tokenplane.schemas.errors import MissingRowError
from tokenplane.staging.file_backend.directory import BLOBS, TEMPORARY, sync_directory, write_file
from tokenplane.staging.file_backend.schema import Sql
from tokenplane.staging.row_packing import check_blob
from tokenplane.staging.store_types import Blob

_NAME: Final = re.compile("[0-9a-f]{64}")


class BlobFiles:
    """The files under ``blobs/``. Identical content is stored once.

    A file is removed only inside a write transaction in which no row refers to it, and a row
    commits only in a write transaction that saw its files: neither can overtake the other.
    """

    def __init__(self, root: Path, *, durable: bool) -> None:
        self._root = root / BLOBS
        self._durable = durable

    def path(self, sha256: bytes) -> Path:
        """Where the content with this hash lies."""
        name = sha256.hex()
        return self._root / name[:2] / name

    def write(self, blob: Blob) -> None:
        """Make the content durable under its name; a damaged file is replaced.

        Raises:
            OSError: it cannot be written; nothing half-written remains.
        """
        path = self.path(blob.sha256)
        if not path.parent.is_dir():
            path.parent.mkdir(exist_ok=True)
            if self._durable:
                sync_directory(self._root)
        if not _holds(path, blob):
            write_file(path, blob.data, durable=self._durable)
        elif self._durable:
            # Its writer may not have come to this yet.
            sync_directory(path.parent)

    def all_there(self, blobs: Iterable[Blob]) -> bool:
        """True if every file is in place; asked inside the transaction that commits the row."""
        return all(self.path(blob.sha256).exists() for blob in blobs)

    def read(self, sha256: bytes) -> pa.Buffer:
        """The verified content.

        Raises:
            MissingRowError: no such file.
            CorruptRowError: the file has another hash.
            OSError: it cannot be read.
        """
        try:
            data = self.path(sha256).read_bytes()
        except FileNotFoundError as exc:
            raise MissingRowError("no row refers to such a blob", key=sha256.hex()) from exc
        return check_blob(data, sha256)

    def unlink_unreferenced(self, db: Sql, shas: Iterable[bytes]) -> None:
        """Remove those of the files that no row refers to. ``db``: inside a write transaction."""
        for sha in shas:
            if not db.execute("SELECT 1 FROM blobs WHERE sha256=?", (sha,)).fetchone():
                self.path(sha).unlink(missing_ok=True)

    def is_unfinished(self, path: Path) -> bool:
        """True for a file that was being written under a temporary name."""
        return path.name.startswith(TEMPORARY)

    def orphans(self, db: Sql, age_s: float) -> list[tuple[Path, int]]:
        """(file, bytes) of files at least this old that no row refers to, unfinished ones too."""
        limit = time.time() - age_s
        found = []
        for path in self._root.glob("*/*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if status.st_mtime > limit:
                continue
            if not self.is_unfinished(path):
                if not _is_ours(path):
                    continue
                sha = bytes.fromhex(path.name)
                if db.execute("SELECT 1 FROM blobs WHERE sha256=?", (sha,)).fetchone():
                    continue
            found.append((path, status.st_size))
        return found


def _is_ours(path: Path) -> bool:
    """False for what somebody else put into the folder."""
    return _NAME.fullmatch(path.name) is not None and path.parent.name == path.name[:2]


def _holds(path: Path, blob: Blob) -> bool:
    """Whether the file has exactly the blob's bytes (cheaper to compare than to write again)."""
    try:
        with path.open("rb") as handle:
            if handle.seek(0, 2) != blob.nbytes:
                return False
            if not blob.nbytes:
                return True
            with (
                mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as mapped,
                memoryview(mapped) as held,
                memoryview(blob.data) as given,
            ):
                return bool(held == given.cast("B"))
    except FileNotFoundError:
        return False
