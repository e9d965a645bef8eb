"""What bare TransferQueue does with the same tensors: the peer in ``tokenplane bench stores``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue
from numpy.typing import NDArray

from tokenplane.schemas.staged_row import StagedRow


class QueuePeer:
    """``kv_put`` and ``kv_batch_get`` of tensors, in the queue that the process is connected to."""

    name = "TransferQueue kv_put/kv_batch_get"

    def __init__(self) -> None:
        transfer_queue.init()
        self._partition = f"bench-peer-{uuid.uuid4().hex}"
        self._keys: list[str] = []

    def stage(self, row: StagedRow, message: bytes, media: bytes | None) -> None:
        """One row's token columns, and its media as one more field."""
        call = row.call
        arrays: dict[str, NDArray[Any]] = {"ids": call.token_ids_delta}
        arrays["mask"] = call.token_mask_delta
        arrays["log_probs"] = call.generation_log_probs_delta
        if media is not None:
            arrays["media"] = np.frombuffer(media, np.uint8)
        fields = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        transfer_queue.kv_put(row.staging_key, self._partition, fields)
        self._keys.append(row.staging_key)

    def fetch(self, keys: Sequence[str]) -> list[bytes]:
        """No bytes to decode: the ids come as tensors, and are concatenated here."""
        found = transfer_queue.kv_batch_get(list(keys), self._partition, ["ids"])
        torch.cat([row.reshape(-1) for row in found["ids"].unbind(0)])
        return []

    def close(self) -> None:
        """Remove what was written."""
        transfer_queue.kv_clear(self._keys, self._partition)
