"""The digests of NeMo-Gym's staging contract (CONTRACT sections 2 and 3), over packed buffers.

Every digest is SHA-256 over a domain tag and length-delimited big-endian fields. Columns are packed
with numpy and hashed as buffers: no Python object per token.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.extras import encode_extra
from tokenplane.schemas.tokens import to_log_probs

SCHEMA_VERSION: Final = 2
DIGEST_VERSION: Final = 2
EXTRAS_DIGEST_VERSION: Final = 1

CALL_TAG = b"nemo-gym-staging-call-v2"
EXTRAS_TAG = b"nemo-gym-staging-extras-v1"
SEQUENCE_TAG = b"nemo-gym-staging-prefix-v2"
CHAIN_TAG = b"nemo-gym-staging-chain-v1"

HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
U64_MAX = 2**64 - 1

type Ids = Sequence[int] | NDArray[np.integer]
type Floats = Sequence[float] | NDArray[np.floating]


def u64(value: int) -> bytes:
    """Eight bytes, big-endian. A boolean, a non-integer or an out-of-range value is an error."""
    if type(value) is not int or not 0 <= value <= U64_MAX:
        raise InvalidRecordError("expected an unsigned 64-bit integer", got=repr(value))
    return struct.pack(">Q", value)


def text(value: str) -> bytes:
    """Length and UTF-8 bytes."""
    if not isinstance(value, str):
        raise InvalidRecordError("expected a string", got=type(value).__name__)
    try:
        data = value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidRecordError("string is not encodable as UTF-8", got=repr(value)) from exc
    return struct.pack(">Q", len(data)) + data


def hex32(digest: str) -> bytes:
    """The 32 raw bytes of a lowercase hex digest."""
    if not isinstance(digest, str) or HEX_DIGEST.fullmatch(digest) is None:
        raise InvalidRecordError("expected 64 lowercase hex characters", got=repr(digest))
    return bytes.fromhex(digest)


def pack_ids(ids: Ids) -> NDArray[np.generic]:
    """Token ids as 8-byte big-endian unsigned integers, one contiguous buffer.

    int32 arrays take a path without a wide integer cast. Lists may hold anything that the wire
    allows (0 to 2**64 - 1); booleans, floats and numpy scalars are errors.
    """
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRecordError(
                "token ids must be a 1-d integer array", got=f"{ids.dtype}{ids.shape}"
            )
        if ids.dtype.kind == "i" and ids.size and int(ids.min()) < 0:
            raise InvalidRecordError("token ids must not be negative", got=int(ids.min()))
        if ids.dtype == np.int32:
            packed = np.zeros((len(ids), 2), dtype=np.uint32)
            packed[:, 1] = ids.view(np.uint32).byteswap() if _LITTLE else ids.view(np.uint32)
            return packed
        return ids.astype(">u8")
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidRecordError("token ids must be a sequence", got=type(ids).__name__)
    if not set(map(type, ids)) <= {int}:
        bad = next(x for x in ids if type(x) is not int)
        raise InvalidRecordError("token ids must be true integers", got=repr(bad))
    try:
        return np.array(ids, dtype=np.uint64).astype(">u8")
    except OverflowError as exc:
        raise InvalidRecordError("token id outside unsigned 64 bits") from exc


_LITTLE = np.dtype(np.uint32).newbyteorder("<").isnative


def pack_floats(values: Floats) -> NDArray[np.generic]:
    """binary32 big-endian patterns, rounded to nearest-even; the sign of zero is kept.

    Raises:
        InvalidRecordError: an element is not floating-point typed, or not finite in binary32.
    """
    return to_log_probs(values, name="float column").astype(">f4")


def extras_digest(extras: dict[str, Any] | None) -> str:
    """SHA-256 hex over the typed encoding of ``extras``; ``None`` and ``{}`` differ.

    Raises:
        InvalidRecordError: neither an object nor None, or a value without an encoding.
    """
    if extras is not None and not isinstance(extras, dict):
        raise InvalidRecordError("extras must be an object or null", got=type(extras).__name__)
    return hashlib.sha256(
        EXTRAS_TAG + bytes([EXTRAS_DIGEST_VERSION]) + encode_extra(extras)
    ).hexdigest()


ABSENT_EXTRAS_DIGEST = extras_digest(None)


def cumulative_hash(*parts: Ids) -> str:
    """SHA-256 hex of the whole token sequence of a call, given as consecutive parts.

    The token count comes first, so the state cannot be carried from a parent to its child:
    8 bytes per token of the full sequence are hashed on every call (CONTRACT pitfall 11).
    """
    packed = [pack_ids(part) for part in parts]
    state = hashlib.sha256(SEQUENCE_TAG)
    state.update(u64(sum(map(len, packed))))
    for part in packed:
        state.update(part.data)
    return state.hexdigest()


def chain_hash(parent: str | None, token_ids_delta: Ids) -> str:
    """SHA-256 hex linking a call's token delta to its parent's ``chain_hash`` (None for a root)."""
    link = b"\x00" if parent is None else b"\x01" + hex32(parent)
    packed = pack_ids(token_ids_delta)
    state = hashlib.sha256(CHAIN_TAG + link + u64(len(packed)))
    state.update(packed.data)
    return state.hexdigest()


def staging_digest(
    *,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    weight_version: int,
    token_ids_delta: Ids,
    token_mask_delta: Floats,
    generation_log_probs_delta: Floats,
    extras_digest: str,
    chain_hash: str,
    cumulative_hash: str,
    schema_version: int = SCHEMA_VERSION,
    digest_version: int = DIGEST_VERSION,
    extras_digest_version: int = EXTRAS_DIGEST_VERSION,
) -> str:
    """The digest of one staged call (CONTRACT section 3).

    ``token_mask_delta`` may also be a uint8 array of 0 and 1.

    Raises:
        InvalidRecordError: the call is not well formed; the message names the first broken rule.
    """
    mask = token_mask_delta
    if isinstance(mask, np.ndarray) and mask.dtype == np.uint8:
        mask = mask.astype(np.float32)
    columns = (
        pack_ids(token_ids_delta),
        pack_floats(mask),
        pack_floats(generation_log_probs_delta),
    )
    check_well_formed(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        parent_call_id=parent_call_id,
        mode=mode,
        prev_len=prev_len,
        delta_len=delta_len,
        cum_len=cum_len,
        versions=(schema_version, digest_version, extras_digest_version),
        columns=(columns[0], np.asarray(mask), np.asarray(generation_log_probs_delta)),
    )
    parent = b"\x00" if parent_call_id is None else b"\x01" + text(parent_call_id)
    state = hashlib.sha256(
        CALL_TAG
        + bytes([schema_version, digest_version, extras_digest_version])
        + text(rollout_id)
        + text(model_call_id)
        + parent
        + text(mode)
        + u64(prev_len)
        + u64(delta_len)
        + u64(cum_len)
        + u64(weight_version)
    )
    for packed in columns:
        state.update(u64(8 + packed.nbytes) + u64(delta_len))
        state.update(packed.data)
    state.update(
        hex32(extras_digest) + b"\x01" + hex32(chain_hash) + b"\x01" + hex32(cumulative_hash)
    )
    return state.hexdigest()


def check_well_formed(
    *,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    versions: tuple[int, int, int],
    columns: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
) -> None:
    """The rules that a call must satisfy before a digest may be computed (CONTRACT section 3).

    ``columns`` hold ids, mask and log probabilities before any rounding: a mask of 1 + 2**-40 is
    not 1, although both are the same in binary32.

    Raises:
        InvalidRecordError: naming the first broken rule, what was expected and what came.
    """
    supported = (SCHEMA_VERSION, DIGEST_VERSION, EXTRAS_DIGEST_VERSION)
    if versions != supported or set(map(type, versions)) != {int}:
        raise InvalidRecordError("unsupported versions", expected=supported, got=versions)
    if not rollout_id or not model_call_id or parent_call_id == "":
        raise InvalidRecordError("rollout_id, model_call_id and parent_call_id must not be empty")
    for name, value in (("prev_len", prev_len), ("delta_len", delta_len), ("cum_len", cum_len)):
        if type(value) is not int:
            raise InvalidRecordError(f"{name} must be an integer", got=repr(value))
    if mode not in ("text", "token_in"):
        raise InvalidRecordError("mode", expected="text or token_in", got=repr(mode))
    if parent_call_id is None and (mode != "text" or prev_len != 0):
        raise InvalidRecordError(
            "a call without parent must be text with prev_len 0", got=(mode, prev_len)
        )
    if parent_call_id is not None and (mode != "token_in" or prev_len <= 0):
        raise InvalidRecordError(
            "a call with a parent must be token_in with prev_len > 0", got=(mode, prev_len)
        )
    ids, m, lp = columns
    if delta_len <= 0 or not len(ids) == len(m) == len(lp) == delta_len:
        raise InvalidRecordError(
            "the three columns must have delta_len > 0 elements",
            expected=delta_len,
            got=(len(ids), len(m), len(lp)),
        )
    if cum_len != prev_len + delta_len:
        raise InvalidRecordError("cum_len", expected=prev_len + delta_len, got=cum_len)
    sampled = m == 1
    if not np.logical_or(sampled, m == 0).all():
        raise InvalidRecordError("every mask must be exactly 0 or 1")
    if np.any(lp[~sampled] != 0):
        raise InvalidRecordError("a carried token's log probability must be 0")
