"""The standalone ledger: which staged call a request continues, decided from the rows themselves.

There is no second write: a staged row carries its ledger columns, so what is staged is exactly what
can become a parent (DESIGN rule 3). ``Ledger`` only indexes rows and adds small failure rows.
"""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenplane.capture.core import mint_staging_key
from tokenplane.capture.failures import CaptureFailure
from tokenplane.capture.ledger_index import LedgerRow, RolloutIndex
from tokenplane.capture.rollout_indexes import RolloutIndexes
from tokenplane.schemas.errors import InvalidRecordError, LedgerError
from tokenplane.schemas.failure_row import FAILURE_PARTITION, FailureRow, parse_failure_row
from tokenplane.schemas.fingerprints import (
    assistant_fingerprint,
    conversation_digest,
    is_assistant,
    request_envelope,
)
from tokenplane.schemas.manifest import ManifestFailure, RolloutManifest
from tokenplane.schemas.staged_row import (
    STAGED_PARTITION,
    LedgerEntry,
    StagedRow,
)
from tokenplane.schemas.tokens import Int32Array
from tokenplane.schemas.wire import CaptureAdmission
from tokenplane.staging.store import StagingStore

ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LedgerRequest:
    """What the ledger needs to know of one request."""

    rollout_id: str
    messages: Sequence[Message] | None = None
    """The conversation (chat); None for a completion."""
    prompt_token_ids: Int32Array | None = None
    """int32[P]: a completion's token prompt, matched by hash; None where it is text."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Everything beside the messages that shapes the prompt: tools, template arguments (D13)."""
    idempotency_key: str | None = None
    request_digest: str | None = None
    """Hex digest of the request body: an idempotency key may not be used for another body."""
    parent_response_id: str | None = None
    """Explicit parent; must agree with the conversation."""
    new_segment: bool = False
    """The harness says that it rewrote the history (compaction, D27): where no parent is proven,
    the call is a root of its own instead of unproven."""


@dataclass(frozen=True, slots=True)
class LedgerDecision:
    """The ledger's answer to one request."""

    kind: Literal["root", "match", "unproven", "repeat"]
    """root: a new ``text`` call; match: continues ``parent``; unproven: serve, record, do not
    capture; repeat: ``parent`` is the earlier run of this very request."""
    rollout_id: str
    model_call_id: str
    admitted_at: float
    admission: CaptureAdmission | None = None
    parent: LedgerRow | None = None
    reason: str | None = None
    request: LedgerRequest = field(repr=False, default_factory=lambda: LedgerRequest(""))


