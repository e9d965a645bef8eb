"""The tokenizer beside the rows: stored once per store, so that anyone can read tokens as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokenplane.schemas.artifact_row import (
    ARTIFACT_PARTITION,
    TOKENIZER_KIND,
    artifact_key,
    parse_artifact_row,
    to_artifact,
)
from tokenplane.schemas.errors import ConfigError
from tokenplane.staging.store import StagingStore

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTEXT = 8
"""Ids before a piece that are decoded with it: some decoders print the first id of a text
differently, and a character may be spread over several ids."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def store_tokenizer(store: StagingStore, tokenizer: Any) -> str:
    """Store a fast transformers tokenizer and give its fingerprint; again costs one comparison.

    Raises:
        StoreError: the store refuses the row.
    """
    row = to_artifact(TOKENIZER_KIND, tokenizer.backend_tokenizer.to_str().encode())
    store.put(ARTIFACT_PARTITION, row.key, row.to_batch())
    return row.fingerprint


def open_decoder(store: StagingStore, fingerprint: str) -> TokenDecoder:
    """The decoder of the tokenizer with this fingerprint.

    Raises:
        ConfigError: the ``tokenizers`` library is not installed.
        MissingRowError: the store does not hold that tokenizer.
        CorruptRowError: what it holds has another fingerprint.
    """
    key = artifact_key(TOKENIZER_KIND, fingerprint)
    [batch] = store.get(ARTIFACT_PARTITION, [key])
    row = parse_artifact_row(batch, key=key)
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            "text needs the tokenizers library", expected="the extra megatron", got="none"
        ) from error
    return TokenDecoder(Tokenizer.from_str(row.data.decode()))


class TokenDecoder:
    """Token ids as text, special tokens included, nothing cleaned up. For people to read: what a
    model is given never comes from here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of ``ids`` as it stands after ``before``."""
        context = list(before[-_CONTEXT:])
        head, whole = self._decode(context), self._decode([*context, *ids])
        return whole[len(head) :] if whole.startswith(head) else self._decode(list(ids))

    def survives(self, ids: Sequence[int]) -> bool:
        """True if the text of ``ids`` encodes to ``ids`` again, special tokens included."""
        again: list[int] = self._tokenizer.encode(
            self._decode(list(ids)), add_special_tokens=False
        ).ids
        return again == list(ids)

    def pieces(self, ids: Sequence[int], before: Sequence[int] = ()) -> Iterator[tuple[int, str]]:
        """(number of ids, their text), in order: one id each, more where they share a character."""
        start = 0
        for end in range(1, len(ids) + 1):
            near = ids[max(0, start - _CONTEXT) : start]
            text = self.text(ids[start:end], [*before[-_CONTEXT:], *near])
            if not text.endswith(_REPLACEMENT) or end == len(ids):
                yield end - start, text
                start = end

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
