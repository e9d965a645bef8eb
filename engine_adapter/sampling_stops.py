"""Where an answer stops, and which of its ids may already be shown: stop ids and stop strings.

Stop strings are matched on the decoded text as it grows. Text is decoded from a short window of
ids that starts on a character boundary, so a character made of several tokens is seen once it is
whole and the cost of a token does not grow with the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Detokenize = Callable[[Sequence[int]], str]
"""Ids to text. Decoding a window must give the text that the window has within the whole."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW = 16
"""Ids after which a window that still ends in the middle of a character is taken as it is: the
longest UTF-8 sequence has 4 bytes, so such ids form no valid text."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The answer ends here: by an id, or by a string."""

    reason: int | str


class StopMatcher:
    """Follows one answer id by id. Not thread-safe; owned by the engine thread."""

    def __init__(
        self, stop_ids: frozenset[int], stop_strings: tuple[str, ...], detokenize: Detokenize | None
    ) -> None:
        """``detokenize`` is needed where ``stop_strings`` is not empty (checked at admission)."""
        self._stop_ids = stop_ids
        self._text = _StopText(stop_strings, detokenize) if stop_strings and detokenize else None
        self._held: list[int] = []
        self._released: list[int] = []

    def push(self, token: int) -> Stop | None:
        """Takes the next sampled id; says if the answer stops with it."""
        self._held.append(token)
        if token in self._stop_ids:
            return Stop(token)
        if self._text is None:
            self._release(len(self._held))
            return None
        match = self._text.push(token)
        self._release(self._text.take_safe())
        return None if match is None else Stop(match)

    def finish(self, stop: Stop | None) -> None:
        """The answer has ended. Ids still held are released, unless they hold a stop string."""
        if stop is None or isinstance(stop.reason, int):
            self._release(len(self._held))

    def take_released(self) -> list[int]:
        """Ids released since the last call, in order."""
        released, self._released = self._released, []
        return released

    def _release(self, count: int) -> None:
        self._released += self._held[:count]
        del self._held[:count]


class _StopText:
    """The tail of the decoded answer, and the text position at which each held id ends."""

    def __init__(self, stops: tuple[str, ...], detokenize: Detokenize) -> None:
        self._stops = stops
        self._longest = max(len(stop) for stop in stops)
        self._detokenize = detokenize
        self._window: list[int] = []
        self._window_read = 0
        """How many ids of the window are decoded in ``_tail`` already."""
        self._length = 0
        """Characters known of the whole answer."""
        self._tail = ""
        """The last of them, long enough to hold a partial match."""
        self._ends: list[int | None] = []
        """Per held id, the answer's length after it; None while its character is incomplete."""
        self._match_start: int | None = None

    def push(self, token: int) -> str | None:
        """The stop string that ``token`` completes; the one that starts first, if several."""
        self._window.append(token)
        self._ends.append(None)
        fresh = self._decode_fresh()
        if fresh is None:
            return None
        self._tail = self._tail[-self._longest :] + fresh
        self._length += len(fresh)
        self._ends = [self._length if end is None else end for end in self._ends]
        found = [(at, stop) for stop in self._stops if (at := self._tail.find(stop)) >= 0]
        if not found:
            return None
        start, match = min(found, key=lambda item: item[0])
        self._match_start = self._length - len(self._tail) + start
        return match

    def take_safe(self) -> int:
        """How many of the held ids cannot belong to a stop string; they count as taken."""
        safe = self._match_start
        if safe is None:
            safe = self._length - self._partial_match()
        count = 0
        while count < len(self._ends):
            end = self._ends[count]
            if end is None or end > safe:
                break
            count += 1
        del self._ends[:count]
        return count

    def _decode_fresh(self) -> str | None:
        """The text that the window gained, or None while it ends within a character."""
        whole = self._detokenize(self._window)
        if whole.endswith(_REPLACEMENT) and len(self._window) - self._window_read < _MAX_WINDOW:
            return None
        known = self._detokenize(self._window[: self._window_read])
        # One step of context stays in the window: some tokenizers print an id differently at the
        # start of a text.
        self._window = self._window[self._window_read :]
        self._window_read = len(self._window)
        return whole[len(known) :]

    def _partial_match(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._tail)), 0, -1):
            end = self._tail[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
