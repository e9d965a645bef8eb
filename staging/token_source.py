"""``TokenSource``: verified reading of staged rows by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokenplane.schemas.digests import extras_digest
from tokenplane.schemas.errors import CorruptRowError, InvalidRecordError
from tokenplane.schemas.staged_call import StagedCall
from tokenplane.schemas.staged_row import (
    STAGED_PARTITION,
    TOKEN_COLUMNS,
    StagedRow,
    parse_staged_row,
)
from tokenplane.schemas.tokens import Int32Array, join
from tokenplane.staging.store import StagingStore


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The token columns of one staged row: what resolving a prefix needs."""

    staging_key: str
    rollout_id: str
    prev_len: int
    delta_len: int
    cum_len: int
    token_ids_delta: Int32Array = field(repr=False)
    """int32[delta_len], read-only, a view of the row's buffer."""
    generation_len: int
    """Number of sampled tokens, which stand at the end of the delta."""
    chain_hash: str
    """Lowercase hex, as stored; the reader recomputes it (DESIGN rule 7)."""


class TokenSource:
    """Reads staged rows of one partition. Thread-safe, as the store is.

    Every method takes unique keys, gives exactly one result per key in order, and raises
    ``InvalidKeyError`` (repeated key), ``MissingRowError``, ``CorruptRowError`` or another
    ``StoreError``. Also usable as NeMo-Gym's ``StagingSource``.
    """

    def __init__(self, store: StagingStore, partition: str = STAGED_PARTITION) -> None:
        self.store = store
        self.partition = partition

    def fetch(self, keys: Sequence[str]) -> list[StagedCall]:
        """Base snapshots (without extras), whose staging digest was recomputed."""
        return [dataclasses.replace(row.call, extras=None) for row in self._rows(keys)]

    def fetch_rows(self, keys: Sequence[str]) -> list[StagedRow]:
        """Whole rows, whose staging digest and extras digest were recomputed."""
        rows = self._rows(keys)
        for row in rows:
            if extras_digest(row.call.extras) != row.call.extras_digest:
                raise CorruptRowError("the extras do not match their digest", key=row.staging_key)
        return rows

    def _rows(self, keys: Sequence[str]) -> list[StagedRow]:
        batches = self.store.get(self.partition, keys)
        rows = [parse_staged_row(batch, key=key) for key, batch in zip(keys, batches, strict=True)]
        for row in rows:
            try:
                row.call.check_digest()
            except InvalidRecordError as exc:
                raise CorruptRowError(str(exc), key=row.staging_key) from exc
        return rows

    def fetch_tokens(self, keys: Sequence[str]) -> list[TokenDelta]:
        """Token columns only; identity and lengths are checked, digests are left to the caller."""
        batches = self.store.get(self.partition, keys, TOKEN_COLUMNS)
        return to_token_deltas(batches, keys)

    def fetch_prefix(self, keys: Sequence[str]) -> Int32Array:
        """int32[sum of delta_len]: the concatenated deltas, read-only.

        Whether the keys are one chain is not checked (``PrefixResolver`` does).
        """
        return join([row.token_ids_delta for row in self.fetch_tokens(keys)], np.int32)

    def fetch_attachments(self, row: StagedRow) -> dict[str, NDArray[Any]]:
        """The row's big buffers by name, verified against their hash; read-only views.

        Raises:
            MissingRowError: a buffer is not in the store.
            CorruptRowError: a buffer has another hash or length than the row says.
        """
        arrays: dict[str, NDArray[Any]] = {}
        for ref in row.attachments:
            buffer = self.store.get_blob(ref.sha256)
            dtype = np.dtype(ref.dtype)
            length = dtype.itemsize * int(np.prod(ref.shape, dtype=np.int64))
            if buffer.size != ref.nbytes or length != ref.nbytes:
                raise CorruptRowError(
                    f"attachment {ref.name}",
                    expected=ref.nbytes,
                    got=buffer.size,
                    key=row.staging_key,
                )
            arrays[ref.name] = np.frombuffer(buffer, dtype).reshape(ref.shape)
        return arrays


def to_token_deltas(batches: Sequence[pa.RecordBatch], keys: Sequence[str]) -> list[TokenDelta]:
    """The deltas in rows that have ``TOKEN_COLUMNS``, one row a batch.

    Raises:
        CorruptRowError: another key's row, or lengths that contradict each other.
    """
    if not batches:
        return []
    # All rows of a column at once: taking it apart row by row costs many times as much.
    table = batches[0]
    if len(batches) > 1:
        (table,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    texts = [table.column(name).to_pylist() for name in _TEXTS]
    numbers = [table.column(name).to_numpy(zero_copy_only=False).tolist() for name in _NUMBERS]
    ids = _split(table.column("token_ids_delta"))
    masks = _split(table.column("token_mask_delta"))
    deltas = []
    for key, own, rollout_id, chain_hash, prev_len, delta_len, cum_len, row, mask in zip(
        keys, *texts, *numbers, ids, masks, strict=True
    ):
        if own != key:
            raise CorruptRowError("the row is another key's", got=own, key=key)
        lengths = (len(row), len(mask), cum_len - prev_len)
        if lengths != (delta_len, delta_len, delta_len):
            raise CorruptRowError(
                "the row's lengths differ", expected=delta_len, got=lengths, key=key
            )
        sampled = int(np.count_nonzero(mask))
        deltas.append(
            TokenDelta(
                own, rollout_id, prev_len, delta_len, cum_len, row, sampled, chain_hash.hex()
            )
        )
    return deltas


_TEXTS = ("staging_key", "rollout_id", "chain_hash")
_NUMBERS = ("prev_len", "delta_len", "cum_len")


def _split(column: pa.ListArray) -> list[NDArray[Any]]:
    """Each row's items, read-only views."""
    ends = column.offsets.to_pylist()
    values = column.values.to_numpy(zero_copy_only=True)
    return [values[start:end] for start, end in pairwise(ends)]
