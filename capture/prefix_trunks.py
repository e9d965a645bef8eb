"""The prefix cache: trunks under a byte bound, least recently used first to go.

A trunk is one int32 buffer for a linear stretch of a rollout, in which each call is a prefix. Not
thread-safe: the resolver locks. Everything put in must be verified by whoever puts it in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tokenplane.schemas.tokens import Int32Array

NODE_BYTES = 512
"""Rough cost of one cached call beside its tokens."""


@dataclass(frozen=True, slots=True)
class Node:
    """One call of a trunk: its whole sequence is the trunk's first ``length`` tokens."""

    length: int
    n_sampled: int
    """Tokens at the end that the call sampled."""
    chain_hash: str


@dataclass(slots=True)
class _Trunk:
    ids: Int32Array
    nodes: dict[str, Node]
    """By staging key."""

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + NODE_BYTES * len(self.nodes)


class TrunkCache:
    """Whole sequences by staging key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._trunks: OrderedDict[str, _Trunk] = OrderedDict()  # by tip key, least recent first
        self._owner: dict[str, str] = {}  # staging key -> tip key of its trunk
        self.nbytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        """Number of trunks."""
        return len(self._trunks)

    def find(self, key: str) -> tuple[Int32Array, Node] | None:
        """The call's whole sequence, int32[length] and read-only, and its node."""
        tip = self._owner.get(key)
        if tip is None:
            return None
        self._trunks.move_to_end(tip)
        trunk = self._trunks[tip]
        node = trunk.nodes[key]
        return trunk.ids[: node.length], node

    def insert(
        self,
        key: str,
        node: Node,
        ids: Int32Array,
        *,
        parent: str | None,
        between: Iterable[tuple[str, Node]] = (),
    ) -> None:
        """Cache a call's whole sequence ``ids`` (shared, not copied; must be read-only).

        Args:
            parent: the cached call that ``ids`` extends. If it ends its trunk, the longer buffer
                takes the old one's place; otherwise ``key`` starts a trunk of its own.
            between: calls on the way from ``parent`` to ``key``, each a prefix of ``ids`` too.

        A sequence that alone passes the bound is not cached.
        """
        if key in self._owner:
            return
        nodes = {name: n for name, n in between if name not in self._owner} | {key: node}
        if parent is not None and self._owner.get(parent) == parent:
            nodes = self._remove(parent).nodes | nodes
        trunk = _Trunk(ids, nodes)
        if trunk.nbytes > self._max_bytes:
            return
        self._trunks[key] = trunk
        self.nbytes += trunk.nbytes
        for name in nodes:
            self._owner[name] = key
        while self.nbytes > self._max_bytes:
            self._remove(next(iter(self._trunks)))
            self.evictions += 1

    def clear(self) -> None:
        """Forget everything."""
        self._trunks.clear()
        self._owner.clear()
        self.nbytes = 0

    def _remove(self, tip: str) -> _Trunk:
        trunk = self._trunks.pop(tip)
        self.nbytes -= trunk.nbytes
        for name in trunk.nodes:
            del self._owner[name]
        return trunk
