"""What the splice remembers: skeletons by shape, and what was proven of each conversation."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from tokenplane.capture.splice.renderer import ChatTemplateRenderer
from tokenplane.capture.splice.skeleton import Skeleton
from tokenplane.schemas.errors import ConfigError

_OVERHEAD_BYTES = 400
"""Roughly what an entry costs beside its text: key, links and objects."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ProvenHistory:
    """The history outside assistant turns, as it was printed when it was spliced.

    A linked list from the last segment to the first: a longer conversation shares what a shorter
    one holds, so n turns cost n segments, not n squared.
    """

    segment: str
    """What stands between two assistant turns; for the first one, the opening of the prompt."""
    earlier: ProvenHistory | None

    def segments(self) -> list[str]:
        """All segments, the opening first."""
        found: list[str] = []
        at: ProvenHistory | None = self
        while at is not None:
            found.append(at.segment)
            at = at.earlier
        return found[::-1]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was made."""

    skeleton_hits: int
    skeleton_misses: int
    history_hits: int
    history_misses: int
    held_bytes: int


class SpliceCache:
    """Bounded, least recently used out first; thread-safe. For one renderer only.

    Losing an entry costs renders, never correctness.
    """

    def __init__(self, *, max_skeletons: int = 1024, max_bytes: int = 64 << 20) -> None:
        """``max_bytes`` bounds the memory of the proven histories, ``max_skeletons`` the rest."""
        self._max_skeletons = max_skeletons
        self._max_bytes = max_bytes
        # Reentrant: dropping an entry can free a segment, whose finalizer counts under the lock.
        self._lock = threading.RLock()
        self._renderer: ChatTemplateRenderer | None = None
        self._skeletons: OrderedDict[str, Skeleton] = OrderedDict()
        self._histories: OrderedDict[str, ProvenHistory] = OrderedDict()
        self._bytes = 0
        self._counts = {"skeleton": [0, 0], "history": [0, 0]}

    def bind(self, renderer: ChatTemplateRenderer) -> None:
        """Tie the cache to ``renderer`` on first use.

        Raises: ConfigError if it already serves another one.
        """
        with self._lock:
            if self._renderer is None:
                self._renderer = renderer
            elif self._renderer is not renderer:
                raise ConfigError("a splice cache serves one renderer; make one cache for each")

    def skeleton(self, shape: str) -> Skeleton | None:
        """The skeleton remembered for ``shape``."""
        with self._lock:
            return self._get("skeleton", self._skeletons, shape)

    def put_skeleton(self, shape: str, skeleton: Skeleton) -> None:
        """Remember ``skeleton``."""
        with self._lock:
            self._skeletons[shape] = skeleton
            self._skeletons.move_to_end(shape)
            while len(self._skeletons) > self._max_skeletons:
                self._skeletons.popitem(last=False)

    def history(self, key: str) -> ProvenHistory | None:
        """What was proven of the conversation and prompt that ``key`` stands for."""
        with self._lock:
            return self._get("history", self._histories, key)

    def put_history(self, key: str, history: ProvenHistory) -> None:
        """Remember ``history``. Its segments count until nothing remembered shares them."""
        cost = sys.getsizeof(history.segment) + _OVERHEAD_BYTES
        with self._lock:
            self._histories[key] = history
            self._histories.move_to_end(key)
            self._bytes += cost
            weakref.finalize(history, self._release, cost).atexit = False
            del history
            while self._bytes > self._max_bytes and self._histories:
                self._histories.popitem(last=False)

    def _release(self, cost: int) -> None:
        with self._lock:
            self._bytes -= cost

    def stats(self) -> CacheStats:
        """A snapshot of the counters."""
        with self._lock:
            (hits, misses), (known, unknown) = self._counts["skeleton"], self._counts["history"]
            return CacheStats(hits, misses, known, unknown, self._bytes)

    def _get[T](self, name: str, table: OrderedDict[str, T], key: str) -> T | None:
        found = table.get(key)
        self._counts[name][0 if found is not None else 1] += 1
        if found is not None:
            table.move_to_end(key)
        return found
