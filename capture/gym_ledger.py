"""A ledger for NeMo-Gym's model server over any of our stores.

Gym loads it by name (``lineage_store: tokenplane.capture.gym_ledger:GymLedger``, with
``lineage_store_kwargs: {store: "file:///abs/dir"}``) and calls it by duck type, so nothing of Gym
is imported here. It needs the base install only.

Better than the stock file ledger in two rules, where several calls match a request. The one whose
answer is the request's last turn of the model wins: it is the longest match. And calls are
interchangeable if their whole token sequences are equal, so a repeated identical answer does not
lose its parent. Different sequences stay unresolved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from itertools import takewhile
from typing import Any

from tokenplane.capture.ledger import check_rollout_id
from tokenplane.schemas.errors import InvalidRecordError, KeyConflictError
from tokenplane.schemas.fingerprints import (
    FINGERPRINT_VERSION,
    assistant_fingerprint,
    canonical_json,
    conversation_digest,
    is_assistant,
)
from tokenplane.schemas.gym_ledger_row import (
    GYM_LEDGER_PARTITION,
    GymLedgerRow,
    parse_gym_ledger_row,
)
from tokenplane.schemas.manifest import CallRecord, ManifestFailure, RolloutManifest
from tokenplane.schemas.wire import parse_model
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore


class ParentStatus(StrEnum):
    """Values are Gym's (CONTRACT section 10)."""

    ROOT = "root"
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True, slots=True)
class ParentMatch:
    """A proven parent under the names that Gym's admission reads."""

    model_call_id: str
    cumulative_token_ids: tuple[int, ...]
    """Always empty: tokens are staged elsewhere."""
    digest: str
    staging_chain: tuple[str, ...]
    prev_len: int
    chain_hash: str


@dataclass(frozen=True, slots=True)
class ParentResolution:
    """The decision for one request."""

    status: ParentStatus
    match: ParentMatch | None = None
    reason: str = ""


