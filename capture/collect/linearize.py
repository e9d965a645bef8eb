"""Verify a receipt against its rows and linearize the terminal chain (CONTRACT section 9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenplane.capture.collect.linearized import (
    ExtrasCommitment,
    LinearizedRollout,
    LinkSpan,
    WeightVersionSpan,
)
from tokenplane.schemas.digests import (
    DIGEST_VERSION,
    EXTRAS_DIGEST_VERSION,
    SCHEMA_VERSION,
    chain_hash,
    cumulative_hash,
    staging_digest,
)
from tokenplane.schemas.errors import InvalidRecordError, RebuildError, ReceiptVerificationError
from tokenplane.schemas.manifest import CallRecord, RolloutManifest, RolloutReceipt
from tokenplane.schemas.staged_call import StagedCall, to_staged_call
from tokenplane.schemas.tokens import join
from tokenplane.schemas.wire import SIGNED_FIELDS, StagedCallBaseSnapshot

type Snapshot = StagedCall | StagedCallBaseSnapshot

_COMPARED = (
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "digest",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
)
_VERSIONS = ("schema_version", "digest_version", "extras_digest_version")


def verify_and_linearize(
    receipt: RolloutReceipt, snapshots: Sequence[Snapshot]
) -> LinearizedRollout:
    """The training sequence of a receipt, after every check of CONTRACT section 9 in its order.

    Args:
        snapshots: one per manifest row, in manifest order, side branches included.

    Raises:
        TypeError: not a receipt, or not a snapshot.
        ReceiptVerificationError: a receipt, row or snapshot check; ``code`` is the contract's.
        RebuildError: the graph, a chain hash, a mask or the whole sequence does not hold.
        TokenIdRangeError: a wire snapshot holds an id beyond int32.
    """
    if not isinstance(receipt, RolloutReceipt):
        raise TypeError(f"expected a RolloutReceipt, got {type(receipt).__name__}")
    _check_receipt(receipt)
    calls = _check_snapshots(receipt, snapshots)
    _check_graph(receipt.manifest)
    return _linearize(receipt, calls)


def linearize(
    rollout_id: str,
    snapshots: Sequence[Snapshot],
    manifest: RolloutManifest,
    *,
    terminal_hint: str | None = None,
) -> LinearizedRollout:
    """``verify_and_linearize`` for a terminal that the caller declares.

    Raises:
        RebuildError: no hint, or it is not in the manifest (``missing_terminal``).
    """
    ids = [record.model_call_id for record in manifest.records]
    if terminal_hint is None or terminal_hint not in ids:
        raise RebuildError("no terminal call", code="missing_terminal", key=terminal_hint)
    receipt = RolloutReceipt(
        rollout_id=rollout_id,
        manifest=manifest.records,
        terminal_model_call_id=terminal_hint,
        terminal_selection="declared",
    )
    return verify_and_linearize(receipt, snapshots)


def terminal_chain(records: Sequence[CallRecord], terminal: str | None) -> list[CallRecord]:
    """The rows from the root to ``terminal``.

    Raises:
        RebuildError: ``missing_terminal``, ``missing_parent`` or ``lineage_cycle``.
    """
    by_id = {record.model_call_id: record for record in records}
    if terminal is None or terminal not in by_id:
        raise RebuildError("no terminal call in the manifest", code="missing_terminal")
    chain = [by_id[terminal]]
    while chain[-1].parent_call_id is not None:
        parent = by_id.get(chain[-1].parent_call_id)
        if parent is None:
            raise RebuildError(
                "parent not in the manifest", code="missing_parent", key=chain[-1].parent_call_id
            )
        if len(chain) > len(by_id):
            raise RebuildError("the parents form a cycle", code="lineage_cycle", key=terminal)
        chain.append(parent)
    return chain[::-1]


def _check_receipt(receipt: RolloutReceipt) -> None:
    for name, code, supported in (
        ("schema_version", "unsupported_schema", SCHEMA_VERSION),
        ("digest_version", "unsupported_digest", DIGEST_VERSION),
        ("extras_digest_version", "unsupported_extras_digest", EXTRAS_DIGEST_VERSION),
    ):
        if getattr(receipt, name) != supported:
            raise ReceiptVerificationError(
                name, code=code, expected=supported, got=getattr(receipt, name)
            )
    if receipt.failure_reason is not None:
        raise ReceiptVerificationError(receipt.failure_reason, code="rollout_failed")
    if receipt.capture_poisoned:
        raise ReceiptVerificationError("capture is poisoned", code="capture_poisoned")
    if not receipt.manifest:
        raise ReceiptVerificationError("the manifest is empty", code="empty_manifest")
    for name, code in (
        ("model_call_id", "duplicate_manifest_row"),
        ("staging_key", "duplicate_staging_key"),
    ):
        values = [getattr(record, name) for record in receipt.manifest]
        if len(set(values)) != len(values):
            raise ReceiptVerificationError(f"the manifest repeats a {name}", code=code)


def _check_snapshots(receipt: RolloutReceipt, snapshots: Sequence[Snapshot]) -> list[StagedCall]:
    manifest = receipt.manifest
    if len(snapshots) != len(manifest):
        raise ReceiptVerificationError(
            "one snapshot per manifest row",
            code="row_count_mismatch",
            expected=len(manifest),
            got=len(snapshots),
        )
    known = {record.model_call_id for record in manifest}
    seen: set[str] = set()
    calls = []
    for record, snapshot in zip(manifest, snapshots, strict=True):
        if not isinstance(snapshot, (StagedCall, StagedCallBaseSnapshot)):
            raise TypeError(f"expected a staged call snapshot, got {type(snapshot).__name__}")
        ident = snapshot.model_call_id
        if ident in seen:
            raise ReceiptVerificationError(
                "a snapshot comes twice", code="duplicate_snapshot", key=ident
            )
        seen.add(ident)
        if ident != record.model_call_id:
            code = "snapshot_order_mismatch" if ident in known else "snapshot_identity_mismatch"
            raise ReceiptVerificationError(
                "a snapshot is another call's", code=code, expected=record.model_call_id, got=ident
            )
        if snapshot.rollout_id != receipt.rollout_id:
            raise ReceiptVerificationError(
                "a snapshot is another rollout's",
                code="wrong_rollout",
                expected=receipt.rollout_id,
                got=snapshot.rollout_id,
                key=ident,
            )
        for name in _COMPARED:
            _equal(name, getattr(record, name), getattr(snapshot, name), ident)
        for name in _VERSIONS:
            _equal(name, getattr(record, name), getattr(snapshot, name), ident)
            _equal(name, getattr(receipt, name), getattr(snapshot, name), ident)
        calls.append(_intact(snapshot, ident))
    return calls


def _equal(name: str, expected: object, got: object, ident: str) -> None:
    if expected != got:
        raise ReceiptVerificationError(
            f"{name} of a snapshot differs from the manifest",
            code=f"wrong_{name}",
            expected=expected,
            got=got,
            key=ident,
        )


def _intact(snapshot: Snapshot, ident: str) -> StagedCall:
    try:
        digest = staging_digest(**{name: getattr(snapshot, name) for name in SIGNED_FIELDS})
    except (InvalidRecordError, TypeError) as exc:
        raise ReceiptVerificationError(str(exc), code="invalid_snapshot", key=ident) from exc
    if digest != snapshot.digest:
        raise ReceiptVerificationError(
            "the columns do not give the digest",
            code="corrupt_digest",
            expected=snapshot.digest,
            got=digest,
            key=ident,
        )
    return to_staged_call(snapshot)


def _check_graph(manifest: Sequence[CallRecord]) -> None:
    """Row by row: its parent, then whether its ancestors end. In this order a cycle shows as one,
    although the lengths along it never fit either."""
    by_id = {record.model_call_id: record for record in manifest}
    settled: set[str] = set()
    for record in manifest:
        if record.parent_call_id is not None:
            _check_parent(record, by_id.get(record.parent_call_id))
        path: set[str] = set()
        at: CallRecord | None = record
        while at is not None and at.model_call_id not in settled:
            if at.model_call_id in path:
                raise RebuildError(
                    "the parents form a cycle", code="lineage_cycle", key=at.model_call_id
                )
            path.add(at.model_call_id)
            at = None if at.parent_call_id is None else by_id.get(at.parent_call_id)
        settled |= path


def _check_parent(record: CallRecord, parent: CallRecord | None) -> None:
    if parent is None:
        raise RebuildError(
            "parent not in the manifest", code="missing_parent", key=record.parent_call_id
        )
    if parent.cum_len != record.prev_len:
        raise RebuildError(
            "a call does not start where its parent ends",
            code="parent_length_mismatch",
            expected=parent.cum_len,
            got=record.prev_len,
            key=record.model_call_id,
        )


def _linearize(receipt: RolloutReceipt, calls: Sequence[StagedCall]) -> LinearizedRollout:
    by_id = {call.model_call_id: call for call in calls}
    records = terminal_chain(receipt.manifest, receipt.terminal_model_call_id)
    chain = [by_id[record.model_call_id] for record in records]
    link: str | None = None
    start = 0
    versions, links = [], []
    for call in chain:
        link = chain_hash(link, call.token_ids_delta)
        if link != call.chain_hash:
            raise RebuildError(
                "the tokens do not give the chain hash",
                code="chain_hash_mismatch",
                expected=call.chain_hash,
                got=link,
                key=call.model_call_id,
            )
        mask = call.token_mask_delta
        if np.any(mask[:-1] > mask[1:]):
            raise RebuildError(
                "carried tokens after sampled ones",
                code="invalid_mask_order",
                key=call.model_call_id,
            )
        carry, generation = call.carry_len, call.generation_len
        if not generation:
            raise RebuildError(
                "a call without sampled tokens", code="empty_generation", key=call.model_call_id
            )
        versions.append(
            WeightVersionSpan(
                call.model_call_id, start, start + call.delta_len, call.weight_version
            )
        )
        links.append(LinkSpan(call.model_call_id, carry, generation))
        start += call.delta_len
    token_ids = join([call.token_ids_delta for call in chain], np.int32)
    digest = cumulative_hash(token_ids)
    if digest != chain[-1].cumulative_hash:
        raise RebuildError(
            "the tokens do not give the terminal's cumulative hash",
            code="cumulative_hash_mismatch",
            expected=chain[-1].cumulative_hash,
            got=digest,
        )
    return LinearizedRollout(
        rollout_id=receipt.rollout_id,
        token_ids=token_ids,
        token_mask=join([call.token_mask_delta for call in chain], np.uint8),
        logprobs=join([call.generation_log_probs_delta for call in chain], np.float32),
        model_call_ids=tuple(call.model_call_id for call in chain),
        prompt_len=links[0].carry_len,
        weight_versions=tuple(call.weight_version for call in chain),
        weight_version_spans=tuple(versions),
        link_spans=tuple(links),
        extras_commitments=tuple(
            ExtrasCommitment(call.model_call_id, call.extras_digest_version, call.extras_digest)
            for call in chain
        ),
    )
