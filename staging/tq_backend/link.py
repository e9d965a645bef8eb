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
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Final

from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.storage import StorageKeyNotFoundError

from tokenplane.schemas.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from tokenplane.staging.tq_backend.payload import Entry
from tokenplane.staging.tq_backend.transport import HEAD, ask, transport_of

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


@dataclass(frozen=True, slots=True)
class Reservation:
    """Names that got places in the queue, or are about to."""

    names: list[str]
    early: list[Entry]
    """Entries of the first names, which are being sent already."""
    done: Future[Any]
    """The places."""


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
        self._loose: list[asyncio.Task[Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tq-link", daemon=True)
        self._thread.start()
        try:
            self._client = within(deadline_s, "connect", lambda: _client(config))
            self._transport = transport_of(self._client)
        except BaseException:
            self._end_loop()
            raise

    def reserve(self, names: Sequence[str], early: Sequence[Entry] = ()) -> Reservation:
        """Places for these names, and the ``early`` ones of their entries on the way into them.

        Returns at once. Nothing is readable before ``put``; without a ``put`` the names stay in the
        list, untagged.
        """
        done = self._start("reserve", self._reserve(list(names), early))
        return Reservation(list(names), list(early), done)

    async def _reserve(self, names: list[str], early: Sequence[Entry]) -> Any:
        meta = await self._client.async_kv_retrieve_meta(
            keys=names, partition_id=self._partition, create=True
        )
        if meta.size != len(names):
            raise StoreUnavailableError(
                "TransferQueue: put", expected=f"{len(names)} places", got=meta.size
            )
        await self._transport.store(meta.global_indexes[: len(early)], early)
        return meta

    def put(self, entries: Sequence[Entry], reservation: Reservation | None = None) -> None:
        """Make entries readable; a name that is there is overwritten.

        Args:
            reservation: of the same names, in this order; its early entries come first.

        Raises:
            StoreTimeoutError: see the class; also every other method.
            StoreUnavailableError: the queue refused or failed.
        """
        if entries:
            self._run("put", self._put(list(entries), reservation))

    async def _put(self, entries: list[Entry], reservation: Reservation | None) -> None:
        names = [entry.name for entry in entries]
        early = 0 if reservation is None else len(reservation.early)
        if reservation is None:
            meta = await self._reserve(names, ())
        else:
            meta = await asyncio.wrap_future(reservation.done)
        late = self._transport.store(meta.global_indexes[early:], entries[early:])
        if early:
            # What was sent early is there unless its place was cleared for another's sake.
            now, _ = await asyncio.gather(self._reserve(names, ()), late)
            if now.global_indexes != meta.global_indexes:
                meta = now
                await self._transport.store(meta.global_indexes, entries)
        else:
            await late
        await self._transport.announce(meta, entries)
        # The rows can be read now. Their tags only serve a replay, which puts an untagged row
        # again: nobody waits for them.
        tags = {
            index: {TAG: entry.origin.hex()}
            for index, entry in zip(meta.global_indexes, entries, strict=True)
        }
        body = {"partition_custom_meta": {self._partition: tags}}
        self._loose.append(asyncio.create_task(ask(self._client, "SET_CUSTOM_META", body)))
        self._loose = [task for task in self._loose if not task.done()]

    def get(self, names: Sequence[str], *, bodies: bool = True) -> list[tuple[bytes, bytes]]:
        """(head, body) of those names that are there, in no order; the caller identifies them.

        The bodies are empty unless ``bodies``.
        """
        if not names:
            return []
        return self._run("get", self._get(list(names), bodies))

    async def _get(self, names: list[str], bodies: bool) -> list[tuple[bytes, bytes]]:
        meta = await self._client.async_kv_retrieve_meta(
            keys=names, partition_id=self._partition, create=False
        )
        if meta.size == 0:
            return []
        if meta.is_ready and HEAD in meta.field_names:
            # A clear at the same moment may be faster.
            with contextlib.suppress(StorageKeyNotFoundError):
                return await self._transport.fetch(meta, bodies=bodies)
        if len(names) == 1:
            return []  # cleared, or its writer died between writing and saying so
        return [pair for name in names for pair in await self._get([name], bodies)]

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

    def _start[T](self, what: str, work: Coroutine[Any, Any, T]) -> Future[T]:
        waiting = asyncio.wait_for(work, self._deadline_s)
        try:
            return asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError as exc:
            waiting.close()
            work.close()
            raise StoreUnavailableError(f"TransferQueue: {what}, the link is closed") from exc

    def _run[T](self, what: str, work: Coroutine[Any, Any, T]) -> T:
        future = self._start(what, work)
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
