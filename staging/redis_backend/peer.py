"""What a bare redis-py client does with the same bytes: the peer in ``tokenplane bench stores``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import redis

from tokenplane.schemas.staged_row import StagedRow


class RedisPeer:
    """``SET`` and ``MGET`` of blobs, without check, index or verification."""

    name = "redis-py SET/MGET"

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._prefix = f"bench-peer:{uuid.uuid4().hex}:"

    def stage(self, row: StagedRow, message: bytes, media: bytes | None) -> None:
        """One row; its media first."""
        name = self._prefix + row.staging_key
        if media is not None:
            self._client.set(f"{name}:media", media)
        self._client.set(name, message)

    def fetch(self, keys: Sequence[str]) -> list[bytes]:
        """The rows' bytes in one round trip."""
        found = self._client.mget([self._prefix + key for key in keys])
        return [value for value in found if isinstance(value, bytes)]

    def close(self) -> None:
        """Remove what was written."""
        for key in self._client.scan_iter(self._prefix + "*", count=1000):
            self._client.delete(key)
        self._client.close()
