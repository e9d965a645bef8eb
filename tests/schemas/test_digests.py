"""Digests: a second, naive implementation of CONTRACT sections 2 and 3, and every refusal."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schemas.strategies import FLOAT32S, HEX, IDS, TOKEN_IDS, VERSIONS, WIRE_TOKEN_IDS
from tokenplane.schemas.digests import (
    ABSENT_EXTRAS_DIGEST,
    chain_hash,
    cumulative_hash,
    staging_digest,
)
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.tokens import to_log_probs, to_mask, to_token_ids


def sha(tag: bytes, payload: bytes) -> str:
    return hashlib.sha256(tag + payload).hexdigest()


def u64(value: int) -> bytes:
    return value.to_bytes(8, "big")


def naive_tokens(ids: list[int]) -> bytes:
    return u64(len(ids)) + b"".join(map(u64, ids))


def naive_floats(values: list[float]) -> bytes:
    return u64(len(values)) + b"".join(struct.pack(">f", value) for value in values)


def naive_digest(call: dict[str, Any]) -> str:
    def text(value: str) -> bytes:
        return u64(len(value.encode())) + value.encode()

    parent = call["parent_call_id"]
    columns = (
        naive_tokens(call["token_ids_delta"]),
        naive_floats(call["token_mask_delta"]),
        naive_floats(call["generation_log_probs_delta"]),
    )
    payload = (
        b"\x02\x02\x01"
        + text(call["rollout_id"])
        + text(call["model_call_id"])
        + (b"\x00" if parent is None else b"\x01" + text(parent))
        + text(call["mode"])
        + b"".join(u64(call[n]) for n in ("prev_len", "delta_len", "cum_len", "weight_version"))
        + b"".join(u64(len(column)) + column for column in columns)
        + bytes.fromhex(call["extras_digest"])
        + b"\x01"
        + bytes.fromhex(call["chain_hash"])
        + b"\x01"
        + bytes.fromhex(call["cumulative_hash"])
    )
    return sha(b"nemo-gym-staging-call-v2", payload)


@st.composite
def calls(draw: st.DrawFn, ids: st.SearchStrategy[int] = WIRE_TOKEN_IDS) -> dict[str, Any]:
    """Arguments of ``staging_digest`` for a well-formed call."""
    tokens = draw(st.lists(ids, min_size=1, max_size=12))
    mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(tokens), max_size=len(tokens)))
    root = draw(st.booleans())
    prev_len = 0 if root else draw(st.integers(1, 2**63))
    return {
        "rollout_id": draw(IDS),
        "model_call_id": draw(IDS),
        "parent_call_id": None if root else draw(IDS),
        "mode": "text" if root else "token_in",
        "prev_len": prev_len,
        "delta_len": len(tokens),
        "cum_len": prev_len + len(tokens),
        "weight_version": draw(VERSIONS),
        "token_ids_delta": tokens,
        "token_mask_delta": mask,
        "generation_log_probs_delta": [
            draw(FLOAT32S) if m else draw(st.sampled_from([0.0, -0.0])) for m in mask
        ],
        "extras_digest": draw(HEX),
        "chain_hash": draw(HEX),
        "cumulative_hash": draw(HEX),
    }


@given(st.lists(WIRE_TOKEN_IDS, max_size=20), st.none() | HEX)
def test_token_hashes_of_lists(ids: list[int], parent: str | None) -> None:
    assert cumulative_hash(ids) == sha(b"nemo-gym-staging-prefix-v2", naive_tokens(ids))
    link = b"\x00" if parent is None else b"\x01" + bytes.fromhex(parent)
    assert chain_hash(parent, ids) == sha(b"nemo-gym-staging-chain-v1", link + naive_tokens(ids))


@given(
    st.lists(TOKEN_IDS, max_size=20),
    st.sampled_from(["<i4", ">i4", "<i8", ">i8", "<u4", ">u8"]),
    st.integers(0, 20),
)
def test_lists_arrays_and_parts_hash_alike(ids: list[int], kind: str, cut: int) -> None:
    array = np.array(ids, kind)
    strided = np.repeat(array, 2)[::2]
    expected = cumulative_hash(ids)
    assert cumulative_hash(array) == expected
    assert cumulative_hash(strided) == expected
    assert cumulative_hash(array[:cut], ids[cut:]) == expected
    assert cumulative_hash(to_token_ids(ids)) == expected
    assert chain_hash(None, array) == chain_hash(None, ids) == chain_hash(None, strided)


@given(calls())
def test_the_digest_of_lists(call: dict[str, Any]) -> None:
    assert staging_digest(**call) == naive_digest(call)


@given(calls(TOKEN_IDS))
def test_the_digest_of_arrays(call: dict[str, Any]) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "token_ids_delta": to_token_ids(call["token_ids_delta"]),
        "token_mask_delta": to_mask(call["token_mask_delta"]),
        "generation_log_probs_delta": to_log_probs(call["generation_log_probs_delta"]),
    }
    assert staging_digest(**{**call, **arrays}) == naive_digest(call)
    wide = {
        "token_ids_delta": arrays["token_ids_delta"].astype(">i8"),
        "token_mask_delta": arrays["token_mask_delta"].astype(np.float64),
        "generation_log_probs_delta": arrays["generation_log_probs_delta"].astype(np.float64),
    }
    assert staging_digest(**{**call, **wide}) == naive_digest(call)


@given(calls(TOKEN_IDS), st.data())
def test_any_change_changes_the_digest(call: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(set(call) - {"parent_call_id", "mode"})))
    changed = dict(call)
    value = changed[name]
    if isinstance(value, list):
        at = data.draw(st.integers(0, len(value) - 1))
        other = {"token_ids_delta": TOKEN_IDS, "token_mask_delta": st.sampled_from([0.0, 1.0])}
        changed[name] = [*value[:at], data.draw(other.get(name, FLOAT32S)), *value[at + 1 :]]
    elif isinstance(value, int):
        changed[name] = value + 1
    else:
        changed[name] = data.draw(HEX if name.endswith(("digest", "hash")) else IDS)
    try:
        digest = staging_digest(**changed)
    except InvalidRecordError:
        return
    same = repr(changed) == repr(call)
    assert (digest == staging_digest(**call)) == same


GOOD: dict[str, Any] = {
    "rollout_id": "r",
    "model_call_id": "c",
    "parent_call_id": "p",
    "mode": "token_in",
    "prev_len": 3,
    "delta_len": 2,
    "cum_len": 5,
    "weight_version": 7,
    "token_ids_delta": [10, 11],
    "token_mask_delta": [0.0, 1.0],
    "generation_log_probs_delta": [0.0, -0.25],
    "extras_digest": ABSENT_EXTRAS_DIGEST,
    "chain_hash": "1" * 64,
    "cumulative_hash": "2" * 64,
}
REFUSED: list[dict[str, Any]] = [
    *({"schema_version": v} for v in (1, 3, 2.0)),
    *({"digest_version": v} for v in (1, 3, 2.0)),
    *({"extras_digest_version": v} for v in (0, 2, True, 1.0)),
    *({"rollout_id": v} for v in ("", None, 5, "\ud800")),
    *({"model_call_id": v} for v in ("", None, 5)),
    *({"parent_call_id": v} for v in ("", None, 5)),
    *({"mode": v} for v in ("text", "other", None)),
    *({"prev_len": v} for v in (0, -1, 3.0, True, 4)),
    *({"delta_len": v} for v in (0, 1, 3, 2.0)),
    *({"cum_len": v} for v in (4, 6, 5.0)),
    *({"weight_version": v} for v in (-1, 2**64, 7.0, True, "7", None)),
    *({"token_ids_delta": v} for v in ([], [10], [10, -1], [10, 2**64], [10, 1.0], [10, True])),
    *({"token_ids_delta": v} for v in (np.array([10.0, 11.0]), np.array([[1], [2]]))),
    {"token_ids_delta": np.array([10, -1])},
    *({name: v} for name in ("prev_len", "delta_len", "cum_len") for v in (None, "2", [2])),
    *(
        {name: v}
        for name in ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")
        for v in (None, 5, "ab", {0: 0, 1: 1}, {0, 1}, [[0], 1], [[0.0, 1.0], [0.0]])
    ),
    {"token_mask_delta": [0.0, 1 + 2**-40]},
    {"generation_log_probs_delta": [1e-46, -0.25]},
    *({"token_mask_delta": v} for v in ([0.0], [0, 1], [0.0, 0.5], [0.0, 2.0], [False, True])),
    {"token_mask_delta": [0.0, float("nan")]},
    *({"generation_log_probs_delta": v} for v in ([0.0], [0, -1], [0.0, -1], [-0.5, -0.25])),
    *({"generation_log_probs_delta": [0.0, v]} for v in (float("nan"), float("inf"), 1e39)),
    *({"extras_digest": v} for v in (None, "a" * 63, "A" * 64, "g" * 64, b"a" * 64, "a" * 65)),
    *({"chain_hash": v} for v in (None, "a" * 63, "A" * 64, "a" * 64 + "\n")),
    *({"cumulative_hash": v} for v in (None, "a" * 63, "A" * 64)),
    {"delta_len": 0, "cum_len": 3, "token_ids_delta": [], "token_mask_delta": []},
]


@pytest.mark.parametrize("change", REFUSED, ids=repr)
def test_a_call_that_is_not_well_formed_has_no_digest(change: dict[str, Any]) -> None:
    assert staging_digest(**GOOD) == naive_digest(GOOD)
    with pytest.raises(InvalidRecordError):
        staging_digest(**{**GOOD, **change})


@pytest.mark.parametrize("parent", ["", "a" * 63, "A" * 64, "a" * 64 + "\n", b"a" * 64], ids=repr)
def test_a_chain_needs_a_well_formed_parent(parent: Any) -> None:
    with pytest.raises(InvalidRecordError):
        chain_hash(parent, [1])


@pytest.mark.parametrize(
    "ids",
    [[True], [1.0], [-1], [2**64], ["1"], [np.int64(1)], None, 5, "12", b"12", {1: 2}, {1}],
    ids=repr,
)
def test_token_hashes_take_true_unsigned_integers_only(ids: Any) -> None:
    with pytest.raises(InvalidRecordError):
        cumulative_hash(ids)
    with pytest.raises(InvalidRecordError):
        chain_hash(None, ids)
