"""Publishes a journal's rows into a TransferQueue as they come, and again after a loss."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tokenplane.schemas.errors import StoreClosedError, StoreError, TokenplaneError
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import Blob
from tokenplane.staging.tq_backend.payload import Entry, blob_entry, row_name
from tokenplane.staging.tq_backend.replay import replay

if TYPE_CHECKING:
    from tokenplane.staging.tq_backend.link import QueueLink, Reservation

logger = logging.getLogger("tokenplane.staging")

CHECK_S: Final = 5.0
FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Publication:
    """A row on its way into the queue."""

    names: list[str]
    """Of its blobs, then its own."""
    early: list[Entry]
    """Its blobs."""
    link: QueueLink | None
    reservation: Reservation | None
    """None: while the queue does not answer."""


class Publisher:
    """Publishes while the queue answers; otherwise rows wait in the journal.

    After any failure a thread finds the queue again and replays: what the journal has and the queue
    lacks is published, and what the queue has of this journal's removed rows is cleared.

    Args:
        origin: 16 bytes that name the journal; all processes that share it share them.
        connect: gives a link to a working queue, or raises a ``StoreError``.
    """

    def __init__(
        self, journal: StagingStore, origin: bytes, connect: Callable[[], QueueLink]
    ) -> None:
        self._journal = journal
        self._origin = origin
        self._connect = connect
        self._state = threading.Condition()
        self._link: QueueLink | None = None
        self._error: StoreError | None = None
        # Replays asked for and done so far; one that starts now answers all requests until now.
        self._asked = 1
        self._done = 0
        self._urgent = False
        self._closed = False
        self._under_way: Counter[str] = Counter()
        self._litter: set[str] = set()
        self._abandoned: list[Publication] = []
        self._thread = threading.Thread(target=self._run, name="tq-publisher", daemon=True)
        self._thread.start()

    @property
    def link(self) -> QueueLink | None:
        """The queue, while it answers."""
        return self._link

    @property
    def error(self) -> StoreError | None:
        """Why the queue is not in use; None while it is."""
        return self._error

    def begin(self, partition: str, key: str, blobs: Sequence[Blob]) -> Publication:
        """Get places in the queue for a row and its blobs, and send the blobs there.

        Returns at once, so that the journal writes meanwhile. Nothing can be read before
        ``finish``. Every publication must be finished or abandoned.
        """
        entries = {b.sha256: blob_entry(self._origin, b.sha256, b.data) for b in blobs}
        early = list(entries.values())
        names = [*(entry.name for entry in early), row_name(partition, key)]
        link, reservation = self._link, None
        with self._state:
            self._under_way.update(names)
        if link is not None:
            try:
                reservation = link.reserve(names, early)
            except StoreError as exc:
                self.give_up(link, exc)
        return Publication(names, early, link, reservation)

    def finish(self, publication: Publication, entry: Entry) -> bool:
        """Let the row be read, now that the journal has it; False if it waits for the queue.

        Row and blobs are one batch, which readers see at once.
        """
        link = self._link
        try:
            if link is not None:
                reservation = publication.reservation if publication.link is link else None
                try:
                    link.put([*publication.early, entry], reservation)
                    return True
                except StoreError as exc:
                    self.give_up(link, exc)
            return False
        finally:
            self._end(publication)

    def abandon(self, publication: Publication) -> None:
        """The journal refused the row: a replay gives the places back once the queue gave them."""
        if publication.reservation is None:
            self._end(publication)
            return
        with self._state:
            self._abandoned.append(publication)
        publication.reservation.done.add_done_callback(lambda _: self._throw_away(publication))

    def _throw_away(self, publication: Publication) -> None:
        with self._state:
            self._abandoned = [left for left in self._abandoned if left is not publication]
            self._litter.update(publication.names)
            self._asked += 1
        self._end(publication)
        with self._state:
            self._state.notify_all()

    def _end(self, publication: Publication) -> None:
        with self._state:
            self._under_way.subtract(publication.names)
            self._under_way += Counter()  # forgets what is not under way any more

    def _take_litter(self) -> set[str]:
        """Names that nobody publishes any more and perhaps nobody wants."""
        with self._state:
            taken = {name for name in self._litter if name not in self._under_way}
            self._litter -= taken
            return taken

    def clear(self, partition: str, keys: Sequence[str]) -> None:
        """Remove rows from the queue; what cannot be removed now goes with the next replay."""
        link = self._link
        if link is not None:
            try:
                link.clear([row_name(partition, key) for key in keys])
            except StoreError as exc:
                self.give_up(link, exc)

    def request_tidying(self) -> None:
        """Replay at the next check: something may have to be cleared."""
        with self._state:
            self._asked += 1

    def wait(self, timeout_s: float) -> bool:
        """True when the queue holds what the journal holds; False when the time is over."""
        with self._state:
            self._state.wait_for(self._hurry, timeout_s)
            return self._is_level()

    def _hurry(self) -> bool:
        """True when there is nothing to wait for; else a replay that is due begins at once."""
        if self._done < self._asked and not self._urgent:
            self._urgent = True
            self._state.notify_all()
        return self._is_level() or self._closed

    def _is_level(self) -> bool:
        link = self._link
        given_back = all(publication.link is not link for publication in self._abandoned)
        return self._done >= self._asked and given_back and link is not None

    def close(self, *, join_s: float = 2.0) -> None:
        """End the thread and the link. Idempotent."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(join_s)
        self._drop_link()

    def give_up(self, link: QueueLink, error: StoreError) -> None:
        """The link failed: use it no more, find the queue again."""
        with self._state:
            if self._link is not link or self._closed:
                return
            self._link = None
            self._error = error
            self._asked += 1
            self._urgent = True
            self._state.notify_all()
        logger.warning("rows wait in the journal, the queue does not answer: %s", error)
        link.close()

    def _drop_link(self) -> None:
        with self._state:
            link, self._link = self._link, None
            self._asked += 1
        if link is not None:
            link.close()

    def _run(self) -> None:
        wait = FIRST_WAIT_S
        while not self._closed:
            try:
                self._step()
                wait = FIRST_WAIT_S
            except StoreClosedError:
                return
            except TokenplaneError as exc:
                if self._closed:
                    return
                self._error = exc if isinstance(exc, StoreError) else StoreError(str(exc))
                logger.warning("TransferQueue: %s", exc)
                self._drop_link()
                with self._state:
                    self._state.wait_for(lambda: self._closed, wait)
                wait = min(2 * wait, LONGEST_WAIT_S)

    def _step(self) -> None:
        link = self._link or self._open_link()
        if link is None:
            return
        with self._state:
            target, self._urgent = self._asked, False
        if self._done < target:
            started = time.monotonic()
            litter = self._take_litter()
            published, cleared = replay(self._journal, self._origin, link, litter)
            with self._state:
                self._done = target
                self._state.notify_all()
            if published or cleared:
                spent = time.monotonic() - started
                logger.info("queue: %d published, %d cleared, %.1f s", published, cleared, spent)
        with self._state:
            if self._state.wait_for(lambda: self._urgent or self._closed, CHECK_S):
                return
        link.check()

    def _open_link(self) -> QueueLink | None:
        link = self._connect()
        with self._state:
            if not self._closed:
                # From here on puts publish by themselves, so the replay that follows misses none.
                self._link = link
                self._error = None
                self._asked += 1
                return link
        link.close()
        return None
