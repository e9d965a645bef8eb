"""Every value of tests/data/contract_vectors.json, as NeMo-Gym 0.7.0 computed it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenplane.capture.collect.linearize import verify_and_linearize
from tokenplane.schemas.digests import chain_hash, cumulative_hash, extras_digest
from tokenplane.schemas.errors import TokenIdRangeError
from tokenplane.schemas.extras import decode_extra, encode_extra
from tokenplane.schemas.fingerprints import assistant_fingerprint, conversation_digest
from tokenplane.schemas.manifest import RolloutReceipt
from tokenplane.schemas.routes import decode_routes, encode_routes, route_shape
from tokenplane.schemas.staged_call import StagedCall, build_staged_call
from tokenplane.schemas.tokens import INT32_MAX, to_log_probs, to_token_ids
from tokenplane.schemas.wire import CaptureAdmission, CommitCoords, StagedCallRecord

Vectors = dict[str, Any]


def built(call: Vectors) -> StagedCall:
    admission = CaptureAdmission.model_validate(call["admission"])
    return build_staged_call(
        rollout_id=admission.rollout_id,
        model_call_id=admission.model_call_id,
        parent_call_id=admission.parent_call_id,
        mode=admission.mode,
        prev_len=admission.prev_len,
        weight_version=call["weight_version"],
        parent_chain_hash=admission.parent_chain_hash,
        prompt_token_ids=to_token_ids(call["prompt_token_ids"]),
        generated_token_ids=to_token_ids(call["generated_token_ids"]),
        generated_log_probs=to_log_probs(call["generated_logprobs"]),
        extras=call["extras"],
    )


def test_no_section_of_the_file_is_left_out(vectors: Vectors) -> None:
    sizes = {name: len(part) for name, part in vectors.items() if isinstance(part, list)}
    assert sizes == {
        "extras": 12,
        "tokens": 5,
        "chain": 15,
        "calls": 5,
        "routes": 3,
        "fingerprints": 6,
    }
    assert set(vectors) - set(sizes) == {"note", "receipt", "linearized"}


def test_extras(vectors: Vectors) -> None:
    for case in vectors["extras"]:
        assert extras_digest(case["extras"]) == case["digest"], case
        assert decode_extra(encode_extra(case["extras"])) == case["extras"]


def test_cumulative_hashes_of_lists_and_arrays(vectors: Vectors) -> None:
    for case in vectors["tokens"]:
        assert cumulative_hash(case["ids"]) == case["cumulative_hash"]
        if max(case["ids"], default=0) <= INT32_MAX:
            assert cumulative_hash(to_token_ids(case["ids"])) == case["cumulative_hash"]


def test_chain_hashes_of_lists_and_arrays(vectors: Vectors) -> None:
    for case in vectors["chain"]:
        assert chain_hash(case["parent"], case["ids"]) == case["chain_hash"]
        if max(case["ids"], default=0) <= INT32_MAX:
            assert chain_hash(case["parent"], to_token_ids(case["ids"])) == case["chain_hash"]


def fits_int32(call: Vectors) -> bool:
    return bool(max([*call["prompt_token_ids"], *call["generated_token_ids"]]) <= INT32_MAX)


def test_wire_models_of_whole_calls(vectors: Vectors) -> None:
    for case in vectors["calls"]:
        record = StagedCallRecord.model_validate({**case["row"], "extras": case["extras"]})
        assert record.model_dump() == {**case["row"], "extras": case["extras"]}
        assert CommitCoords.model_validate(case["coords"]).model_dump() == case["coords"]
        assert (
            cumulative_hash(case["prompt_token_ids"], case["generated_token_ids"])
            == (case["row"]["cumulative_hash"])
        )


def test_whole_calls_built_from_arrays(vectors: Vectors) -> None:
    cases = [case for case in vectors["calls"] if fits_int32(case)]
    assert len(cases) == 4
    for case in cases:
        call = built(case)
        call.check_digest()
        wire = call.to_wire().model_dump()
        log_probs = np.float32(wire.pop("generation_log_probs_delta"))
        expected = {**case["row"], "extras": case["extras"]}
        assert (
            log_probs.tobytes() == np.float32(expected.pop("generation_log_probs_delta")).tobytes()
        )
        assert wire == expected


def test_an_id_beyond_int32_is_fine_on_the_wire_and_refused_as_an_array(vectors: Vectors) -> None:
    (case,) = [case for case in vectors["calls"] if not fits_int32(case)]
    assert case["weight_version"] == 2**64 - 1
    with pytest.raises(TokenIdRangeError):
        built(case)


def test_routes(vectors: Vectors) -> None:
    for case in vectors["routes"]:
        assert encode_routes(case["values"], case["dtype"]) == case["envelope"]
        assert decode_routes(case["envelope"]).tolist() == case["values"]
        assert route_shape(case["envelope"]) == (case["dtype"], np.shape(case["values"]))


def test_fingerprints(vectors: Vectors) -> None:
    for case in vectors["fingerprints"]:
        assert assistant_fingerprint(case["items"]) == case["assistant"]
        assert conversation_digest(case["items"]) == case["conversation"]


def test_receipt_and_its_linearized_row(vectors: Vectors) -> None:
    receipt = RolloutReceipt.model_validate(vectors["receipt"])
    rows = {
        case["row"]["model_call_id"]: built(case) for case in vectors["calls"] if fits_int32(case)
    }
    snapshots = [rows[record.model_call_id] for record in receipt.manifest]
    result = verify_and_linearize(receipt, snapshots).to_wire()
    expected = vectors["linearized"]
    assert (
        np.float32(result.pop("logprobs")).tobytes() == np.float32(expected["logprobs"]).tobytes()
    )
    assert result == {name: value for name, value in expected.items() if name != "logprobs"}
