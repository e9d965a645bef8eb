"""One connection to a TransferQueue: batches of named buffers, and a deadline on every call.

TransferQueue's own calls hang when its controller is gone and wait ten minutes for a lost storage
unit. Its messages are unpickled without authentication: use it on trusted networks only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Final

import torch
from tensordict import TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.storage import StorageKeyNotFoundError

from tokenplane.schemas.errors import StoreError, StoreTimeoutError, StoreUnavailableError

FIELD: Final = "row"
TAG: Final = "origin"
PROBE_S: Final = 2.0

# It warns at every put on a machine with fewer than eight cores.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)


def within[T](deadline_s: float, what: str, work: Callable[[], T]) -> T:
    """``work()`` in a thread of its own, which is left behind when the deadline passes.

    Raises:
        StoreTimeoutError: the deadline passed.
        StoreUnavailableError: a foreign error.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:  # noqa: BLE001 - carried over to the caller
            errors.append(exc)

    thread = threading.Thread(target=run, name=f"tq-{what}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        raise StoreTimeoutError(f"TransferQueue: {what}", expected=f"an answer in {deadline_s} s")
    if errors:
        raise to_store_error(errors[0], what) from errors[0]
    return results[0]


def to_store_error(error: BaseException, what: str) -> StoreError:
    """Our error for one of Ray or TransferQueue, which have no common base."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, TimeoutError | CancelledError):
        return StoreTimeoutError(f"TransferQueue: {what}", got=f"{type(error).__name__}: {error}")
    return StoreUnavailableError(f"TransferQueue: {what}", got=f"{type(error).__name__}: {error}")


class QueueLink:
    """A client of one controller. Thread-safe.

    Args:
        config: the queue's configuration, as its controller gives it.
        partition: the queue's partition that holds everything of ours.
        deadline_s: for every call.
    """

    def __init__(self, config: Any, partition: str, *, deadline_s: float) -> None:
        self.incarnation: str = str(config.controller.zmq_info.id)
        """Changes when the controller was started anew: then it knows no row."""
        self._partition = partition
        self._deadline_s = deadline_s
        self._endpoints = unit_endpoints(config)
        self._loose: list[asyncio.Task[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tq-link", daemon=True)
        self._thread.start()
        try:
            self._client = within(deadline_s, "connect", lambda: _client(config))
        except BaseException:
            self._end_loop()
            raise

    def put(self, entries: Sequence[tuple[str, bytearray, str]]) -> None:
        """Store (name, buffer, tag) entries; a name that is there is overwritten.

        Raises:
            StoreTimeoutError: see the class; also every other method.
            StoreUnavailableError: the queue refused or failed.
        """
        if not entries:
            return
        names = [name for name, _, _ in entries]
        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for _, buffer, _ in entries]
        tags = [{TAG: tag} for _, _, tag in entries]

        async def work() -> None:
            meta = await self._client.async_kv_retrieve_meta(
                keys=names, partition_id=self._partition, create=True
            )
            if meta.size != len(names):
                raise StoreUnavailableError(
                    "TransferQueue: put", expected=f"{len(names)} places", got=meta.size
                )
            meta.update_custom_meta(tags)
            column = (
                tensors[0].unsqueeze(0)
                if len(tensors) == 1
                else torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
            )
            data = TensorDict({FIELD: column}, batch_size=[len(names)])
            await self._client.storage_manager.put_data(data, meta)
            # The rows can be read now. Their tags only serve a replay, which puts an untagged row
            # again: nobody waits for them.
            self._loose.append(asyncio.create_task(self._client.async_set_custom_meta(meta)))
            self._loose = [task for task in self._loose if not task.done()]

        self._run("put", work())

    def get(self, names: Sequence[str]) -> list[bytes]:
        """Buffers of those names that are there, in no order; the caller identifies them."""
        if not names:
            return []
        return self._run("get", self._get(list(names)))

    async def _get(self, names: list[str]) -> list[bytes]:
        meta = await self._client.async_kv_retrieve_meta(
            keys=names, partition_id=self._partition, create=False
        )
        if meta.size == 0 or FIELD not in meta.field_names:
            return []
        meta = meta.select_fields([FIELD])
        if meta.is_ready:
            # A clear at the same moment may be faster.
            with contextlib.suppress(StorageKeyNotFoundError):
                data = await self._client.async_get_data(meta)
                return [row.contiguous().numpy().tobytes() for row in data[FIELD].unbind(0)]
        if len(names) == 1:
            return []  # cleared, or its writer died between writing and saying so
        return [buffer for name in names for buffer in await self._get([name])]

    def clear(self, names: Sequence[str]) -> None:
        """Remove names; those that are not there do not matter."""

        async def work() -> None:
            meta = await self._client.async_kv_retrieve_meta(
                keys=list(names), partition_id=self._partition, create=False
            )
            if meta.size:
                await self._client.async_clear_samples(meta)

        if names:
            self._run("clear", work())

    def names(self) -> dict[str, str]:
        """Every name with its tag; '' where a writer died before it had written."""
        listed = self._run("list", self._client.async_kv_list(self._partition))
        return {name: tags.get(TAG, "") for name, tags in listed.get(self._partition, {}).items()}

    def check(self) -> None:
        """Raises:
        StoreUnavailableError: a storage unit does not listen, or the controller does not answer.
        """
        check_endpoints(self._endpoints)
        self._run(
            "check",
            self._client.async_kv_retrieve_meta(
                keys=["check"], partition_id=self._partition, create=False
            ),
        )

    def _run[T](self, what: str, work: Coroutine[Any, Any, T]) -> T:
        waiting = asyncio.wait_for(work, self._deadline_s)
        try:
            future = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError as exc:
            waiting.close()
            work.close()
            raise StoreUnavailableError("TransferQueue: the link is closed") from exc
        try:
            return future.result(self._deadline_s + PROBE_S)
        except Exception as exc:
            future.cancel()
            raise to_store_error(exc, what) from exc

    def close(self) -> None:
        """Give up the connection. Idempotent; calls under way fail."""
        if self._thread.is_alive():
            self._end_loop()
            self._client.close()

    def _end_loop(self) -> None:
        async def drain() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(drain(), self._loop)
        self._thread.join(PROBE_S)
        if not self._thread.is_alive():
            self._loop.close()


def _client(config: Any) -> AsyncTransferQueueClient:
    client = AsyncTransferQueueClient(f"tokenplane-{uuid.uuid4().hex}", config.controller.zmq_info)
    backend = config.backend.storage_backend
    client.initialize_storage_manager(backend, config.backend[backend])
    return client


def unit_endpoints(config: Any) -> list[tuple[str, int]]:
    """Where the storage units listen; none for a backend without units."""
    backend = config.backend[config.backend.storage_backend]
    units = backend.get("zmq_info") if backend is not None else None
    return [(unit.ip, unit.ports["put_get_socket"]) for unit in (units or {}).values()]


def check_endpoints(endpoints: Iterable[tuple[str, int]]) -> None:
    """Raises:
    StoreUnavailableError: nobody listens at one of them.
    """
    for endpoint in endpoints:
        try:
            socket.create_connection(endpoint, timeout=PROBE_S).close()
        except OSError as exc:
            raise StoreUnavailableError(
                "TransferQueue: a storage unit is gone", got=f"{endpoint[0]}:{endpoint[1]}: {exc}"
            ) from exc
