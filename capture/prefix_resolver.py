"""The prefix resolver: an admission's staging chain becomes one verified token array.

A growing rollout costs its length once, not once per turn (``prefix_trunks``), and a call that the
same worker staged is resolved without touching the store.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from tokenplane.capture.prefix_trunks import Node, TrunkCache
from tokenplane.schemas.digests import chain_hash
from tokenplane.schemas.errors import MissingRowError, PrefixError, StoreError
from tokenplane.schemas.tokens import Int32Array, join, to_token_ids
from tokenplane.schemas.wire import CaptureAdmission

DEFAULT_MAX_BYTES = 256 * 2**20


class TokenDelta(Protocol):
    """The token columns of one staged row (``staging.token_source``)."""

    @property
    def staging_key(self) -> str: ...
    @property
    def rollout_id(self) -> str: ...
    @property
    def prev_len(self) -> int: ...
    @property
    def cum_len(self) -> int: ...
    @property
    def token_ids_delta(self) -> Int32Array: ...
    @property
    def generation_len(self) -> int: ...
    @property
    def chain_hash(self) -> str: ...


class TokenDeltaSource(Protocol):
    """Reads the token columns of rows by key: one per key, in order, or a ``StoreError``."""

    def fetch_tokens(self, keys: Sequence[str]) -> Sequence[TokenDelta]: ...


@dataclass(frozen=True, slots=True)
class ResolvedPrefix:
    """A verified prefix. ``token_ids``: int32[prev_len], read-only, shared with the cache."""

    token_ids: Int32Array = field(repr=False)
    source: Literal["root", "inline", "cache", "store"]
    n_sampled: int
    """Tokens at the end that the parent call sampled; all of them where an inline prefix does not
    say."""
    rows_fetched: int = 0


type _Base = tuple[int, Int32Array, Node]
"""(position in the chain, its whole sequence, its node) of the deepest call that is cached."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the resolver was made, and what the cache holds now."""

    hits: int
    misses: int
    shared_flights: int
    rows_fetched: int
    evictions: int
    trunks: int
    nbytes: int


