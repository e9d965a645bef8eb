"""Megatron's prefix cache and weight versions: which epoch filled a block, and how to forget it.

Megatron keeps cached blocks across a refit (measured: 48 stale tokens reused, log-probabilities off
by 0.06) and its ``kv_cache_epoch`` does not show it. Here each block remembers the version it was
computed under, and the cache can be emptied round a refit.
"""

from __future__ import annotations

from typing import Any


class BlockEpochs:
    """The weight version under which each cached block was computed, by its hash."""

    def __init__(self, context: Any) -> None:
        self._version: int | None = None
        self._block_size = int(context.block_size_tokens)
        self._epochs: dict[int, int | None] = {}
        self._allocator = context.kv_block_allocator
        if context.enable_prefix_caching:
            self._stock = self._allocator.register_kv_block_hashes
            # Called by the context for every block that the coming step fills.
            self._allocator.register_kv_block_hashes = self._register

    def set_version(self, version: int) -> None:
        """What is computed from now on is of ``version``. The first one names the weights that are
        there, so it is also that of the blocks computed before."""
        if self._version is None:
            self._epochs = dict.fromkeys(self._epochs, version)
        self._version = version

    def _register(self, block_ids: Any, block_hashes: Any, parent_hashes: Any = None) -> None:
        self._stock(block_ids, block_hashes, parent_hashes)
        self._epochs.update(dict.fromkeys(block_hashes, self._version))
        if len(self._epochs) > 4 * self._allocator.total_count:
            known = self._allocator.kv_hash_to_block_id
            self._epochs = {h: epoch for h, epoch in self._epochs.items() if h in known}

    def pieces(self, request: Any, reused: int, version: int | None) -> list[tuple[int, int]]:
        """``(input_index, epoch)`` of a Megatron request that is starting: its cached blocks first,
        then what the present ``version`` computes. Empty without a version.

        ``reused``: positions that it takes from the cache. Megatron computes at least the last two
        of a prompt, so a block that was found may be computed again: it is then of ``version``.
        """
        if version is None:
            return []
        hashes = request.precomputed_block_hashes
        pieces: list[tuple[int, int]] = []
        for block in range(reused // self._block_size):
            epoch = self._epochs.get(hashes[block])
            pieces.append((block * self._block_size, version if epoch is None else epoch))
        found = int(request.num_cached_tokens) // self._block_size
        again = hashes[reused // self._block_size : found]
        self._epochs.update(dict.fromkeys(again, version))
        pieces.append((reused, version))
        return pieces


def clear_prefix_cache(context: Any) -> int:
    """Make every cached block unfindable; unused ones return to the pool. How many there were.

    Blocks in use stay with their requests and are freed when those end.
    """
    if not context.enable_prefix_caching:
        return 0
    allocator = context.kv_block_allocator
    forgotten = len(allocator.kv_hash_to_block_id)
    unused = (allocator.block_ref_counts == 0) & (allocator.block_hashes != -1)
    allocator._deregister_blocks(unused.nonzero(as_tuple=True)[0].to(allocator.block_bag.dtype))
    allocator.kv_hash_to_block_id.clear()
    allocator.block_hashes.fill_(-1)
    if hasattr(allocator, "block_parent_id"):
        allocator.block_parent_id.fill_(-1)
        allocator.block_child_count.fill_(0)
    return forgotten
