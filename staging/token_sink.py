"""``TokenSink``: staged calls become durable rows."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Buffer, Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenplane.schemas.errors import InvalidRecordError, TokenplaneError
from tokenplane.schemas.staged_call import StagedCall, to_staged_call
from tokenplane.schemas.staged_row import (
    STAGED_PARTITION,
    AttachmentRef,
    CallEvidence,
    StagedRow,
)
from tokenplane.schemas.wire import StageResult
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import Blob, to_blob

logger = logging.getLogger("tokenplane.staging")


class TokenSink:
    """Stages records into one partition. Thread-safe, as the store is.

    Also usable as NeMo-Gym's ``StagingSink``.

    Args:
        on_staged: called with each row once it is durable, on the thread that staged it; must not
            raise.
    """

    def __init__(
        self,
        store: StagingStore,
        partition: str = STAGED_PARTITION,
        *,
        on_staged: Callable[[StagedRow], None] | None = None,
    ) -> None:
        self.store = store
        self.partition = partition
        self._on_staged = on_staged

    def stage(self, record: object, *, attachments: Mapping[str, Any] | None = None) -> StageResult:
        """Make one record durable; ``ok`` means that every process with this store can read it.

        A failure is a result, not an exception: its ``error`` is ``code: message``.

        Args:
            record: a ``StagedRow``, a ``StagedCall``, or an object with the contract's field names
                (CONTRACT section 5), whose digest is verified. Without a ``StagedRow`` the key is
                minted as ``rollout/call/attempt`` (DESIGN rule 4), and the one policy epoch known
                is the weight version.
            attachments: buffers by name (arrays of numbers, or bytes), stored in the same write.

        Raises:
            TypeError: an attachment is neither an array of numbers nor a buffer.
        """
        try:
            row = to_staged_row(record)
            refs, blobs = to_attachments(attachments or {})
            given = {ref.sha256 for ref in refs}
            unknown = [ref.name for ref in row.attachments if ref.sha256 not in given]
            if unknown:
                raise InvalidRecordError(
                    "the row names attachments that were not given", got=unknown
                )
            if refs:
                row = dataclasses.replace(row, attachments=refs)
            self.store.put(self.partition, row.staging_key, row.to_batch(), blobs=blobs)
        except TokenplaneError as exc:
            logger.warning("staging failed: %s: %s", exc.code, exc)
            return StageResult(ok=False, error=f"{exc.code}: {exc}")
        if self._on_staged is not None:
            self._on_staged(row)
        return StageResult(ok=True, staging_key=row.staging_key)


def to_staged_row(record: object) -> StagedRow:
    """The row that stands for ``record``; a foreign record's digest is recomputed.

    Raises:
        InvalidRecordError: the record breaks the contract or its digest does not match.
    """
    if isinstance(record, StagedRow):
        return record
    call = to_staged_call(record)
    if not isinstance(record, StagedCall):
        call.check_digest()
    return StagedRow(
        staging_key=f"{call.rollout_id}/{call.model_call_id}/{uuid.uuid4().hex[:16]}",
        call=call,
        evidence=CallEvidence(policy_epochs=((0, call.weight_version),)),
        created_at=time.time(),
    )


def to_attachments(
    attachments: Mapping[str, Any],
) -> tuple[tuple[AttachmentRef, ...], tuple[Blob, ...]]:
    """References for the row and blobs for the store, in the mapping's order.

    Raises:
        TypeError: see ``TokenSink.stage``.
    """
    refs, blobs = [], []
    for name, value in attachments.items():
        array = _to_array(name, value)
        blob = to_blob(array.reshape(-1).view(np.uint8))
        refs.append(
            AttachmentRef(
                name=name,
                dtype=array.dtype.name,
                shape=array.shape,
                sha256=blob.sha256,
                nbytes=blob.nbytes,
            )
        )
        blobs.append(blob)
    return tuple(refs), tuple(blobs)


def _to_array(name: str, value: object) -> NDArray[Any]:
    """C-contiguous and little-endian; a buffer that is no array counts as bytes."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"an attachment needs a name, got {name!r}")
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise TypeError(f"attachment {name}: expected numbers, got {value.dtype}")
        little = value.astype(value.dtype.newbyteorder("<"), order="C", copy=False)
        return np.ascontiguousarray(little).reshape(value.shape)
    if isinstance(value, Buffer):
        return np.frombuffer(value, np.uint8)
    raise TypeError(f"attachment {name}: expected an array or a buffer, got {type(value).__name__}")
