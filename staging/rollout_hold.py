"""Keeps the staged rows of rollouts in place while they are read, for as long as that takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from tokenplane.schemas.errors import InvalidKeyError, StoreError
from tokenplane.staging.store import StagingStore

logger = logging.getLogger("tokenplane.staging")

HOLD_S: Final = 120.0
"""How long a reader that died keeps rows from being removed."""


class RolloutHold:
    """Holds on the rows of rollouts (keys ``rollout/…``) in one partition. A context manager.

    ``renew`` before each read: it extends the holds when they have run for a third of their time.
    A store that was opened read-only cannot be told, and its rows are read without.

    Args:
        lease_s: how long the holds last if nobody ends them.
        clock: seconds of this process, to know when to renew.

    Raises:
        StoreError: the rows cannot be held.
    """

    def __init__(
        self,
        store: StagingStore,
        partition: str,
        rollouts: Iterable[str],
        *,
        lease_s: float = HOLD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._since = clock()
        self._holds = []
        try:
            for rollout in dict.fromkeys(rollouts):
                with suppress(InvalidKeyError):  # no row can have such a key
                    self._holds.append(store.hold(partition, f"{rollout}/", lease_s=lease_s))
        except StoreError as exc:
            self.end()
            if exc.code != "read_only":
                raise

    def renew(self) -> None:
        """Make the holds last; one that has ended meanwhile is taken anew.

        Raises:
            StoreError: the rows cannot be held.
        """
        if self._clock() - self._since < self._lease_s / 3:
            return
        self._since = self._clock()
        for at, hold in enumerate(self._holds):
            if not self._store.extend_hold(hold, lease_s=self._lease_s):
                logger.warning("a hold on %s ended while its rows were read", hold.prefix)
                self._holds[at] = self._store.hold(
                    hold.partition, hold.prefix, lease_s=self._lease_s
                )

    def end(self) -> None:
        """The rows were read. Idempotent; a store that fails now ends the holds by itself."""
        while self._holds:
            hold = self._holds.pop()
            try:
                self._store.end_hold(hold)
            except StoreError as exc:
                logger.info("the hold on %s ends by itself: %s", hold.prefix, exc)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
