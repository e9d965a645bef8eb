"""What each store is measured against: the same bytes through the bare thing below it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from tokenplane.schemas.columns import list_value
from tokenplane.schemas.row_message import HEADER_BYTES
from tokenplane.schemas.staged_row import StagedRow


class Peer(Protocol):
    """Stages and reads back, with neither index nor verification."""

    name: str

    def stage(self, row: StagedRow, message: bytes, media: bytes | None) -> None: ...

    def fetch(self, keys: Sequence[str]) -> list[bytes]: ...

    def close(self) -> None: ...


class FilePeer:
    """Appends to one file, with an ``fdatasync`` per row; media are files of their own."""

    name = "append + fdatasync"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = (folder / "peer.log").open("ab", buffering=0)
        self._places: dict[str, tuple[int, int]] = {}

    def stage(self, row: StagedRow, message: bytes, media: bytes | None) -> None:
        """Media first."""
        if media is not None:
            path = self._folder / f"peer-media-{len(self._places)}"
            with path.open("wb", buffering=0) as file:
                file.write(media)
                os.fdatasync(file.fileno())
        self._places[row.staging_key] = (self._log.tell(), len(message))
        self._log.write(message)
        os.fdatasync(self._log.fileno())

    def fetch(self, keys: Sequence[str]) -> list[bytes]:
        """One ``pread`` per row."""
        with (self._folder / "peer.log").open("rb", buffering=0) as log:
            places = [self._places[key] for key in keys]
            return [os.pread(log.fileno(), size, start) for start, size in places]

    def close(self) -> None:
        """The folder belongs to the caller."""
        self._log.close()


def concat_ids(messages: Sequence[bytes]) -> None:
    """What a reader of bare Arrow blobs does: decode, take the ids, concatenate; no check."""
    rows = [
        list_value(pa.ipc.open_stream(message[HEADER_BYTES:]).read_next_batch(), "token_ids_delta")
        for message in messages
    ]
    if rows:
        np.concatenate(rows)


def open_peer(url: str, folder: Path) -> Peer | None:
    """The peer of the store behind ``url``; None for ``memory:``."""
    scheme = url.partition(":")[0]
    if scheme in ("redis", "rediss"):
        from tokenplane.staging.redis_backend.peer import RedisPeer

        return RedisPeer(url.partition("?")[0])
    if scheme == "tq":
        from tokenplane.staging.tq_backend.peer import QueuePeer

        return QueuePeer()
    return None if scheme == "memory" else FilePeer(folder)
