"""What a staged row can prove: by itself, and as a continuation of its parent."""

from __future__ import annotations

import numpy as np

from tokenplane.schemas.digests import chain_hash, cumulative_hash, extras_digest
from tokenplane.schemas.epochs import Boundaries, to_boundaries
from tokenplane.schemas.errors import InvalidRecordError, TokenplaneError
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.schemas.tokens import Int32Array, join
from tokenplane.staging.store import StagingStore
from tokenplane.staging.token_source import TokenSource


def check_row(row: StagedRow, store: StagingStore) -> None:
    """Digests, mask, epochs and big buffers of one row.

    Raises:
        TokenplaneError: the first thing that does not hold; the code is the contract's where it
            has one (CONTRACT section 9).
    """
    call, key = row.call, row.staging_key
    try:
        call.check_digest()
    except InvalidRecordError as error:
        raise _bad("corrupt_digest", str(error), key) from error
    if extras_digest(call.extras) != call.extras_digest:
        raise _bad("corrupt_extras", "the extras do not give their digest", key)
    mask = call.token_mask_delta
    if np.any(mask[:-1] > mask[1:]):
        raise _bad("invalid_mask_order", "carried tokens after sampled ones", key)
    if not call.generation_len:
        raise _bad("empty_generation", "a call without sampled tokens", key)
    _check_epochs(row)
    TokenSource(store).fetch_attachments(row)


def _check_epochs(row: StagedRow) -> None:
    call, evidence = row.call, row.evidence
    policy = to_boundaries(evidence.policy_epochs)
    if not policy:
        raise _bad("no_policy_epoch", "the call carries no policy epoch", row.staging_key)
    if policy[0][1] != call.weight_version:
        raise InvalidRecordError(
            "the first policy boundary is not the call's weight version",
            code="wrong_policy_epoch",
            expected=call.weight_version,
            got=policy[0],
            key=row.staging_key,
        )
    for name, boundaries in (
        ("policy_epochs", policy),
        ("kv_cache_epochs", to_boundaries(evidence.kv_cache_epochs, name="kv_cache_epochs")),
    ):
        _check_within(name, boundaries, row)


def _check_within(name: str, boundaries: Boundaries, row: StagedRow) -> None:
    if boundaries and boundaries[-1][0] >= row.call.cum_len:
        raise InvalidRecordError(
            f"{name}: a boundary behind the last token",
            code="epoch_out_of_range",
            expected=f"< {row.call.cum_len}",
            got=boundaries[-1],
            key=row.staging_key,
        )


def check_link(row: StagedRow, parent: StagedRow | None, before: Int32Array) -> Int32Array:
    """The whole sequence of a call, int32[cum_len], proven to continue its parent.

    Args:
        before: the parent's whole sequence; empty for a root.

    Raises:
        InvalidRecordError: ``parent_length_mismatch``, ``chain_hash_mismatch`` or
            ``cumulative_hash_mismatch``.
    """
    call, key = row.call, row.staging_key
    if call.prev_len != len(before):
        raise InvalidRecordError(
            "the call does not start where its parent ends",
            code="parent_length_mismatch",
            expected=len(before),
            got=call.prev_len,
            key=key,
        )
    link = chain_hash(None if parent is None else parent.call.chain_hash, call.token_ids_delta)
    if link != call.chain_hash:
        raise _bad("chain_hash_mismatch", "the tokens do not give the chain hash", key)
    whole = join([before, call.token_ids_delta], np.int32)
    if cumulative_hash(whole) != call.cumulative_hash:
        raise _bad("cumulative_hash_mismatch", "the tokens do not give the cumulative hash", key)
    return whole


def _bad(code: str, message: str, key: str) -> TokenplaneError:
    return InvalidRecordError(message, code=code, key=key)
