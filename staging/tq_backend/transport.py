"""How heads and bodies travel between a client and the queue's storage."""

from __future__ import annotations

import asyncio
from collections.abc import Buffer, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transfer_queue.utils.zmq_utils import ZMQRequestType

from tokenplane.schemas.errors import StoreUnavailableError
from tokenplane.staging.tq_backend.payload import Entry

HEAD: Final = "head"
BODY: Final = "body"


class Transport(Protocol):
    """Stores under index numbers that the controller gave out. All methods run on one loop."""

    async def store(self, indexes: Sequence[int], entries: Sequence[Entry]) -> None:
        """Bring the entries into storage if the storage can hold what is not announced."""
        ...

    async def announce(self, meta: Any, entries: Sequence[Entry]) -> None:
        """Make the stored entries of ``meta`` readable."""
        ...

    async def fetch(self, meta: Any, *, bodies: bool) -> list[tuple[bytes, bytes]]:
        """(head, body) of each entry; no body (``b""``) unless ``bodies``."""
        ...


async def ask(client: AsyncTransferQueueClient, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The controller's answer to one request."""
    async with client.controller_rpc_pool.alease(client._controller) as socket:
        reply = await client._request_controller(
            socket=socket,
            request_type=ZMQRequestType[kind],
            response_type=ZMQRequestType[_ANSWERS[kind]],
            body=body,
        )
    answer: dict[str, Any] = reply.body
    return answer


_ANSWERS: Final = {
    "NOTIFY_DATA_UPDATE": "NOTIFY_DATA_UPDATE_ACK",
    "SET_CUSTOM_META": "SET_CUSTOM_META_RESPONSE",
}


class UnitTransport:
    """To TransferQueue's own storage units, past its tensors.

    Its put and get would copy every buffer into a nested tensor, tell the controller each buffer's
    shape, and make storing and announcing one step. The units themselves store what they are sent:
    here NumPy arrays that are views of our buffers.
    """

    def __init__(self, client: AsyncTransferQueueClient) -> None:
        self._client = client
        self._manager: AsyncSimpleStorageManager = client.storage_manager

    async def store(self, indexes: Sequence[int], entries: Sequence[Entry]) -> None:
        """See ``Transport.store``."""
        work = []
        for unit, group in self._manager._group_by_hash(list(indexes)).items():
            chosen = [entries[at] for at in group.batch_positions]
            columns = {
                HEAD: [_array(entry.head) for entry in chosen],
                BODY: [_array(entry.body) for entry in chosen],
            }
            work.append(
                self._manager._put_to_single_storage_unit(
                    group.global_indexes, columns, target_storage_unit=unit
                )
            )
        await _all(work)

    async def announce(self, meta: Any, entries: Sequence[Entry]) -> None:
        """See ``Transport.announce``."""
        field = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
        answer = await ask(
            self._client,
            "NOTIFY_DATA_UPDATE",
            {
                "partition_id": meta.partition_ids[0],
                "global_indexes": meta.global_indexes,
                "field_schema": {HEAD: field, BODY: field},
                "custom_backend_meta": None,
            },
        )
        if not answer.get("success"):
            raise StoreUnavailableError("TransferQueue: its controller refused the rows")

    async def fetch(self, meta: Any, *, bodies: bool) -> list[tuple[bytes, bytes]]:
        """See ``Transport.fetch``."""
        fields = [HEAD, BODY] if bodies else [HEAD]
        replies = await _all(
            [
                self._manager._get_from_single_storage_unit(
                    group.global_indexes, fields, target_storage_unit=unit
                )
                for unit, group in self._manager._group_by_hash(meta.global_indexes).items()
            ]
        )
        found: list[tuple[bytes, bytes]] = []
        for _, columns in replies:
            heads = [bytes(value) for value in columns[HEAD]]
            rest = [bytes(value) for value in columns[BODY]] if bodies else [b""] * len(heads)
            found += zip(heads, rest, strict=True)
        return found


class ManagerTransport:
    """To any other storage backend, through its storage manager and as tensors."""

    def __init__(self, client: AsyncTransferQueueClient) -> None:
        self._client = client

    async def store(self, indexes: Sequence[int], entries: Sequence[Entry]) -> None:
        """Nothing: these managers announce what they store."""

    async def announce(self, meta: Any, entries: Sequence[Entry]) -> None:
        """Store and announce."""
        columns = {
            HEAD: _column([entry.head for entry in entries]),
            BODY: _column([entry.body for entry in entries]),
        }
        data = TensorDict(columns, batch_size=[len(entries)])
        await self._client.storage_manager.put_data(data, meta)

    async def fetch(self, meta: Any, *, bodies: bool) -> list[tuple[bytes, bytes]]:
        """See ``Transport.fetch``."""
        fields = [HEAD, BODY] if bodies else [HEAD]
        data = await self._client.storage_manager.get_data(meta.select_fields(fields))
        columns = [[_bytes(row) for row in data[field].unbind(0)] for field in fields]
        rest = columns[1] if bodies else [b""] * len(columns[0])
        return list(zip(columns[0], rest, strict=True))


def transport_of(client: AsyncTransferQueueClient) -> Transport:
    """The transport for the client's storage backend."""
    if type(client.storage_manager) is AsyncSimpleStorageManager:
        return UnitTransport(client)
    return ManagerTransport(client)


async def _all(work: list[Any]) -> list[Any]:
    # One storage unit is the rule for one row, and needs no task of its own.
    return [await work[0]] if len(work) == 1 else await asyncio.gather(*work)


def _array(content: Buffer) -> np.ndarray[Any, Any]:
    return np.frombuffer(content, np.uint8)


def _column(contents: Sequence[Buffer]) -> torch.Tensor:
    tensors = [
        torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)
        for content in contents
    ]
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def _bytes(row: torch.Tensor) -> bytes:
    content: bytes = row.contiguous().numpy().tobytes()
    return content
