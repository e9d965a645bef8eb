"""Row messages on a Redis server: names, and verified reading."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from tokenplane.schemas.errors import CorruptRowError
from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.redis_backend.scripts import ROW_HEADER_BYTES, TOKENS
from tokenplane.staging.row_packing import unpack_row
from tokenplane.staging.row_split import TokenPart, read_token_columns

KEYS_PER_READ: Final = 500
_HEADER: Final = struct.Struct("<32s16sd4I8x")


class RedisRows:
    """Reads rows by key. Each read is one step, so that it sees a row whole or not at all."""

    def __init__(self, connection: RedisConnection, total: bytes) -> None:
        self._connection = connection
        self._total = total

    def names(self, partition: str, keys: Sequence[str]) -> list[bytes]:
        """Server names of the rows."""
        name = partition.encode()
        before = b"%sm:%d:%s:" % (self._total[:-1], len(name), name)
        return [before + key.encode() for key in keys]

    def read(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None
    ) -> dict[str, pa.RecordBatch]:
        """The rows that are there, by key.

        Raises:
            CorruptRowError: damaged, or another key's.
        """
        found: dict[str, pa.RecordBatch] = {}
        for at in range(0, len(keys), KEYS_PER_READ):
            page = keys[at : at + KEYS_PER_READ]
            values = self._connection.command("MGET", *self.names(partition, page))
            for key, content in zip(page, values, strict=True):
                if content is not None:
                    found[key] = unpack_stored(content, partition, key, columns)
        return found

    def read_tokens(
        self, partition: str, keys: Sequence[str], columns: Sequence[str]
    ) -> dict[str, pa.RecordBatch]:
        """``columns`` of the rows that are there and have a token part, by key.

        Raises:
            CorruptRowError: damaged, or another key's.
        """
        found: dict[str, pa.RecordBatch] = {}
        for at in range(0, len(keys), KEYS_PER_READ):
            page = keys[at : at + KEYS_PER_READ]
            values = self._connection.script(TOKENS, self.names(partition, page))
            parts = {
                key: (head, tokens)
                for key, head, tokens in zip(page, values[::2], values[1::2], strict=True)
                if head
            }
            there = list(parts)
            rows = read_token_columns(partition, there, list(parts.values()), columns)
            found |= dict(zip(there, rows, strict=True))
        return found


def stored_content(
    binding: bytes, nonce: bytes, created_at: float, message: bytes, part: TokenPart | None
) -> bytes:
    """The string that is stored for a row; see ``scripts.py``."""
    head = b"" if part is None else part.head
    start = 0 if part is None else ROW_HEADER_BYTES + len(head) + part.start
    size = 0 if part is None else part.size
    header = _HEADER.pack(binding, nonce, created_at, len(head), start, size, len(message))
    return b"".join((header, head, message))


def unpack_stored(
    content: bytes, partition: str, key: str, columns: Sequence[str] | None
) -> pa.RecordBatch:
    """The verified row of what is stored for it.

    Raises:
        CorruptRowError: damaged, or another key's.
    """
    if len(content) < ROW_HEADER_BYTES:
        raise CorruptRowError("torn row", got=len(content), key=key)
    binding, _, _, head, *_ = _HEADER.unpack_from(content)
    message = memoryview(content)[ROW_HEADER_BYTES + head :]
    return unpack_row(message, partition, key, columns, binding=binding)