class Ledger:
    """Admissions, manifests and failures of standalone rollouts. Thread-safe.

    Args:
        store: where staged and failure rows live; other processes' rows are seen at every call.
        max_rollouts: rollouts whose index is kept in memory (least recently used go first).
    """

    def __init__(
        self,
        store: StagingStore,
        *,
        partition: str = STAGED_PARTITION,
        failure_partition: str = FAILURE_PARTITION,
        max_rollouts: int = 4096,
    ) -> None:
        self._store = store
        self._partition = partition
        self._failures = failure_partition
        self._indexes = RolloutIndexes(store, partition, max_rollouts=max_rollouts)

    def note(self, row: StagedRow) -> None:
        """See ``RolloutIndexes.note``."""
        self._indexes.note(row)

    def index(self, rollout_id: str) -> RolloutIndex:
        """See ``RolloutIndexes.index``."""
        return self._indexes.index(rollout_id)

    def admit(self, request: LedgerRequest) -> LedgerDecision:
        """Decide what the request is, and mint its call id.

        Raises:
            LedgerError: ``invalid_rollout_id``; ``idempotency_mismatch`` (the key was used for
                another request); ``unknown_parent`` (the named parent is not in the rollout).
            StoreError: the store cannot be read.
        """
        check_rollout_id(request.rollout_id)
        index = self.index(request.rollout_id)
        decision = LedgerDecision(
            kind="root",
            rollout_id=request.rollout_id,
            model_call_id=uuid.uuid4().hex,
            admitted_at=time.time(),
            request=request,
        )
        if request.idempotency_key is not None:
            earlier = index.repeat_of(request.idempotency_key)
            if earlier is not None:
                check_repeat(request, earlier.request_digest)
                return _decided(decision, "repeat", parent=earlier)
        try:
            parent = self._parent(index, request)
        except _Unproven as exc:
            return _decided(decision, "unproven", reason=exc.reason)
        if parent is None:
            admission = CaptureAdmission(
                rollout_id=request.rollout_id, model_call_id=decision.model_call_id, mode="text"
            )
            return _decided(decision, "root", admission=admission)
        admission = CaptureAdmission(
            rollout_id=request.rollout_id,
            model_call_id=decision.model_call_id,
            parent_call_id=parent.model_call_id,
            prev_len=parent.cum_len,
            mode="token_in",
            staging_chain=index.chain_of(parent),
            parent_chain_hash=parent.chain_hash,
        )
        return _decided(decision, "match", admission=admission, parent=parent)

    def _parent(self, index: RolloutIndex, request: LedgerRequest) -> LedgerRow | None:
        explicit = None
        if request.parent_response_id is not None:
            explicit = index.by_response(request.parent_response_id)
            if explicit is None:
                raise LedgerError(
                    "no call of this rollout gave that response",
                    code="unknown_parent",
                    key=request.parent_response_id,
                )
        if request.messages is None:
            if request.prompt_token_ids is None:
                return None
            return _pick(index.longest_token_parent(request.prompt_token_ids), explicit)
        turns = [i for i, message in enumerate(request.messages) if is_assistant(message)]
        if not turns:
            if explicit is not None:
                raise _Unproven("parent_context_mismatch")
            return None
        length = turns[-1] + 1
        try:
            digest = conversation_digest(_items(request, request.messages[:length]))
        except InvalidRecordError:
            raise _Unproven("unfingerprintable_request") from None
        candidates = index.candidates(digest)
        if not candidates and explicit is not None:
            raise _Unproven("parent_context_mismatch")
        if not candidates and (request.new_segment or not index.rows):
            # Declared by the harness, or seeded history (few-shot) of a rollout without any row.
            return None
        if not candidates:
            raise _Unproven("unresolved_parent")
        return _pick(candidates, explicit)

    def entry_for(
        self,
        decision: LedgerDecision,
        *,
        response_id: str,
        response_messages: Sequence[Message],
        response_body: str | None,
    ) -> LedgerEntry:
        """The ledger columns of the row about to be staged for this decision.

        Args:
            response_messages: what the agent will echo as assistant turn; empty for a completion.
            response_body: the served JSON, kept so that a repeat gets the same answer.
        """
        request = decision.request
        context_len, context, output, continuation = 0, None, None, None
        if request.messages is not None:
            try:
                whole = [*request.messages, *response_messages]
                context_len = len(whole)
                context = conversation_digest(_items(request, whole))
                output = assistant_fingerprint(response_messages) or None
                continuation = assistant_fingerprint(whole) or None
            except InvalidRecordError:
                context = output = continuation = None
        return LedgerEntry(
            response_id=response_id,
            parent_staging_key=None if decision.parent is None else decision.parent.staging_key,
            context_len=context_len,
            context_digest=context,
            output_fingerprint=output,
            continuation_fingerprint=continuation,
            idempotency_key=request.idempotency_key,
            request_digest=request.request_digest,
            response_body=response_body,
        )

    def record_failure(self, failure: CaptureFailure) -> None:
        """Store a failure row.

        Raises:
            StoreError: the store refuses it (the caller has logged and counted the failure).
        """
        row = FailureRow(
            failure.rollout_id, failure.model_call_id, failure.code, failure.message, failure.at_s
        )
        self._store.put(self._failures, mint_staging_key(*row.key_names), row.to_batch())

    def failures(self, rollout_id: str) -> list[FailureRow]:
        """Failure rows of one rollout, in write order."""
        check_rollout_id(rollout_id)
        rows = self._store.scan(self._failures, prefix=f"{rollout_id}/")
        return [parse_failure_row(batch) for _, batch in rows]

    def manifest(self, rollout_id: str) -> RolloutManifest:
        """Every acknowledged call and every failure; empty lists for an unknown rollout.

        Raises:
            LedgerError: ``invalid_rollout_id``.
        """
        check_rollout_id(rollout_id)
        records, failures = [], []
        for row in self.index(rollout_id).calls():
            if row.response_id is None:
                failures.append(
                    ManifestFailure(
                        model_call_id=row.model_call_id, reason="ledger_row_missing_response_id"
                    )
                )
            else:
                records.append(row.to_call_record())
        failures += [
            ManifestFailure(model_call_id=row.model_call_id, reason=row.code)
            for row in self.failures(rollout_id)
        ]
        return RolloutManifest(rollout_id=rollout_id, records=records, failures=failures)


def check_rollout_id(rollout_id: str) -> None:
    """Raises:
    LedgerError: not 1 to 200 of ``A-Z a-z 0-9 . _ -`` (code ``invalid_rollout_id``).
    """
    if not isinstance(rollout_id, str) or ROLLOUT_ID.fullmatch(rollout_id) is None:
        raise LedgerError(
            "rollout id",
            code="invalid_rollout_id",
            expected="1 to 200 of A-Z a-z 0-9 . _ -, starting with a letter or digit",
            got=repr(rollout_id)[:220],
        )


def check_repeat(request: LedgerRequest, request_digest: str | None) -> None:
    """Raises:
    LedgerError: the idempotency key was used for another body (``idempotency_mismatch``).
    """
    if request_digest != request.request_digest:
        raise LedgerError(
            "the idempotency key was used for another request",
            code="idempotency_mismatch",
            key=request.idempotency_key,
        )


class _Unproven(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _pick(candidates: list[LedgerRow], explicit: LedgerRow | None) -> LedgerRow | None:
    """One parent among rows with the same conversation.

    An explicit parent decides if it is one of them. Rows with equal whole sequences are
    interchangeable (smallest call id); others are ambiguous.
    """
    if explicit is not None:
        if explicit.staging_key not in {row.staging_key for row in candidates}:
            raise _Unproven("parent_context_mismatch")
        return explicit
    if len({row.cumulative_hash for row in candidates}) > 1:
        raise _Unproven("ambiguous_parent")
    return min(candidates, key=lambda row: row.model_call_id, default=None)


def _items(request: LedgerRequest, messages: Sequence[Message]) -> list[Message]:
    return [*request_envelope(**request.settings), *messages]


def _decided(decision: LedgerDecision, kind: Any, **changes: Any) -> LedgerDecision:
    return dataclasses.replace(decision, kind=kind, **changes)
