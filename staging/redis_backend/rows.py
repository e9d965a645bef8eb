"""Row messages on a Redis server: names, and verified reading."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from tokenplane.schemas.errors import CorruptRowError
from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.redis_backend.scripts import ROW_HEADER_BYTES
from tokenplane.staging.row_packing import unpack_row
from tokenplane.staging.row_split import join_message, read_token_columns

KEYS_PER_READ: Final = 500
_HEADER: Final = struct.Struct("<32s16sd8x")


class RedisRows:
    """Reads rows by key. Each read is one command, so that it sees a row whole or not at all."""

    def __init__(self, connection: RedisConnection, total: bytes) -> None:
        self._connection = connection
        self._namespace = total[:-1]

    def names(self, kind: bytes, partition: str, keys: Sequence[str]) -> list[bytes]:
        """Server names of the rows' contents (``m``) or token parts (``k``)."""
        name = partition.encode()
        before = b"%s%s:%d:%s:" % (self._namespace, kind, len(name), name)
        return [before + key.encode() for key in keys]

    def read(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None
    ) -> dict[str, pa.RecordBatch]:
        """The rows that are there, by key.

        Raises:
            CorruptRowError: damaged, or another key's.
        """
        found = {}
        for at in range(0, len(keys), KEYS_PER_READ):
            page = keys[at : at + KEYS_PER_READ]
            values = self._connection.command(
                "MGET", *self.names(b"m", partition, page), *self.names(b"k", partition, page)
            )
            for key, content, token_part in zip(
                page, values[: len(page)], values[len(page) :], strict=True
            ):
                if content is not None:
                    found[key] = unpack_stored(content, token_part, partition, key, columns)
        return found

    def read_tokens(
        self, partition: str, keys: Sequence[str], columns: Sequence[str]
    ) -> dict[str, pa.RecordBatch]:
        """``columns`` of the rows that are there and have a token part, by key.

        Raises:
            CorruptRowError: damaged, or another key's.
        """
        found = {}
        for at in range(0, len(keys), KEYS_PER_READ):
            page = keys[at : at + KEYS_PER_READ]
            values = self._connection.command("MGET", *self.names(b"k", partition, page))
            for key, token_part in zip(page, values, strict=True):
                if token_part is not None:
                    found[key] = read_token_columns(token_part, partition, key, columns)
        return found


def stored_content(binding: bytes, nonce: bytes, created_at: float, message: bytes) -> bytes:
    """The header and what it stands before; see redis_scripts."""
    return _HEADER.pack(binding, nonce, created_at) + message


def unpack_stored(
    content: bytes,
    token_part: bytes | None,
    partition: str,
    key: str,
    columns: Sequence[str] | None,
) -> pa.RecordBatch:
    """The verified row of what is stored for it.

    Raises:
        CorruptRowError: damaged, or another key's.
    """
    if len(content) < ROW_HEADER_BYTES:
        raise CorruptRowError("torn row", got=len(content), key=key)
    binding = _HEADER.unpack_from(content)[0]
    message = content[ROW_HEADER_BYTES:]
    if token_part is not None:
        message = join_message(token_part, message, key)
    return unpack_row(message, partition, key, columns, binding=binding)
