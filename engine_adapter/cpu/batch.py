"""One step of continuous batching: whose tokens go through the model, and where their K/V live.

A step is one forward over the concatenated tokens of several requests: one token from each that
decodes, a chunk from each that is still in prefill. ``StepPlan`` says which columns are whose;
``KVCache`` holds the keys and values of one request for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_GROWTH_TOKENS = 64
"""A cache grows to the next multiple of this, and by half of its size at least."""


class KVCache:
    """Keys and values of one request. Not thread-safe; owned by the engine thread.

    ``append`` writes behind ``length``; only ``commit`` moves it, so a step that fails half way
    leaves the cache as it was.
    """

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens``: the most positions that it will ever hold; it allocates as it grows."""
        self.length = 0
        """Positions whose keys and values are held in every layer."""
        self._buffers: list[torch.Tensor] = []
        """Per layer [2, groups, capacity, head_dim]."""
        self._max_tokens = max_tokens

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``key`` and ``value`` [t, groups, head_dim] of ``layer`` behind the committed ones.

        Returns all keys and values of the layer, views [groups, length + t, head_dim]. Layers come
        in ascending order when they are seen first.
        """
        start, end = self.length, self.length + key.shape[0]
        if layer == len(self._buffers):
            self._buffers.append(key.new_empty(2, key.shape[1], self._capacity(end), key.shape[2]))
        buffer = self._buffers[layer]
        if buffer.shape[2] < end:
            grown = buffer.new_empty(2, buffer.shape[1], self._capacity(end), buffer.shape[3])
            grown[:, :, :start] = buffer[:, :, :start]
            self._buffers[layer] = buffer = grown
        buffer[0, :, start:end] = key.transpose(0, 1)
        buffer[1, :, start:end] = value.transpose(0, 1)
        return buffer[0, :, :end], buffer[1, :, :end]

    def commit(self, count: int) -> None:
        """The ``count`` positions written behind ``length`` are now part of the cache."""
        self.length += count

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self.length = 0
        self._buffers = []

    def _capacity(self, tokens: int) -> int:
        wanted = tokens + tokens // 2
        return min(-(-wanted // _GROWTH_TOKENS) * _GROWTH_TOKENS, self._max_tokens)


@dataclass(frozen=True, slots=True)
class StepSlice:
    """The columns ``[start, end)`` of a step that belong to one request."""

    start: int
    end: int
    cache: KVCache

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward."""

    token_ids: torch.Tensor
    """int64[1, T]."""
    positions: torch.Tensor
    """int64[T]: the position of each token in its own sequence."""
    slices: tuple[StepSlice, ...]
    """In column order, without gaps."""
    logit_rows: torch.Tensor
    """int64[R]: the columns whose logits are wanted, ascending."""


def make_plan(chunks: Sequence[tuple[Sequence[int], KVCache, bool]]) -> StepPlan:
    """A plan from ``(token ids, cache, wants logits of the last token)`` per request."""
    ids: list[int] = []
    positions: list[int] = []
    slices: list[StepSlice] = []
    rows: list[int] = []
    for tokens, cache, wants_logits in chunks:
        start = len(ids)
        ids += tokens
        positions += range(cache.length, cache.length + len(tokens))
        slices.append(StepSlice(start, len(ids), cache))
        if wants_logits:
            rows.append(len(ids) - 1)
    return StepPlan(
        token_ids=torch.tensor([ids], dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slices=tuple(slices),
        logit_rows=torch.tensor(rows, dtype=torch.int64),
    )


def share_step(wanted: Sequence[int], max_tokens: int) -> list[int]:
    """How many tokens each request may contribute to a step of at most ``max_tokens``.

    ``wanted`` is what each has pending, in admission order. Requests with one pending token (they
    decode) come first, so a long prompt delays nobody's next token; what is left goes to the
    others in order. Some request always gets at least one token.
    """
    shares = [0] * len(wanted)
    left = max_tokens
    for decoding in (True, False):
        for index, pending in enumerate(wanted):
            if (pending == 1) == decoding and left > 0:
                shares[index] = min(pending, left)
                left -= shares[index]
    return shares
