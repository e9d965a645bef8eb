"""Ledger row, manifest and receipt: each rule of CONTRACT section 5."""

from __future__ import annotations

import pytest

from tests.schemas.acceptance import accepted
from tests.schemas.manifest_cases import CASES, CHILD_ROW, POISONED, ROOT_ROW, TRUSTED
from tokenplane.schemas import manifest
from tokenplane.schemas.manifest import (
    CallRecord,
    CaptureLedgerCommit,
    RolloutManifest,
    RolloutReceipt,
)

VERSIONS = {"schema_version": 2, "digest_version": 2, "extras_digest_version": 1}


@pytest.mark.parametrize("name", CASES)
def test_what_is_accepted(name: str) -> None:
    model = getattr(manifest, name)
    assert [(ok, data) for ok, data in CASES[name] if accepted(model, data) != ok] == []
    assert {ok for ok, _ in CASES[name]} == {True, False}


def test_required_fields_of_a_row() -> None:
    optional = {"parent_call_id"}
    for name in CHILD_ROW:
        assert CallRecord.model_fields[name].is_required() == (name not in optional)
        without = {key: value for key, value in CHILD_ROW.items() if key != name}
        assert not accepted(CallRecord, without)


def test_every_field_is_written_nulls_included() -> None:
    defaults = {
        "mode": "token_in",
        "admitted_at": None,
        "output_fingerprint": None,
        "continuation_fingerprint": None,
        "fingerprint_version": 0,
    }
    row = {**VERSIONS, **CHILD_ROW, **defaults}
    assert CallRecord.model_validate(CHILD_ROW).model_dump() == row
    assert RolloutManifest(rollout_id="r").model_dump() == {
        "schema_version": 2,
        "rollout_id": "r",
        "records": [],
        "failures": [],
    }
    receipt = RolloutReceipt.model_validate(POISONED).model_dump()
    assert receipt == {
        **VERSIONS,
        **POISONED,
        "reward": None,
        "terminal_model_call_id": None,
        "manifest": [],
        "terminal_selection": None,
        "terminal_attribution_reason": None,
    }


def test_json_comes_back_equal() -> None:
    receipt = RolloutReceipt.model_validate(TRUSTED)
    assert RolloutReceipt.model_validate_json(receipt.model_dump_json()) == receipt
    commit = CaptureLedgerCommit.model_validate(
        {
            "rollout_id": "r",
            "record": ROOT_ROW,
            "staging_chain": ["kp"],
            "request_items": [{"role": "user", "content": "größer"}],
            "response_items": [{"id": None}],
        }
    )
    assert CaptureLedgerCommit.model_validate_json(commit.model_dump_json()) == commit
    assert commit.staging_chain == ("kp",)
