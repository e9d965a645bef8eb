"""Wire models and digests against the real NeMo-Gym: the same inputs, the same outcome."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.gym_contract import GymContract, ask_both
from tests.schemas import manifest_cases, wire_cases
from tests.schemas.strategies import (
    EXTRA_VALUES,
    EXTRAS,
    HEX,
    IDS,
    LOG_PROBS,
    VERSIONS,
    WIRE_TOKEN_IDS,
)
from tests.schemas.wire_cases import H
from tokenplane.schemas.digests import extras_digest, staging_digest
from tokenplane.schemas.routes import route_shape

CASES = {**wire_cases.CASES, **manifest_cases.CASES}
NASTY: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, 1, -1, 2, 7.0, 0.0, -0.0, 0.5, 2**63, 2**64 - 1, 2**64),
            *(10**30, 1e39, 5e-324, float("nan"), float("inf"), "", "1", "text", "token_in"),
            *("\ud800", "é", H, H.upper(), H + "\n", H[:-1], [], {}, [0], [0.0], [True], ["1"]),
            *([1, None], [[1]], {"a": 1}, [{}], [-1], [2**64], [-0.0], [1, 2]),
        ]
    ),
    VERSIONS,
    IDS,
    HEX,
)


def test_gym_s_own_golden_vectors(gym: GymContract) -> None:
    vectors = gym.ask("golden_vectors")["value"]
    assert extras_digest(vectors["extras"]) == vectors["extras_digest"]
    assert staging_digest(**vectors["staged_call"]) == vectors["staged_call_digest"]


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("as_json", [False, True], ids=["python", "json"])
def test_every_rule_of_every_model(gym: GymContract, model: str, as_json: bool) -> None:
    for accepted, data in CASES[model]:
        both = ask_both(gym, "parse", model=model, data=data, as_json=as_json).agree()
        assert both.accepted == accepted, data


@given(st.data(), st.sampled_from(sorted(CASES)), st.booleans())
def test_any_change_of_a_good_model(
    gym: GymContract, data: st.DataObject, model: str, as_json: bool
) -> None:
    good = [case for accepted, case in CASES[model] if accepted]
    changed = dict(data.draw(st.sampled_from(good)))
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from([*sorted(changed), "schema_version", "extras"]))
        if data.draw(st.booleans()):
            changed[name] = data.draw(NASTY)
        else:
            changed.pop(name, None)
    ask_both(gym, "parse", model=model, data=changed, as_json=as_json).agree()


@given(EXTRAS)
def test_extras_digests(gym: GymContract, extras: Any) -> None:
    assert ask_both(gym, "extras_digest", extras=extras).agree().accepted


ODD = st.sampled_from(
    [2**63, -(2**63) - 1, float("nan"), float("inf"), "\ud800", (1,), (), b"x", {"\ud800": 1}]
)


@given(EXTRA_VALUES, ODD, st.integers(0, 3))
def test_extras_that_have_no_digest(gym: GymContract, value: Any, odd: Any, how: int) -> None:
    extras = [{"a": odd, "b": value}, {"a": [value, odd]}, odd, {"a": {"b": {"c": odd}}}][how]
    assert not ask_both(gym, "extras_digest", extras=extras).agree().accepted


@pytest.mark.parametrize("extras", [[], [1], "x", "", 5, True, False, 1.5, ()], ids=repr)
def test_extras_are_an_object_or_null(gym: GymContract, extras: Any) -> None:
    assert not ask_both(gym, "extras_digest", extras=extras).agree().accepted


@given(st.lists(WIRE_TOKEN_IDS, max_size=12), st.none() | HEX)
def test_token_hashes(gym: GymContract, ids: list[int], parent: str | None) -> None:
    assert ask_both(gym, "token_hashes", ids=ids, parent=parent).agree().accepted


@given(st.lists(NASTY, max_size=3), st.none() | NASTY)
def test_token_hashes_of_anything(gym: GymContract, ids: list[Any], parent: Any) -> None:
    ask_both(gym, "token_hashes", ids=ids, parent=parent).agree()


@st.composite
def signed_fields(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(st.lists(WIRE_TOKEN_IDS, min_size=1, max_size=6))
    size = len(tokens)
    mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))
    root = draw(st.booleans())
    prev_len = 0 if root else draw(st.integers(1, 2**62))
    return {
        "rollout_id": draw(IDS),
        "model_call_id": draw(IDS),
        "parent_call_id": None if root else draw(IDS),
        "mode": "text" if root else "token_in",
        "prev_len": prev_len,
        "delta_len": size,
        "cum_len": prev_len + size,
        "weight_version": draw(VERSIONS),
        "token_ids_delta": tokens,
        "token_mask_delta": mask,
        "generation_log_probs_delta": [draw(LOG_PROBS) if m else -0.0 for m in mask],
        "extras_digest": draw(HEX),
        "chain_hash": draw(HEX),
        "cumulative_hash": draw(HEX),
    }


@given(signed_fields())
def test_staging_digests(gym: GymContract, fields: dict[str, Any]) -> None:
    assert ask_both(gym, "staging_digest", fields=fields).agree().accepted


@given(signed_fields(), st.data())
def test_staging_digests_of_anything(
    gym: GymContract, fields: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([*sorted(fields), "schema_version", "digest_version"]))
    value = fields.get(name)
    if isinstance(value, list) and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        fields[name] = [*value[:at], data.draw(NASTY), *value[at + 1 :]]
    else:
        fields[name] = data.draw(NASTY)
    ask_both(gym, "staging_digest", fields=fields).agree()


FLOAT32_MAX = float(np.finfo(np.float32).max)
EDGE = (FLOAT32_MAX + 2.0**128) / 2


@pytest.mark.parametrize(
    ("value", "accepted"),
    [
        *((FLOAT32_MAX, True), (float(np.nextafter(EDGE, 0)), True), (-1e-46, True)),
        *((EDGE, False), (-EDGE, False), (1e39, False), (-0.0, True), (0, False), (-1, False)),
    ],
)
def test_the_edge_of_binary32(gym: GymContract, value: float, accepted: bool) -> None:
    fields = {**wire_cases.signed(), "generation_log_probs_delta": [0.0, value]}
    del fields["digest"]
    assert ask_both(gym, "staging_digest", fields=fields).agree().accepted == accepted


ROUTES = st.tuples(*[st.integers(1, 3)] * 3).flatmap(
    lambda shape: st.lists(
        st.lists(
            st.lists(st.integers(-1, 127), min_size=shape[2], max_size=shape[2]),
            min_size=shape[1],
            max_size=shape[1],
        ),
        min_size=shape[0],
        max_size=shape[0],
    )
)
DTYPES = st.sampled_from(["int8", "int16", "int32"])


@given(ROUTES, DTYPES)
def test_routes(gym: GymContract, values: Any, dtype: str) -> None:
    both = ask_both(gym, "encode_routes", values=values, dtype=dtype).agree()
    assert both.accepted
    envelope = both.ours["value"]
    assert ask_both(gym, "decode_routes", payload=envelope).agree().ours["value"] == values
    assert ask_both(gym, "decode_routes", payload=values).agree().ours["value"] == values
    assert route_shape(envelope)[0] == dtype


@given(ROUTES, st.data())
def test_routes_of_anything(gym: GymContract, values: Any, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(values) - 1))
    odd: Any = data.draw(
        st.sampled_from([[], None, 1, [1], [[]], [[1, 2, 3, 4]], [[1.0]], [[True]], [[2**40]], "x"])
    )
    where = values[token]
    if data.draw(st.booleans()):
        values[token] = odd
    else:
        where[data.draw(st.integers(0, len(where) - 1))] = odd
    ask_both(gym, "encode_routes", values=values, dtype=data.draw(DTYPES)).agree()
    ask_both(gym, "decode_routes", payload=values).agree()


PIECES = st.sampled_from(
    [
        *("nrlre1", "nrlre2", "int8", "int16", "int32", "int64", "1x1x1", "2x1x1", "0x1x1", "1x1"),
        *("-1x1x1", "1x1x1x1", "axbxc", "", "AAA=", "AA==", "AAAA", "AAAAAAA=", "A-_=", "AA A="),
        *("é", "AAA=\n", "AAA", "*AAA="),
    ]
)


@given(st.lists(PIECES, min_size=3, max_size=5) | st.permutations(["nrlre1", "int16", "1x1x1"]))
def test_envelopes_of_anything(gym: GymContract, pieces: list[str]) -> None:
    ask_both(gym, "decode_routes", payload=":".join(pieces)).agree()


@given(st.data(), DTYPES)
def test_envelopes_with_a_right_header(gym: GymContract, data: st.DataObject, dtype: str) -> None:
    body = data.draw(PIECES)
    ask_both(gym, "decode_routes", payload=f"nrlre1:{dtype}:1x1x1:{body}").agree()


@given(st.lists(st.one_of(st.integers(-1, 8), NASTY), min_size=3, max_size=3))
def test_route_spans(gym: GymContract, lengths: list[Any]) -> None:
    ask_both(gym, "route_span", lengths=lengths).agree()


SHAPES_GYM_READS_MORE_LOOSELY = [" 1x1x1", "1x1x1 ", "+1x1x1", "1_0x1x1", "1x1x1\n", "١x1x1"]


@pytest.mark.parametrize("shape", SHAPES_GYM_READS_MORE_LOOSELY, ids=ascii)
def test_a_shape_is_digits_here_and_whatever_int_reads_there(gym: GymContract, shape: str) -> None:
    """A deliberate difference: no encoder writes such a header, so we do not read one."""
    count = 10 if "_" in shape else 1
    payload = f"nrlre1:int8:{shape}:{'A' * 14 + '==' if count == 10 else 'AA=='}"
    both = ask_both(gym, "decode_routes", payload=payload)
    assert both.gym == {"value": [[[0]]] * count}
    assert both.ours["rejected"] == "InvalidRecordError"


def test_the_questions_reach_gym_bit_for_bit(gym: GymContract) -> None:
    """Guards the tests above: the transport itself loses nothing."""
    fields = {**wire_cases.signed(generation_log_probs_delta=[-0.0, -1e-45])}
    answer = gym.ask("parse", model="StagedCallBaseSnapshot", data=fields, as_json=False)
    assert json.dumps(answer["value"]["generation_log_probs_delta"]) == "[-0.0, -1e-45]"
    assert gym.ask("extras_digest", extras={"a": (1,)})["rejected"] == "TypeError"
    assert gym.ask("extras_digest", extras={"a": b"x"})["rejected"] == "TypeError"