class PrefixResolver:
    """Staging chain to token array, verified, from a byte-bounded LRU cache.

    Thread-safe. Store reads run outside the lock; concurrent misses for one chain share one read.
    Every array was verified against its chain hash before it entered the cache.

    Args:
        source: where rows are read from.
        max_bytes: bound on cached bytes. An array larger than the bound is served uncached.
    """

    def __init__(self, source: TokenDeltaSource, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._source = source
        self._cache = TrunkCache(max_bytes)
        self._generation = 0
        self._lock = threading.Lock()
        self._flights: dict[tuple[int, str], Future[tuple[Int32Array, Node]]] = {}
        self._counts = dict.fromkeys(("hits", "misses", "shared_flights", "rows_fetched"), 0)

    def resolve(self, admission: CaptureAdmission) -> ResolvedPrefix:
        """The prefix of an admission; empty for a ``text`` call.

        Raises:
            PrefixError: the chain cannot be proven; ``code`` says why, see the class.
        """
        if admission.mode == "text":
            return ResolvedPrefix(to_token_ids([]), "root", 0)
        chain = admission.staging_chain
        if not chain:
            inline = _inline(admission)
            return ResolvedPrefix(inline, "inline", len(inline))
        if len(set(chain)) != len(chain):
            raise PrefixError("the staging chain repeats a key", code="prefix_duplicate_key")
        cached = self._lookup(admission)
        if cached is not None:
            return cached
        return self._resolve_from_store(admission)

    def remember(
        self,
        *,
        staging_key: str,
        parent_staging_key: str | None,
        token_ids: Int32Array,
        n_sampled: int,
        chain_hash: str,
    ) -> None:
        """Cache the whole sequence of a call that was just staged and verified by its maker.

        Args:
            token_ids: int32[cum_len], read-only; shared, not copied.
        """
        with self._lock:
            node = Node(len(token_ids), n_sampled, chain_hash)
            self._cache.insert(staging_key, node, token_ids, parent=parent_staging_key)

    def replace_source(self, source: TokenDeltaSource) -> None:
        """Read from another source from now on; reads in flight never enter the new cache."""
        with self._lock:
            self._source = source
            self._generation += 1
            self._cache.clear()

    def stats(self) -> CacheStats:
        """Counters and present size."""
        with self._lock:
            return CacheStats(
                **self._counts,
                evictions=self._cache.evictions,
                trunks=len(self._cache),
                nbytes=self._cache.nbytes,
            )

    def _lookup(self, admission: CaptureAdmission) -> ResolvedPrefix | None:
        with self._lock:
            found = self._cache.find(admission.staging_chain[-1])
            if found is None:
                return None
            ids, node = found
            _check_tip(admission, node)
            self._counts["hits"] += 1
            return ResolvedPrefix(ids, "cache", node.n_sampled)

    def _resolve_from_store(self, admission: CaptureAdmission) -> ResolvedPrefix:
        chain = admission.staging_chain
        with self._lock:
            flight_key = (self._generation, chain[-1])
            flight = self._flights.get(flight_key)
            leader = flight is None
            if flight is None:
                flight = self._flights[flight_key] = Future()
                self._counts["misses"] += 1
            else:
                self._counts["shared_flights"] += 1
            source, generation = self._source, self._generation
            base: _Base | None = None
            for at in range(len(chain) - 2, -1, -1):
                found = self._cache.find(chain[at])
                if found is not None:
                    base = (at, *found)
                    break
        if not leader:
            try:
                ids, tip = flight.result()
            except PrefixError:
                # The leader's admission may have been the broken one; judge ours by itself.
                ids, read = _fetch(source, admission, base)
                tip = read[-1][1]
            _check_tip(admission, tip)
            return ResolvedPrefix(ids, "cache", tip.n_sampled)
        try:
            ids, read = _fetch(source, admission, base)
        except BaseException as exc:
            with self._lock:
                self._flights.pop(flight_key, None)
            flight.set_exception(exc)
            raise
        start = 0 if base is None else base[0] + 1
        tip = read[-1][1]
        with self._lock:
            self._flights.pop(flight_key, None)
            self._counts["rows_fetched"] += len(chain) - start
            if generation == self._generation:
                parent = chain[start - 1] if start else None
                self._cache.insert(chain[-1], tip, ids, parent=parent, between=read[:-1])
        flight.set_result((ids, tip))
        return ResolvedPrefix(ids, "store", tip.n_sampled, len(chain) - start)


def _inline(admission: CaptureAdmission) -> Int32Array:
    try:
        ids = to_token_ids(admission.required_prefix_token_ids, name="required_prefix_token_ids")
    except ValueError as exc:
        raise PrefixError(str(exc), code="prefix_inline_mismatch") from exc
    _check_length(admission, len(ids))
    return ids


def _check_length(admission: CaptureAdmission, length: int) -> None:
    if length != admission.prev_len:
        raise PrefixError(
            "the prefix has another length than the admission says",
            code="prefix_length",
            expected=admission.prev_len,
            got=length,
        )


def _check_tip(admission: CaptureAdmission, tip: Node) -> None:
    _check_length(admission, tip.length)
    if tip.chain_hash != admission.parent_chain_hash:
        raise PrefixError(
            "the staged chain does not give the admission's parent_chain_hash",
            code="prefix_chain_hash",
            expected=admission.parent_chain_hash,
            got=tip.chain_hash,
            key=admission.staging_chain[-1],
        )


def _fetch(
    source: TokenDeltaSource,
    admission: CaptureAdmission,
    base: _Base | None,
) -> tuple[Int32Array, list[tuple[str, Node]]]:
    """The whole prefix, and every row that was read for it; the last one is the tip."""
    start = 0 if base is None else base[0] + 1
    keys = admission.staging_chain[start:]
    try:
        rows = source.fetch_tokens(keys)
    except MissingRowError as exc:
        raise PrefixError(str(exc), code="prefix_missing_row", key=exc.key) from exc
    except StoreError as exc:
        raise PrefixError(str(exc), code="prefix_store_failure", key=keys[0]) from exc
    if [row.staging_key for row in rows] != keys:
        raise PrefixError(
            "the store gave other rows than asked for",
            code="prefix_order",
            expected=keys,
            got=[row.staging_key for row in rows],
        )
    length, link = (0, None) if base is None else (base[2].length, base[2].chain_hash)
    parts: list[Int32Array] = [] if base is None else [base[1]]
    read: list[tuple[str, Node]] = []
    for row in rows:
        if row.rollout_id != admission.rollout_id:
            raise PrefixError(
                "a row of the chain is another rollout's",
                code="prefix_wrong_rollout",
                expected=admission.rollout_id,
                got=row.rollout_id,
                key=row.staging_key,
            )
        if row.prev_len != length or row.cum_len != length + len(row.token_ids_delta):
            raise PrefixError(
                "a row of the chain does not continue the one before it",
                code="prefix_length",
                expected=f"prev_len {length}",
                got=f"prev_len {row.prev_len}, cum_len {row.cum_len}",
                key=row.staging_key,
            )
        link = chain_hash(link, row.token_ids_delta)
        if link != row.chain_hash:
            raise PrefixError(
                "a row's tokens do not give its chain hash",
                code="prefix_chain_hash",
                expected=row.chain_hash,
                got=link,
                key=row.staging_key,
            )
        length = row.cum_len
        parts.append(row.token_ids_delta)
        read.append((row.staging_key, Node(length, row.generation_len, link)))
    _check_tip(admission, read[-1][1])
    return join(parts, np.int32), read
