"""A call cut into what was given and what was sampled, and by which weights, as ids and as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from tokenplane.schemas.errors import ConfigError, StoreError
from tokenplane.schemas.tokens import Float32Array, Int32Array

if TYPE_CHECKING:
    from tokenplane.engine_adapter.tokenizer_artifact import TokenDecoder
    from tokenplane.staging.store import StagingStore
    from tokenplane.tools.rollout_view import CallView


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive tokens of one call that came about in one way."""

    kind: Literal["given", "sampled"]
    token_ids: Int32Array = field(repr=False)
    log_probs: Float32Array = field(repr=False)
    """float32[n], natural log; 0 where given."""
    weight_version: int | None
    """Of the weights that sampled them; None where given."""
    before: Int32Array = field(repr=False)
    """The ids of the whole sequence that stand before them."""


def segments_of(call: CallView) -> list[Segment]:
    """The call's own tokens, in order: given ones, then sampled ones, cut where weights changed."""
    staged = call.row.call
    start, ids = staged.prev_len, call.token_ids
    first_sampled = staged.cum_len - staged.generation_len
    found = []
    if first_sampled > start:
        given = ids[start:first_sampled]
        zeros = np.zeros(len(given), np.float32)
        found.append(Segment("given", given, zeros, None, ids[:start]))
    versions = call.versions()
    log_probs = staged.generation_log_probs_delta[-staged.generation_len :]
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    for left, right in itertools.pairwise(cuts):
        a, b = first_sampled + left, first_sampled + right
        found.append(
            Segment("sampled", ids[a:b], log_probs[left:right], int(versions[left]), ids[:a])
        )
    return found


class SegmentTexts:
    """Segments as text, by the tokenizers that the store keeps.

    ``notes`` says once per tokenizer why its tokens can only be shown as ids.
    """

    def __init__(self, store: StagingStore) -> None:
        self._store = store
        self._decoders: dict[str | None, TokenDecoder | None] = {}
        self.notes: list[str] = []

    def text(self, call: CallView, segment: Segment) -> str | None:
        """The segment's text; None where its tokenizer is not at hand."""
        decoder = self.decoder(call.row.evidence.tokenizer_fingerprint)
        if decoder is None:
            return None
        return decoder.text(segment.token_ids.tolist(), segment.before[-16:].tolist())

    def pieces(self, call: CallView, segment: Segment) -> Iterator[tuple[str, float]] | None:
        """(text, log-probability) of each token; tokens that share a character come together,
        with the sum of theirs. None as for ``text``.
        """
        decoder = self.decoder(call.row.evidence.tokenizer_fingerprint)
        if decoder is None:
            return None
        return self._pieces(decoder, segment)

    @staticmethod
    def _pieces(decoder: TokenDecoder, segment: Segment) -> Iterator[tuple[str, float]]:
        at = 0
        before = segment.before[-16:].tolist()
        for count, text in decoder.pieces(segment.token_ids.tolist(), before):
            yield text, float(segment.log_probs[at : at + count].sum(dtype=np.float64))
            at += count

    def decoder(self, fingerprint: str | None) -> TokenDecoder | None:
        """The decoder of one tokenizer; None where it is not at hand."""
        if fingerprint not in self._decoders:
            self._decoders[fingerprint] = self._opened(fingerprint)
        return self._decoders[fingerprint]

    def _opened(self, fingerprint: str | None) -> TokenDecoder | None:
        from tokenplane.engine_adapter.tokenizer_artifact import open_decoder

        if fingerprint is None:
            self.notes.append("the rows do not name their tokenizer: token ids instead of text")
            return None
        try:
            return open_decoder(self._store, fingerprint)
        except (ConfigError, StoreError) as error:
            self.notes.append(f"no text, token ids instead: {error.code}: {error}")
            return None
