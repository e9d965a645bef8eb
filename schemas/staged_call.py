"""The array-backed record of one model call: what the hot path carries instead of lists."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from tokenplane.schemas.digests import (
    DIGEST_VERSION,
    EXTRAS_DIGEST_VERSION,
    SCHEMA_VERSION,
    chain_hash,
    cumulative_hash,
    extras_digest,
    staging_digest,
)
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.tokens import (
    Float32Array,
    Int32Array,
    UInt8Array,
    frozen,
    to_log_probs,
    to_mask,
    to_token_ids,
)
from tokenplane.schemas.wire import SIGNED_FIELDS, StagedCallBaseSnapshot, StagedCallRecord


@dataclass(frozen=True, slots=True, eq=False)
class StagedCall:
    """One staged call. Field names and meanings are those of CONTRACT section 5.

    Arrays are read-only and owned by the record; digests are lowercase hex.
    """

    rollout_id: str
    model_call_id: str
    parent_call_id: str | None
    mode: Literal["text", "token_in"]
    prev_len: int
    delta_len: int
    cum_len: int
    weight_version: int
    """Version that the call was admitted under (its first policy-epoch boundary)."""
    token_ids_delta: Int32Array = field(repr=False)
    """int32[delta_len]: carried tokens (``prompt[prev_len:]``), then the sampled ones."""
    token_mask_delta: UInt8Array = field(repr=False)
    """uint8[delta_len]: 0 carried, 1 sampled."""
    generation_log_probs_delta: Float32Array = field(repr=False)
    """float32[delta_len], natural log; 0 on carried tokens, as reported on sampled ones."""
    extras_digest: str
    chain_hash: str
    cumulative_hash: str
    digest: str
    extras: dict[str, Any] | None = None
    """The payload behind ``extras_digest``; None also where a base snapshot was read."""
    schema_version: int = SCHEMA_VERSION
    digest_version: int = DIGEST_VERSION
    extras_digest_version: int = EXTRAS_DIGEST_VERSION

    @property
    def carry_len(self) -> int:
        """Number of carried tokens: those before the first sampled one."""
        sampled = np.flatnonzero(self.token_mask_delta)
        return int(sampled[0]) if len(sampled) else self.delta_len

    @property
    def generation_len(self) -> int:
        """Number of sampled tokens."""
        return int(np.count_nonzero(self.token_mask_delta))

    def check_digest(self) -> None:
        """Recompute the staging digest over the columns.

        Raises:
            InvalidRecordError: malformed, or the digest differs.
        """
        expected = staging_digest(**{name: getattr(self, name) for name in SIGNED_FIELDS})
        if expected != self.digest:
            raise InvalidRecordError("digest does not match", expected=expected, got=self.digest)

    def to_wire(self) -> StagedCallRecord:
        """The pydantic model with lists (validates everything once more).

        Raises:
            pydantic.ValidationError: the record is not well formed.
        """
        return StagedCallRecord(**_wire_values(self), extras=self.extras)

    def to_wire_snapshot(self) -> StagedCallBaseSnapshot:
        """The pydantic base snapshot: lists, without the extras payload.

        Raises:
            pydantic.ValidationError: the record is not well formed.
        """
        return StagedCallBaseSnapshot(**_wire_values(self))


def _wire_values(record: StagedCall) -> dict[str, Any]:
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "extras"}
    values["token_ids_delta"] = record.token_ids_delta.tolist()
    values["token_mask_delta"] = record.token_mask_delta.astype(np.float64).tolist()
    values["generation_log_probs_delta"] = record.generation_log_probs_delta.tolist()
    return values


def build_staged_call(
    *,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: Literal["text", "token_in"],
    prev_len: int,
    weight_version: int,
    parent_chain_hash: str | None,
    prompt_token_ids: Int32Array,
    generated_token_ids: Int32Array,
    generated_log_probs: Float32Array,
    extras: dict[str, Any] | None,
) -> StagedCall:
    """The delta rule (CONTRACT section 4) and every digest of one call.

    Args:
        prompt_token_ids: int32[P], everything that the engine was conditioned on.
        generated_token_ids: int32[G].
        generated_log_probs: float32[G], natural log.

    Raises:
        InvalidRecordError: ``prev_len`` outside the prompt, unequal lengths, an empty delta, or a
            malformed identity.
    """
    total = len(prompt_token_ids) + len(generated_token_ids)
    if not 0 <= prev_len <= len(prompt_token_ids):
        raise InvalidRecordError(
            "prev_len outside the prompt", expected=f"0..{len(prompt_token_ids)}", got=prev_len
        )
    if len(generated_token_ids) != len(generated_log_probs):
        raise InvalidRecordError(
            "one log probability per generated token",
            expected=len(generated_token_ids),
            got=len(generated_log_probs),
        )
    carry = prompt_token_ids[prev_len:]
    delta_len = len(carry) + len(generated_token_ids)
    if not delta_len:
        raise InvalidRecordError("the delta of a call must not be empty")
    mask = np.zeros(delta_len, np.uint8)
    mask[len(carry) :] = 1
    log_probs = np.zeros(delta_len, np.float32)
    log_probs[len(carry) :] = generated_log_probs
    values: dict[str, Any] = {
        "rollout_id": rollout_id,
        "model_call_id": model_call_id,
        "parent_call_id": parent_call_id,
        "mode": mode,
        "prev_len": prev_len,
        "delta_len": delta_len,
        "cum_len": total,
        "weight_version": weight_version,
        "token_ids_delta": frozen(np.concatenate([carry, generated_token_ids])),
        "token_mask_delta": frozen(mask),
        "generation_log_probs_delta": frozen(log_probs),
        "extras_digest": extras_digest(extras),
    }
    values["chain_hash"] = chain_hash(parent_chain_hash, values["token_ids_delta"])
    values["cumulative_hash"] = cumulative_hash(prompt_token_ids, generated_token_ids)
    return StagedCall(**values, digest=staging_digest(**values), extras=extras)


def to_staged_call(record: object) -> StagedCall:
    """A ``StagedCall`` from any object with the contract's field names (Gym's models included).

    The digest is taken as it is; call ``check_digest`` to verify it.

    Raises:
        InvalidRecordError: a field is missing or has the wrong type.
        TokenIdRangeError: a token id does not fit int32.
    """
    if isinstance(record, StagedCall):
        return record
    values: dict[str, Any] = {}
    for f in fields(StagedCall):
        if not hasattr(record, f.name):
            if f.name == "extras":
                continue
            raise InvalidRecordError(
                "not a staged call", expected=f"a field {f.name}", got=type(record).__name__
            )
        values[f.name] = getattr(record, f.name)
    values["token_ids_delta"] = to_token_ids(values["token_ids_delta"], name="token_ids_delta")
    values["token_mask_delta"] = to_mask(values["token_mask_delta"], name="token_mask_delta")
    values["generation_log_probs_delta"] = to_log_probs(
        values["generation_log_probs_delta"], name="generation_log_probs_delta"
    )
    return StagedCall(**values)
