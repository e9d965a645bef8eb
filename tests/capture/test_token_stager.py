"""The completion stager: what it stages, what it declines, and that it never raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.capture.rollouts import RolloutMaker
from tokenplane.capture.hook_types import (
    ADMISSION_KEY,
    COORDS_KEY,
    FinishedRequestRecord,
    OffloadedRequestPayload,
)
from tokenplane.capture.prefix_resolver import PrefixResolver
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.schemas.wire import CaptureAdmission, CommitCoords, StageResult
from tokenplane.staging import TokenSink, TokenSource, open_store

ROOT = CaptureAdmission(rollout_id="r", model_call_id="c", mode="text")
PAYLOAD = OffloadedRequestPayload([1, 2, 3], [4, 5], [-0.5, -0.25])
FINISHED = FinishedRequestRecord([(0, 3)], [(0, 3)])
PARAMS = {ADMISSION_KEY: ROOT.model_dump()}


@pytest.fixture
def rig() -> tuple[TQMegatronTokenStager, TokenSource]:
    store = open_store("memory:")
    return TQMegatronTokenStager(TokenSink(store)), TokenSource(store)


def stage(stager: TQMegatronTokenStager, **changes: Any) -> CommitCoords:
    arguments: dict[str, Any] = {
        "payload": PAYLOAD,
        "finished_metadata": FINISHED,
        "offload_params": PARAMS,
        **changes,
    }
    result = stager.stage("uid", arguments.pop("payload"), **arguments)
    assert result is not None
    return CommitCoords(**result.response_metadata[COORDS_KEY])


def test_ordinary_traffic_is_declined(rig: Any) -> None:
    stager, _ = rig
    for params in (None, {}, {"other": 1}):
        assert stager.stage("u", PAYLOAD, finished_metadata=FINISHED, offload_params=params) is None
    with pytest.raises(ValueError, match="uid"):
        stager.stage("", PAYLOAD, finished_metadata=FINISHED, offload_params=PARAMS)


def test_an_admitted_call_becomes_one_verified_row(rig: Any) -> None:
    stager, source = rig
    coords = stage(stager)
    assert coords.staging_key is not None
    [row] = source.fetch_rows([coords.staging_key])
    row.call.check_digest()
    assert row.call.token_ids_delta.tolist() == [1, 2, 3, 4, 5]
    assert row.call.token_mask_delta.tolist() == [0, 0, 0, 1, 1]
    assert row.evidence.policy_epochs == ((0, 3),)
    assert row.evidence.prefix_source == "root"
    assert coords.staging_key.startswith("r/c/")


def test_one_admission_delivered_twice_gives_two_rows(rig: Any) -> None:
    stager, source = rig
    first = stage(stager)
    second = stage(stager, payload=OffloadedRequestPayload([1, 2, 3], [9], [-1.0]))
    assert first.staging_key != second.staging_key
    rows = source.fetch([first.staging_key, second.staging_key])
    assert [row.digest for row in rows] == [first.digest, second.digest]


def test_the_admission_version_is_the_first_boundary_and_spans_are_counted(rig: Any) -> None:
    stager, source = rig
    assert stage(stager).weight_version == 3
    assert stager.epoch_span_count == 0
    moved = stage(stager, finished_metadata=FinishedRequestRecord([(0, 3), (3, 3)]))
    assert stager.epoch_span_count == 0
    moved = stage(stager, finished_metadata=FinishedRequestRecord([(0, 3), (3, 4)]))
    assert (moved.weight_version, stager.epoch_span_count) == (3, 1)
    [row] = source.fetch_rows([moved.staging_key])
    assert row.evidence.policy_epochs == ((0, 3), (3, 4))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"finished_metadata": FinishedRequestRecord(None)}, "no_policy_epoch"),
        ({"finished_metadata": FinishedRequestRecord([])}, "no_policy_epoch"),
        ({"finished_metadata": object()}, "no_policy_epoch"),
        ({"finished_metadata": FinishedRequestRecord([(0, -1)])}, "invalid_record"),
        ({"finished_metadata": FinishedRequestRecord([(1, 3)])}, "invalid_record"),
        ({"finished_metadata": FinishedRequestRecord([(0, 3), (2, True)])}, "invalid_record"),
        ({"payload": OffloadedRequestPayload([1], [2], [-0.1, -0.2])}, "invalid_record"),
        ({"payload": OffloadedRequestPayload([1], [2], [float("nan")])}, "invalid_record"),
        ({"payload": OffloadedRequestPayload([1], [2**31], [-1.0])}, "token_id_out_of_range"),
        ({"payload": object()}, "stager_error"),
        (
            {
                "payload": OffloadedRequestPayload(
                    [1], [2], [-1.0], routing_indices=np.zeros((2, 1, 1), np.int16)
                )
            },
            "route_shape",
        ),
    ],
)
def test_every_failure_is_coordinates_with_a_recorded_reason(
    rig: Any, changes: Any, code: str
) -> None:
    stager, _ = rig
    coords = stage(stager, **changes)
    assert coords.disposition == "capture_failed"
    assert (coords.rollout_id, coords.model_call_id) == ("r", "c")
    [failure] = stager.failures.recent("r")
    assert (failure.code, stager.failures.counts()) == (code, {code: 1})
    assert stager.staged_count == 0


def test_an_unreadable_admission_names_nobody_but_is_recorded(rig: Any) -> None:
    stager, _ = rig
    result = stager.stage(
        "u7", PAYLOAD, finished_metadata=FINISHED, offload_params={ADMISSION_KEY: {"mode": "x"}}
    )
    assert result is not None
    assert result.response_metadata == {}
    [failure] = stager.failures.recent()
    assert (failure.code, failure.model_call_id) == ("invalid_admission", "u7")


def test_a_sink_that_fails_is_a_recorded_failure() -> None:
    class Full:
        def stage(self, record: Any) -> StageResult:
            return StageResult(ok=False, error="store_full: budget")

    stager = TQMegatronTokenStager(Full())
    assert stage(stager).disposition == "capture_failed"
    [failure] = stager.failures.recent()
    assert (failure.code, failure.message) == ("stage_failed", "store_full: budget")


def test_a_callback_that_raises_is_survived() -> None:
    from tokenplane.capture.failures import FailureLog

    def broken(_: Any) -> None:
        raise RuntimeError("metrics are down")

    stager = TQMegatronTokenStager(
        TokenSink(open_store("memory:")), failures=FailureLog(on_failure=broken)
    )
    assert stage(stager, finished_metadata=object()).disposition == "capture_failed"
    assert stager.failures.counts() == {"no_policy_epoch": 1}


def test_a_continuation_without_a_preparer_is_resolved_here() -> None:
    store = open_store("memory:")
    first = RolloutMaker(TQMegatronTokenStager(TokenSink(store)))
    parent = first.stage()[1]
    other = TQMegatronTokenStager(TokenSink(store), resolver=PrefixResolver(TokenSource(store)))
    maker = RolloutMaker(other)
    outcome, child = maker.stage(parent, call_id="child")
    assert outcome.staged
    assert outcome.coords is not None
    assert outcome.coords.staging_key is not None
    [row] = TokenSource(store).fetch_rows([outcome.coords.staging_key])
    assert row.evidence.prefix_source == "store"
    wrong = np.array(child.prompt)
    wrong[0] += 1
    coords = stage(
        other,
        payload=OffloadedRequestPayload(wrong, [1], [-1.0]),
        offload_params={ADMISSION_KEY: maker.admission(parent).model_dump()},
    )
    assert coords.disposition == "capture_failed"
    assert other.failures.counts() == {"prefix_not_in_prompt": 1}


@given(
    prompt_len=st.integers(1, 12),
    generated_len=st.integers(1, 6),
    prev_len=st.integers(0, 12),
    start=st.integers(0, 20),
)
def test_routes_from_any_position_lie_where_they_belong(
    prompt_len: int, generated_len: int, prev_len: int, start: int
) -> None:
    """An engine with a cached prefix has routes of the rest only; what it lacks is -1."""
    total = prompt_len + generated_len
    prev_len, start = min(prev_len, prompt_len), min(start, total - 1)
    store = open_store("memory:")
    stager = TQMegatronTokenStager(TokenSink(store))
    prompt = list(range(1, prompt_len + 1))
    admission: dict[str, Any] = {"rollout_id": "r", "model_call_id": "c", "mode": "text"}
    if prev_len:
        admission |= {
            "mode": "token_in",
            "parent_call_id": "p",
            "prev_len": prev_len,
            "parent_chain_hash": "0" * 64,
            "required_prefix_token_ids": prompt[:prev_len],
        }
    positions = np.arange(start, total - 1, dtype=np.int16)
    payload = OffloadedRequestPayload(
        prompt,
        [9] * generated_len,
        [-0.5] * generated_len,
        routing_indices=positions.reshape(-1, 1, 1).repeat(2, axis=2),
        routing_start=start,
    )
    coords = stage(stager, payload=payload, offload_params={ADMISSION_KEY: admission})
    assert coords.staging_key is not None
    source = TokenSource(store)
    [row] = source.fetch_rows([coords.staging_key])
    routes = source.fetch_attachments(row)["routed_experts"]
    expected = [p if start <= p < total - 1 else -1 for p in range(prev_len, total)]
    assert routes[:, 0, 0].tolist() == expected
    assert routes.shape == (row.call.delta_len, 1, 2)


@pytest.mark.parametrize("start", [-1, 1, 5])
def test_routes_that_do_not_reach_the_end_are_no_routes(rig: Any, start: int) -> None:
    stager, _ = rig
    payload = OffloadedRequestPayload(
        [1, 2, 3],
        [4, 5],
        [-0.5, -0.25],
        routing_indices=np.zeros((4, 1, 1), np.int16),
        routing_start=start,
    )
    assert stage(stager, payload=payload).disposition == "capture_failed"
    assert stager.failures.counts() == {"route_shape": 1}


def test_routes_are_delta_aligned_and_bound_by_their_hash() -> None:
    store = open_store("memory:")
    stager = TQMegatronTokenStager(TokenSink(store))
    routes = np.arange(4 * 2 * 2, dtype=np.int16).reshape(4, 2, 2)
    coords = stage(
        stager, payload=OffloadedRequestPayload([1, 2, 3], [4, 5], [-0.5, -0.25], None, routes)
    )
    assert coords.staging_key is not None
    [row] = TokenSource(store).fetch_rows([coords.staging_key])
    [ref] = row.attachments
    stored = np.frombuffer(store.get_blob(ref.sha256), ref.dtype).reshape(ref.shape)
    assert stored[:4].tolist() == routes.tolist()
    assert (stored[4] == -1).all()
    assert row.call.extras is not None
    assert row.call.extras["routed_experts"]["sha256"] == ref.sha256.hex()
