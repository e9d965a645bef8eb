"""Sampled ids to the text that a client sees: whole, and piece by piece while they come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Detokenize = Callable[[Sequence[int]], str]
"""Ids to text, special tokens included. Thread-safe."""


class AnswerText:
    """Decodes answers of one tokenizer. Thread-safe.

    Special tokens (turn ends and the like) are left out by id, before decoding, so that text which
    only looks like a special token stays; ``keep`` names those that a tool parser must see.
    """

    def __init__(
        self,
        detokenize: Detokenize,
        special_token_ids: Collection[int],
        token_text: Callable[[int], str],
    ) -> None:
        self._detokenize = detokenize
        self._special = frozenset(special_token_ids)
        self.token_text = token_text
        """The text of one id, special tokens as their string."""

    def decode(
        self, ids: Sequence[int], *, keep: Collection[str] = (), stop: str | None = None
    ) -> str:
        """The text of an answer's ids; it ends before ``stop``, the stop string that ended it."""
        text = self._detokenize(self.shown(ids, keep))
        at = text.find(stop) if stop else -1
        return text if at < 0 else text[:at]

    def shown(self, ids: Iterable[int], keep: Collection[str] = ()) -> list[int]:
        """The ids whose text is shown: all but special tokens, save those in ``keep``."""
        return [i for i in ids if i not in self._special or self.token_text(i) in keep]

    def stream(self) -> TextStream:
        """A decoder for one answer that comes in pieces."""
        return TextStream(self, self._detokenize)


class TextStream:
    """One answer's text while its ids come. What it gives is always a beginning of the whole text.

    It holds back what may still change: ids whose text ends within a character. Each id is decoded
    a bounded number of times, unless the answer is no text at all. Not thread-safe.
    """

    def __init__(self, text: AnswerText, detokenize: Detokenize) -> None:
        self._text = text
        self._detokenize = detokenize
        self._window: list[int] = []
        self._read = 0
        """How many ids of the window have been given out already."""
        self._known = ""
        """Their text."""
        self.given = ""
        """Everything given out so far."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that becomes certain with these ids; often empty."""
        self._window += self._text.shown(ids)
        whole = self._detokenize(self._window)
        if len(self._window) == self._read or whole.endswith(_REPLACEMENT):
            return ""
        fresh = whole[len(self._known) :]
        # The ids just read stay as context: some tokenizers print the first id of a text otherwise.
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._known = self._detokenize(self._window)
        self.given += fresh
        return fresh

    def rest(self, whole: str) -> str:
        """What is missing of the finished answer's text."""
        return whole[len(self.given) :] if whole.startswith(self.given) else ""
