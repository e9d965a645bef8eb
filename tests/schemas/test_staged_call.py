"""The delta rule and the array-backed record, against lists (CONTRACT section 4)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.schemas.rows import exact
from tests.schemas.strategies import EXTRAS, HEX, IDS, LOG_PROBS, TOKEN_IDS, VERSIONS
from tokenplane.schemas.digests import chain_hash, cumulative_hash, extras_digest
from tokenplane.schemas.errors import InvalidRecordError, TokenIdRangeError
from tokenplane.schemas.staged_call import StagedCall, build_staged_call, to_staged_call
from tokenplane.schemas.tokens import to_log_probs, to_token_ids
from tokenplane.schemas.wire import StagedCallRecord


@st.composite
def builds(draw: st.DrawFn) -> dict[str, Any]:
    prompt = draw(st.lists(TOKEN_IDS, min_size=1, max_size=8))
    generated = draw(st.lists(TOKEN_IDS, max_size=6))
    root = draw(st.booleans())
    prev_len = 0 if root else draw(st.integers(1, len(prompt)))
    if prev_len == len(prompt) and not generated:
        generated = [1]
    return {
        "rollout_id": draw(IDS),
        "model_call_id": draw(IDS),
        "parent_call_id": None if root else draw(IDS),
        "mode": "text" if root else "token_in",
        "prev_len": prev_len,
        "weight_version": draw(VERSIONS),
        "parent_chain_hash": None if root else draw(HEX),
        "prompt_token_ids": to_token_ids(prompt),
        "generated_token_ids": to_token_ids(generated),
        "generated_log_probs": to_log_probs([draw(LOG_PROBS) for _ in generated]),
        "extras": draw(EXTRAS),
    }


@given(builds())
def test_the_delta_rule(given_call: dict[str, Any]) -> None:
    call = build_staged_call(**given_call)
    prompt = given_call["prompt_token_ids"].tolist()
    generated = given_call["generated_token_ids"].tolist()
    carry = prompt[given_call["prev_len"] :]
    assert call.token_ids_delta.tolist() == carry + generated
    assert call.token_mask_delta.tolist() == [0] * len(carry) + [1] * len(generated)
    bits = np.zeros(len(carry), np.float32).tobytes() + given_call["generated_log_probs"].tobytes()
    assert call.generation_log_probs_delta.tobytes() == bits
    assert (call.delta_len, call.cum_len) == (len(carry + generated), len(prompt + generated))
    assert (call.carry_len, call.generation_len) == (len(carry), len(generated))
    assert call.chain_hash == chain_hash(given_call["parent_chain_hash"], carry + generated)
    assert call.cumulative_hash == cumulative_hash(prompt + generated)
    assert call.extras_digest == extras_digest(given_call["extras"])
    call.check_digest()
    for name in ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta"):
        array = getattr(call, name)
        assert array.flags.c_contiguous
        assert not array.flags.writeable


@given(builds())
def test_to_the_wire_and_back(given_call: dict[str, Any]) -> None:
    call = build_staged_call(**given_call)
    wire = call.to_wire()
    assert exact(to_staged_call(wire)) == exact(call)
    again = StagedCallRecord.model_validate_json(wire.model_dump_json())
    assert exact(to_staged_call(again)) == exact(call)
    snapshot = call.to_wire_snapshot()
    assert "extras" not in snapshot.model_dump()
    back = to_staged_call(snapshot)
    assert back.extras is None
    assert back.digest == call.digest
    back.check_digest()
    assert to_staged_call(call) is call


GOOD: dict[str, Any] = {
    "rollout_id": "r",
    "model_call_id": "c",
    "parent_call_id": "p",
    "mode": "token_in",
    "prev_len": 2,
    "weight_version": 7,
    "parent_chain_hash": "ab" * 32,
    "prompt_token_ids": to_token_ids([1, 2, 3]),
    "generated_token_ids": to_token_ids([4]),
    "generated_log_probs": to_log_probs([-0.5]),
    "extras": None,
}
EMPTY = {"generated_token_ids": to_token_ids([]), "generated_log_probs": to_log_probs([])}


def test_a_delta_without_carry_and_one_without_generation_are_legal() -> None:
    assert build_staged_call(**{**GOOD, "prev_len": 3}).carry_len == 0
    assert build_staged_call(**{**GOOD, **EMPTY}).generation_len == 0


@pytest.mark.parametrize(
    "change",
    [
        *({"prev_len": -1}, {"prev_len": 4}, {"prev_len": 0}, {"prev_len": 3, **EMPTY}),
        *({"generated_log_probs": to_log_probs([])}, {"generated_token_ids": to_token_ids([])}),
        *({"rollout_id": ""}, {"model_call_id": ""}, {"parent_call_id": ""}, {"mode": "text"}),
        *({"parent_call_id": None}, {"parent_chain_hash": "AB" * 32}, {"weight_version": -1}),
        *({"weight_version": 2**64}, {"weight_version": True}, {"extras": {"a": (1,)}}),
    ],
    ids=repr,
)
def test_what_cannot_be_built(change: dict[str, Any]) -> None:
    build_staged_call(**GOOD)
    with pytest.raises(InvalidRecordError):
        build_staged_call(**{**GOOD, **change})


def test_a_changed_column_no_longer_fits_its_digest() -> None:
    call = build_staged_call(**GOOD)
    for name, value in {
        "token_ids_delta": to_token_ids([3, 5]),
        "generation_log_probs_delta": to_log_probs([0.0, -0.25]),
        "weight_version": 8,
        "chain_hash": "cd" * 32,
    }.items():
        fields = {n: getattr(call, n) for n in StagedCall.__slots__}
        changed = StagedCall(**{**fields, name: value})
        with pytest.raises(InvalidRecordError, match="digest does not match"):
            changed.check_digest()
        with pytest.raises(ValidationError):
            changed.to_wire()


def test_any_object_with_the_field_names_is_a_record() -> None:
    call = build_staged_call(**{**GOOD, "extras": {"a": 1}})
    fields = call.to_wire().model_dump()
    assert exact(to_staged_call(SimpleNamespace(**fields))) == exact(call)
    for name in set(fields) - {"extras"}:
        rest = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(InvalidRecordError, match=name):
            to_staged_call(SimpleNamespace(**rest))
    with pytest.raises(TokenIdRangeError):
        to_staged_call(SimpleNamespace(**{**fields, "token_ids_delta": [3, 2**31]}))
    with pytest.raises(InvalidRecordError):
        to_staged_call(SimpleNamespace(**{**fields, "token_mask_delta": [0.0, 0.5]}))
