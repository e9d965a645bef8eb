"""An index over the ledger columns of one rollout's rows: parents, repeats, chains, manifest."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pyarrow as pa

from tokenplane.schemas.digests import cumulative_hash
from tokenplane.schemas.errors import LedgerError
from tokenplane.schemas.fingerprints import FINGERPRINT_VERSION
from tokenplane.schemas.manifest import CallRecord
from tokenplane.schemas.staged_call import StagedCall
from tokenplane.schemas.staged_row import LEDGER_READ_COLUMNS, LedgerEntry, StagedRow
from tokenplane.schemas.tokens import Int32Array


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One staged call without its tokens. Digests are lowercase hex; see ``staged_row``."""

    staging_key: str
    rollout_id: str
    model_call_id: str
    parent_call_id: str | None
    mode: Literal["text", "token_in"]
    prev_len: int
    delta_len: int
    cum_len: int
    weight_version: int
    digest: str
    extras_digest: str
    chain_hash: str
    cumulative_hash: str
    admitted_at: float | None
    created_at: float
    response_id: str | None
    parent_staging_key: str | None
    context_len: int | None
    idempotency_key: str | None
    context_digest: str | None
    output_fingerprint: str | None
    continuation_fingerprint: str | None
    request_digest: str | None

    @classmethod
    def of(cls, row: StagedRow) -> LedgerRow:
        """The ledger columns of a row in memory, equal to what ``parse_ledger_row`` reads back."""
        values: dict[str, Any] = {name: getattr(row.call, name) for name in _OF_CALL}
        values |= {name: getattr(row.ledger, name, None) for name in _OF_LEDGER}
        return cls(
            staging_key=row.staging_key,
            admitted_at=row.evidence.admitted_at,
            created_at=row.created_at,
            **values,
        )

    def to_call_record(self) -> CallRecord:
        """The manifest row.

        Raises:
            LedgerError: the row was staged for another ledger and has no response id.
        """
        if self.response_id is None:
            raise LedgerError(
                "the row has no response id", code="row_without_response", key=self.staging_key
            )
        return CallRecord(
            model_call_id=self.model_call_id,
            parent_call_id=self.parent_call_id,
            prev_len=self.prev_len,
            delta_len=self.delta_len,
            cum_len=self.cum_len,
            weight_version=self.weight_version,
            digest=self.digest,
            extras_digest=self.extras_digest,
            staging_key=self.staging_key,
            mode=self.mode,
            chain_hash=self.chain_hash,
            cumulative_hash=self.cumulative_hash,
            response_id=self.response_id,
            admitted_at=self.admitted_at,
            output_fingerprint=self.output_fingerprint,
            continuation_fingerprint=self.continuation_fingerprint,
            fingerprint_version=FINGERPRINT_VERSION,
        )


def parse_ledger_row(batch: pa.RecordBatch) -> LedgerRow:
    """The ledger columns of a one-row batch of staged-row columns."""
    values: dict[str, Any] = batch.select(list(LEDGER_READ_COLUMNS)).to_pylist()[0]
    values |= {name: v.hex() for name, v in values.items() if isinstance(v, bytes)}
    return LedgerRow(**values)


_NAMES = {column.name for column in fields(LedgerRow)}
_OF_CALL = tuple(column.name for column in fields(StagedCall) if column.name in _NAMES)
_OF_LEDGER = tuple(column.name for column in fields(LedgerEntry) if column.name in _NAMES)


@dataclass(slots=True)
class RolloutIndex:
    """The rows of one rollout, in write order. Not thread-safe: its owner locks."""

    rollout_id: str
    rows: dict[str, LedgerRow] = field(default_factory=dict)
    """Every row, also those of ``superseded``."""
    superseded: set[str] = field(default_factory=set)
    """Staging keys of runs that another run of the same request preceded: their answers were given
    to nobody, so they are no calls of the rollout and no parents."""
    _by_context: dict[str, list[LedgerRow]] = field(default_factory=lambda: defaultdict(list))
    _by_response: dict[str, LedgerRow] = field(default_factory=dict)
    _by_idempotency: dict[str, LedgerRow] = field(default_factory=dict)

    def add(self, row: LedgerRow) -> None:
        """Index one row; a row that is known already changes nothing."""
        if row.staging_key in self.rows:
            return
        self.rows[row.staging_key] = row
        if row.idempotency_key is not None:
            # Two servers may both have run one request: the first row in write order answers.
            first = self._by_idempotency.setdefault(row.idempotency_key, row)
            if first is not row:
                self.superseded.add(row.staging_key)
                return
        if row.context_digest is not None:
            self._by_context[row.context_digest].append(row)
        if row.response_id is not None:
            self._by_response.setdefault(row.response_id, row)

    def forget(self, keys: set[str]) -> RolloutIndex:
        """A fresh index without the rows that the store no longer has."""
        rest = RolloutIndex(self.rollout_id)
        for key, row in self.rows.items():
            if key not in keys:
                rest.add(row)
        return rest

    def calls(self) -> list[LedgerRow]:
        """The rollout's calls in write order: every row but the superseded ones."""
        return [row for key, row in self.rows.items() if key not in self.superseded]

    def repeat_of(self, idempotency_key: str) -> LedgerRow | None:
        """The row that was first staged under this idempotency key."""
        return self._by_idempotency.get(idempotency_key)

    def by_response(self, response_id: str) -> LedgerRow | None:
        """The row whose answer had this id."""
        return self._by_response.get(response_id)

    def candidates(self, context_digest: str) -> list[LedgerRow]:
        """Rows whose conversation, answer included, has this digest."""
        return list(self._by_context.get(context_digest, ()))

    def longest_token_parent(self, prompt: Int32Array) -> list[LedgerRow]:
        """Rows with the longest whole sequence that ``prompt`` starts with (proven by hash)."""
        by_length: dict[int, list[LedgerRow]] = defaultdict(list)
        for row in self.calls():
            if row.cum_len <= len(prompt):
                by_length[row.cum_len].append(row)
        for length in sorted(by_length, reverse=True):
            digest = cumulative_hash(prompt[:length])
            found = [row for row in by_length[length] if row.cumulative_hash == digest]
            if found:
                return found
        return []

    def chain_of(self, row: LedgerRow) -> list[str]:
        """Staging keys from the root to ``row``.

        Raises:
            LedgerError: an ancestor is not in the ledger (code ``unknown_parent``).
        """
        chain = [row.staging_key]
        while row.parent_staging_key is not None:
            parent = self.rows.get(row.parent_staging_key)
            if parent is None or parent.cum_len != row.prev_len or len(chain) > len(self.rows):
                raise LedgerError(
                    "an ancestor of the call is not in the ledger",
                    code="unknown_parent",
                    key=row.parent_staging_key,
                )
            chain.append(parent.staging_key)
            row = parent
        return chain[::-1]
