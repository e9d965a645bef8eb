"""Admission, record, stage result, coordinates: each rule of CONTRACT section 5."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tests.schemas.acceptance import accepted
from tests.schemas.wire_cases import CASES, FAILED, ROOT, STAGED, H, signed
from tokenplane.schemas import wire
from tokenplane.schemas.digests import SCHEMA_VERSION, extras_digest
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.wire import (
    CaptureAdmission,
    CommitCoords,
    StagedCallBaseSnapshot,
    StagedCallRecord,
    parse_model,
)


@pytest.mark.parametrize("name", CASES)
def test_what_is_accepted(name: str) -> None:
    model = getattr(wire, name)
    assert [(ok, data) for ok, data in CASES[name] if accepted(model, data) != ok] == []
    assert {ok for ok, _ in CASES[name]} == {True, False}


@pytest.mark.parametrize(
    ("model", "data", "required"),
    [
        (CaptureAdmission, ROOT, "rollout_id model_call_id mode"),
        (
            CommitCoords,
            STAGED,
            "rollout_id model_call_id prev_len delta_len cum_len weight_version",
        ),
        (
            StagedCallRecord,
            signed(),
            "rollout_id model_call_id mode prev_len delta_len cum_len weight_version digest "
            "token_ids_delta token_mask_delta generation_log_probs_delta chain_hash "
            "cumulative_hash",
        ),
    ],
    ids=["CaptureAdmission", "CommitCoords", "StagedCallRecord"],
)
def test_required_fields(model: type[BaseModel], data: dict[str, Any], required: str) -> None:
    assert accepted(model, data)
    fields = model.model_fields.items()
    assert {name for name, field in fields if field.is_required()} == set(required.split())
    for name in required.split():
        assert not accepted(model, {key: value for key, value in data.items() if key != name})


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_what_is_not_finite_is_refused_from_json(text: str) -> None:
    row = json.dumps(signed()).replace("-0.25", text)
    with pytest.raises(ValidationError):
        StagedCallBaseSnapshot.model_validate_json(row)


def test_every_field_is_written_nulls_included() -> None:
    assert CaptureAdmission.model_validate(ROOT).model_dump() == {
        **ROOT,
        "schema_version": SCHEMA_VERSION,
        "parent_call_id": None,
        "prev_len": 0,
        "required_prefix_token_ids": [],
        "staging_chain": [],
        "parent_chain_hash": None,
    }
    failed = CommitCoords.model_validate(FAILED).model_dump()
    versions = {"schema_version": 2, "digest_version": 2, "extras_digest_version": 1}
    assert failed == {**versions, **FAILED}
    assert json.loads(CommitCoords.model_validate(FAILED).model_dump_json()) == failed


@pytest.mark.parametrize("extras", [None, {}, {"a": [1, 1.0, "é", None]}], ids=repr)
def test_extras_must_fit_their_digest(extras: dict[str, Any] | None) -> None:
    row = signed(extras_digest=extras_digest(extras))
    assert accepted(StagedCallRecord, {**row, "extras": extras})
    for other in (None, {}, {"a": 1}):
        if other != extras:
            assert not accepted(StagedCallRecord, {**row, "extras": other})
    kinds: list[Any] = [[], "text", 5]
    for kind in kinds:
        assert not accepted(StagedCallRecord, {**row, "extras": kind})
    assert not accepted(StagedCallBaseSnapshot, {**row, "extras": extras})


def test_an_integer_log_probability_becomes_a_float() -> None:
    row = {**signed(generation_log_probs_delta=[0.0, -1.0])}
    record = StagedCallRecord.model_validate({**row, "generation_log_probs_delta": [0, -1]})
    assert [type(x) for x in record.generation_log_probs_delta] == [float, float]
    assert record.default_staging_key == "r/c"


def test_parse_model_names_the_rule_and_the_place() -> None:
    assert parse_model(CaptureAdmission, ROOT) == parse_model(CaptureAdmission, json.dumps(ROOT))
    assert parse_model(CaptureAdmission, json.dumps(ROOT).encode()).mode == "text"
    with pytest.raises(InvalidRecordError, match=r"CaptureAdmission: prev_len: ") as caught:
        parse_model(CaptureAdmission, {**ROOT, "prev_len": "2"}, key="uid-1")
    assert caught.value.key == "uid-1"
    assert isinstance(caught.value.__cause__, ValidationError)
    with pytest.raises(InvalidRecordError, match=r"digest does not match"):
        parse_model(StagedCallRecord, {**signed(), "digest": H})
    for junk in ("{", b"\xff", "[]", "null", None, 5, [1]):
        with pytest.raises(InvalidRecordError):
            parse_model(CaptureAdmission, junk)