class GymLedger:
    """Gym's ``CaptureLedger`` protocol: commits, failures, parents and manifests of rollouts.

    Every method that Gym awaits runs its store work in a thread. Rows are durable and visible to
    every process with the same store URL when ``record`` returns.

    Args:
        store: a store URL, or an open store (then the caller closes it).
    """

    def __init__(self, store: str | StagingStore, *, partition: str = GYM_LEDGER_PARTITION) -> None:
        self._owned = isinstance(store, str)
        self._store = open_store(store) if isinstance(store, str) else store
        self._partition = partition

    def is_process_shared(self) -> bool:
        """True if other processes on this host (or network) see each row."""
        return self._store.shared != "private"

    async def close(self) -> None:
        """Close a store that this ledger opened. Idempotent."""
        if self._owned:
            await asyncio.to_thread(self._store.close)

    async def resolve(
        self, rollout_id: str, request_items: list[dict[str, Any]]
    ) -> ParentResolution:
        """The parent that the request's history proves, if any."""
        return await asyncio.to_thread(self._resolve, rollout_id, request_items)

    async def record(self, commit: Any) -> None:
        """Publish a staged call. The identical commit again is a no-op.

        Raises:
            InvalidRecordError: not a ``CaptureLedgerCommit``.
            KeyConflictError: another commit under the same call id, or a failure of the call.
        """
        await asyncio.to_thread(self._record, commit)

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Record a call that was not captured. The same reason again is a no-op."""
        check_rollout_id(rollout_id)
        key = _failure_prefix(rollout_id, model_call_id) + sha256(reason.encode()).hexdigest()[:16]
        row = GymLedgerRow(rollout_id, model_call_id, reason=reason)
        await asyncio.to_thread(self._store.put, self._partition, key, row.to_batch())

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """The rollout's ``RolloutManifest`` as plain JSON data."""
        manifest = await asyncio.to_thread(self.read_manifest, rollout_id)
        return manifest.model_dump(mode="json")

    def read_manifest(self, rollout_id: str) -> RolloutManifest:
        """The rollout's manifest, for collectors that have the store and need no model server.

        Raises:
            LedgerError: a malformed rollout id.
            StoreError: the ledger's rows cannot be read.
        """
        rows = self._rows(rollout_id)
        records = [parse_model(CallRecord, row.record) for row in rows if row.record is not None]
        failures = [
            ManifestFailure(model_call_id=row.model_call_id, reason=row.reason)
            for row in rows
            if row.reason is not None
        ]
        return RolloutManifest(rollout_id=rollout_id, records=records, failures=failures)

    async def has_rows(self, rollout_id: str) -> bool:
        """True if any commit or failure of the rollout is recorded."""
        check_rollout_id(rollout_id)
        return bool(await asyncio.to_thread(self._store.keys, self._partition, f"{rollout_id}/"))

    def _rows(self, rollout_id: str) -> list[GymLedgerRow]:
        check_rollout_id(rollout_id)
        scan = self._store.scan(self._partition, f"{rollout_id}/")
        return [parse_gym_ledger_row(batch) for _, batch in scan]

    def _record(self, commit: Any) -> None:
        record = _plain(commit.record)
        items, answer = list(commit.request_items), list(commit.response_items)
        fingerprint = _or_none(assistant_fingerprint, [*items, *answer])
        row = GymLedgerRow(
            rollout_id=commit.rollout_id,
            model_call_id=record.model_call_id,
            record=canonical_json(record.model_dump(mode="json")),
            staging_chain=tuple(commit.staging_chain),
            fingerprint=fingerprint,
            context_len=len(items),
            context_digest=_or_none(conversation_digest, items),
            fingerprint_version=FINGERPRINT_VERSION,
        )
        check_rollout_id(row.rollout_id)
        failed = self._store.keys(
            self._partition, _failure_prefix(row.rollout_id, row.model_call_id)
        )
        if failed:
            raise KeyConflictError("the call is recorded as failed", key=failed[0])
        key = f"{row.rollout_id}/{row.model_call_id}"
        self._store.put(self._partition, key, row.to_batch())

    def _resolve(self, rollout_id: str, items: Sequence[dict[str, Any]]) -> ParentResolution:
        fingerprint = assistant_fingerprint(items)
        if not fingerprint:
            return ParentResolution(ParentStatus.ROOT)
        digests: dict[int, str] = {}
        found: list[tuple[GymLedgerRow, CallRecord]] = []
        for row in self._rows(rollout_id):
            length = row.context_len
            if (
                row.record is None
                or length is None
                or (row.fingerprint, row.fingerprint_version) != (fingerprint, FINGERPRINT_VERSION)
                or len(items) < length
            ):
                continue
            if length not in digests:
                digests[length] = conversation_digest(items[:length])
            if digests[length] == row.context_digest:
                found.append((row, parse_model(CallRecord, row.record)))
        if not found:
            return ParentResolution(ParentStatus.UNRESOLVED, reason="no_match")
        found = [pair for pair in found if _is_last_turn(items, pair[0].context_len)] or found
        if len({(record.cumulative_hash, record.cum_len) for _, record in found}) > 1:
            return ParentResolution(ParentStatus.UNRESOLVED, reason="ambiguous")
        row, record = min(found, key=lambda pair: pair[1].model_call_id)
        match = ParentMatch(
            model_call_id=record.model_call_id,
            cumulative_token_ids=(),
            digest=record.cumulative_hash,
            staging_chain=row.staging_chain or (),
            prev_len=record.cum_len,
            chain_hash=record.chain_hash,
        )
        return ParentResolution(ParentStatus.RESOLVED, match)


def _is_last_turn(items: Sequence[dict[str, Any]], start: int | None) -> bool:
    """Whether the model's items from ``start`` on are one turn, and its last: only then can a call
    with ``start`` items of context have given it."""
    rest = [is_assistant(item) for item in items[start:] if item.get("type") != "reasoning"]
    turn = list(takewhile(bool, rest))
    return bool(turn) and not any(rest[len(turn) :])


def _failure_prefix(rollout_id: str, model_call_id: str) -> str:
    return f"{rollout_id}/{model_call_id}/failure-"


def _plain(record: Any) -> CallRecord:
    """Our ``CallRecord`` from Gym's (or ours), validated again."""
    data = record.model_dump(mode="json") if hasattr(record, "model_dump") else record
    return parse_model(CallRecord, data)


def _or_none(digest: Callable[[list[Any]], str], items: list[Any]) -> str | None:
    """The digest; None where the items cannot be fingerprinted, so that nothing matches them."""
    try:
        return digest(items) or None
    except InvalidRecordError:
        return None
