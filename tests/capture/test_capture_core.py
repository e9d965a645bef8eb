"""The capture core's lifecycle: what raises, what fails the capture, and the order of things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenplane.capture.core import RolloutTokenCapture, install_capture
from tokenplane.schemas.errors import CaptureError, StreamingUnsupportedError
from tokenplane.schemas.staged_call import StagedCall
from tokenplane.schemas.wire import CaptureAdmission, StageResult, parse_model

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "contract_vectors.json").read_text())


class ListSink:
    """Keeps what it is given; answers as told."""

    def __init__(self, answer: Any = None) -> None:
        self.records: list[StagedCall] = []
        self.attachments: list[Any] = []
        self.answer = answer

    def stage(self, record: StagedCall, *, attachments: Any = None) -> Any:
        self.records.append(record)
        self.attachments.append(attachments)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        return StageResult(ok=True, staging_key=f"{record.rollout_id}/{record.model_call_id}")


class PlainSink:
    """A sink without the attachments keyword."""

    def stage(self, record: StagedCall) -> StageResult:
        return StageResult(ok=True, staging_key=f"{record.rollout_id}/{record.model_call_id}")


def capture(sink: Any = None, version: Any = 7) -> RolloutTokenCapture:
    return RolloutTokenCapture(sink=sink or ListSink(), weight_version_fn=lambda: version)


ROOT = CaptureAdmission(rollout_id="r", model_call_id="c", mode="text")
CHILD = CaptureAdmission(
    rollout_id="r",
    model_call_id="d",
    mode="token_in",
    parent_call_id="c",
    prev_len=3,
    required_prefix_token_ids=[1, 2, 3],
    parent_chain_hash="0" * 64,
)
CHAINED = CHILD.model_copy(update={"required_prefix_token_ids": [], "staging_chain": ["r/c/1"]})


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("case", VECTORS["calls"], ids=lambda c: c["row"]["model_call_id"])
def test_vectors_give_the_contracts_rows_and_coordinates(case: Any, as_array: bool) -> None:
    sink = ListSink()
    core = capture(sink)
    admission = parse_model(CaptureAdmission, case["admission"])
    prefix = case["prefix_token_ids"]
    ids = (case["prompt_token_ids"], case["generated_token_ids"])
    big = max(max(x, default=0) for x in (*ids, prefix or [])) >= 2**31
    if big:
        # The wire allows ids beyond int32; the columns do not, and say so with a code.
        call = core.begin_call(admission, weight_version=case["weight_version"])
        coords = core.complete_call(
            call,
            prompt_token_ids=ids[0],
            generated_token_ids=ids[1],
            generated_logprobs=case["generated_logprobs"],
            extras=case["extras"],
        )
        assert coords.disposition == "capture_failed"
        assert core.failures.counts() == {"token_id_out_of_range": 1}
        return
    call = core.begin_call(
        admission,
        prefix_token_ids=np.array(prefix, np.int32) if as_array and prefix else prefix,
        weight_version=case["weight_version"],
    )
    prompt, generated = (np.array(x, np.int32) for x in ids) if as_array else ids
    log_probs = case["generated_logprobs"]
    coords = core.complete_call(
        call,
        prompt_token_ids=prompt,
        generated_token_ids=generated,
        generated_logprobs=np.array(log_probs, np.float64) if as_array else log_probs,
        extras=case["extras"],
    )
    assert coords.model_dump() == case["coords"]
    row = sink.records[0].to_wire().model_dump()
    for name, value in case["row"].items():
        if name == "generation_log_probs_delta":
            value = np.array(value, np.float32).astype(np.float64).tolist()
        assert row[name] == value, name


def test_begin_call_refuses_what_is_no_admission_or_a_stream() -> None:
    with pytest.raises(TypeError):
        capture().begin_call({"rollout_id": "r"})  # type: ignore[arg-type]
    with pytest.raises(StreamingUnsupportedError):
        capture().begin_call(ROOT, stream=True)


@pytest.mark.parametrize(
    ("admission", "prefix"),
    [
        (ROOT, [1]),
        (ROOT, (1,)),
        (CHILD, [1, 2]),
        (CHILD, [1, 2, 4]),
        (CHILD, (1, 2, 3)),
        (CHILD, [1, 2, True]),
        (CHILD, [1, 2, -3]),
        (CHILD, [1, 2, 3.0]),
        (CHILD, []),
        (CHAINED, None),
        (CHAINED, [1, 2]),
        (CHAINED, "abc"),
    ],
)
def test_begin_call_refuses_a_prefix_that_does_not_fit(admission: Any, prefix: Any) -> None:
    with pytest.raises(CaptureError):
        capture().begin_call(admission, prefix_token_ids=prefix)


@pytest.mark.parametrize("version", [True, -1, 1.0, "3", None])
def test_begin_call_refuses_a_version_that_is_no_count(version: Any) -> None:
    with pytest.raises(CaptureError):
        capture(version=version).begin_call(ROOT)


def test_the_argument_beats_the_provider_and_provider_errors_pass() -> None:
    assert capture(version=7).begin_call(ROOT, weight_version=9).weight_version == 9

    def broken() -> int:
        raise RuntimeError("no trainer")

    core = RolloutTokenCapture(sink=ListSink(), weight_version_fn=broken)
    with pytest.raises(RuntimeError, match="no trainer"):
        core.begin_call(ROOT)


def test_a_call_completes_once() -> None:
    core = capture()
    call = core.begin_call(ROOT)
    core.fail_call(call, reason="gone")
    with pytest.raises(CaptureError):
        core.fail_call(call, reason="again")
    with pytest.raises(CaptureError):
        core.complete_call(
            call, prompt_token_ids=[1], generated_token_ids=[2], generated_logprobs=[-1.0]
        )
    assert core.failures.counts() == {"call_failed": 1}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"generated_logprobs": [-1.0, -2.0]}, "invalid_record"),
        ({"generated_logprobs": [-1]}, "invalid_record"),
        ({"generated_logprobs": [float("nan")]}, "invalid_record"),
        ({"generated_logprobs": [float("-inf")]}, "invalid_record"),
        ({"generated_logprobs": [-1e39]}, "invalid_record"),
        ({"prompt_token_ids": [1, 2.0]}, "invalid_record"),
        ({"prompt_token_ids": [1, -2]}, "token_id_out_of_range"),
        ({"prompt_token_ids": "ab"}, "invalid_record"),
        ({"extras": {"x": (1,)}}, "invalid_record"),
        ({"extras": {"x": float("nan")}}, "invalid_record"),
        (
            {"prompt_token_ids": [], "generated_token_ids": [], "generated_logprobs": []},
            "invalid_record",
        ),
    ],
)
def test_what_cannot_be_built_fails_the_capture_with_a_code(fields: Any, code: str) -> None:
    sink = ListSink()
    core = capture(sink)
    good = {"prompt_token_ids": [1], "generated_token_ids": [2], "generated_logprobs": [-1.0]}
    coords = core.complete_call(core.begin_call(ROOT), **{**good, **fields})
    assert (coords.disposition, coords.digest, coords.delta_len) == ("capture_failed", None, 0)
    assert coords.weight_version == 7
    assert core.failures.counts() == {code: 1}
    assert sink.records == []


def test_a_prompt_that_leaves_its_prefix_says_where() -> None:
    core = capture()
    call = core.begin_call(CHILD)
    coords = core.complete_call(
        call,
        prompt_token_ids=[1, 9, 3, 4],
        generated_token_ids=[5],
        generated_logprobs=[-0.5],
    )
    assert (coords.disposition, coords.cum_len) == ("capture_failed", 3)
    [failure] = core.failures.recent("r")
    assert failure.code == "prefix_not_in_prompt"
    assert "token 1" in failure.message


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("disk"),
        StageResult(ok=False, error="full"),
        "stored",
        {"ok": True, "staging_key": "k"},
    ],
)
def test_a_sink_that_fails_fails_the_capture_only(answer: Any) -> None:
    core = capture(ListSink(answer))
    coords = core.complete_call(
        core.begin_call(ROOT),
        prompt_token_ids=[1],
        generated_token_ids=[2],
        generated_logprobs=[-1.0],
    )
    assert coords.disposition == "capture_failed"
    assert core.failures.counts() == {"stage_failed": 1}


def test_attachments_reach_only_a_sink_that_takes_them() -> None:
    fields: Any = {
        "prompt_token_ids": [1],
        "generated_token_ids": [2],
        "generated_logprobs": [-1.0],
    }
    sink = ListSink()
    core = capture(sink)
    core.complete_call(core.begin_call(ROOT), **fields)
    core.complete_call(core.begin_call(ROOT), attachments={"a": b"x"}, **fields)
    assert sink.attachments == [None, {"a": b"x"}]
    plain = capture(PlainSink())
    assert plain.complete_call(plain.begin_call(ROOT), **fields).disposition == "staged"
    failed = plain.complete_call(plain.begin_call(ROOT), attachments={"a": b"x"}, **fields)
    assert failed.disposition == "capture_failed"


class Adapter:
    """Reads a mapping; raises where it is told to."""

    def extract_prompt_ids(self, response: Any) -> Any:
        return response["prompt"]

    def extract_generation(self, response: Any) -> Any:
        return response["generated"], response["log_probs"]

    def extract_extras(self, response: Any) -> Any:
        return None


def test_completing_from_a_response() -> None:
    core = RolloutTokenCapture(sink=ListSink(), weight_version_fn=lambda: 1, adapter=Adapter())
    response = {"prompt": [1], "generated": [2], "log_probs": [-1.0]}
    assert core.complete_call_from_response(core.begin_call(ROOT), response).cum_len == 2
    failed = core.complete_call_from_response(core.begin_call(ROOT), {})
    assert failed.disposition == "capture_failed"
    bare = capture()
    call = bare.begin_call(ROOT)
    with pytest.raises(CaptureError):
        bare.complete_call_from_response(call, response)
    bare.fail_call(call, reason="the call is still open")


def test_install_capture_checks_what_it_is_given() -> None:
    class Layer:
        capture: Any = None

        def install_token_capture(self, capture: Any) -> None:
            self.capture = capture

    layer = Layer()
    core = install_capture(layer, sink=ListSink(), weight_version_fn=lambda: 1)
    assert layer.capture is core
    for bad in (
        {"sink": object(), "weight_version_fn": lambda: 1},
        {"sink": ListSink(), "weight_version_fn": 3},
    ):
        with pytest.raises(TypeError):
            install_capture(Layer(), **bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        install_capture(object(), sink=ListSink(), weight_version_fn=lambda: 1)
