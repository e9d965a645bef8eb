"""Nothing that a client or a hook gets wrong reaches the engine's loop; the real hooks in it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core.inference.sampling_params import SamplingParams as MegatronSampling

from tests.dynamic.dynamic_engines import open_engine
from tests.dynamic.dynamic_requests import ask, change_weights
from tests.dynamic.test_dynamic_hooks import LaterEngine, Preparer, Stager, run, send
from tokenplane.capture.hook_types import (
    ADMISSION_KEY,
    COORDS_KEY,
    FinishedRequestRecord,
    OffloadedRequestPayload,
    RequestPayloadStageResult,
    RequestPromptPreparationResult,
)
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.dynamic.hooks import install_hooks
from tokenplane.engine_adapter.worker.capture import make_capture
from tokenplane.schemas.wire import CaptureAdmission, CommitCoords
from tokenplane.staging import TokenSource, open_store

pytestmark = pytest.mark.engine


class GivesWhatItIsTold:
    """A preparer whose result is the ``offload_params`` entry of that name."""

    results: dict[str, Any]

    def __init__(self) -> None:
        self.results = {
            "nothing": None,
            "no ids": RequestPromptPreparationResult([], {}),
            "outside": RequestPromptPreparationResult([10**6], {}),
            "huge": RequestPromptPreparationResult([2**40], {}),
            "text": RequestPromptPreparationResult("words", {}),
            "floats": RequestPromptPreparationResult([0.5], {}),
            "nested": RequestPromptPreparationResult([[1], [2]], {}),
            "too long": RequestPromptPreparationResult([5] * 600, {}),
        }

    def prepare_prompt(self, prompt: Any, *, offload_params: Any = None) -> Any:
        if "give" not in offload_params:
            return RequestPromptPreparationResult(prompt, offload_params)
        return self.results[offload_params["give"]]


class Unserializable:
    """A stager whose metadata no reply can carry."""

    def stage(self, uid: str, payload: Any, *, finished_metadata: Any, offload_params: Any) -> Any:
        if offload_params.get("wrong_type"):
            return {"row": uid}
        return RequestPayloadStageResult({"array": np.zeros(2)})


async def foreign(engine: MegatronDynamicEngine, prompt: Any, **settings: Any) -> dict[str, Any]:
    """Whatever another client of the coordinator may send."""
    loop: Any = engine._loop

    async def submit() -> Any:
        params = MegatronSampling(num_tokens_to_generate=5, termination_id=-1)
        for name, value in settings.items():
            setattr(params, name, value)
        return await loop._client.add_request(prompt, params)

    future = asyncio.run_coroutine_threadsafe(submit(), loop._loop)
    reply: dict[str, Any] = await asyncio.wrap_future(future)
    return reply


def failure(reply: dict[str, Any]) -> str:
    assert reply["status"] == "FAILED"
    assert reply["generated_tokens"] == []
    code, message = reply["sampling_params"]["tokenplane_failure"]
    assert code
    return str(message)


@pytest.mark.slow
def test_what_a_preparer_gives_wrong_fails_its_request_alone(
    coordinator: CoordinatorProcess,
) -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        preparer = GivesWhatItIsTold()
        engine.install_capture(preparer=preparer, stager=Stager())
        good = asyncio.create_task(engine.generate(ask([5, 9], max_tokens=200)))
        for name in preparer.results:
            assert failure(await send(engine, [7, 8], give=name)), name
        assert len((await send(engine, [7, 8], call="x"))["generated_tokens"]) == 5
        assert len((await good).generated_token_ids) == 200

    run(coordinator, scenario)


@pytest.mark.slow
def test_foreign_nonsense_fails_its_request_alone(coordinator: CoordinatorProcess) -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        good = asyncio.create_task(engine.generate(ask([5, 9], max_tokens=200)))
        for prompt in ([], [10**6], [-1], "text", [5] * 600):
            assert failure(await foreign(engine, prompt))
        for settings in (
            {"temperature": -1.0},
            {"top_p": 1.5},
            {"top_k": -3},
            {"stop_words": [""]},
            {"num_tokens_to_generate": "many"},
            {"tokenplane": {"key": "k"}},
            {"tokenplane": {"nothing": 1}},
            {"tokenplane": {"key": "k", "max_tokens": 0}},
        ):
            assert failure(await foreign(engine, [7, 8], **settings)), settings
        assert len((await foreign(engine, [7, 8]))["generated_tokens"]) == 5
        assert len((await good).generated_token_ids) == 200

    run(coordinator, scenario)


@pytest.mark.slow
def test_metadata_that_no_reply_can_carry_is_an_error_in_the_reply(
    coordinator: CoordinatorProcess,
) -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        engine.install_capture(preparer=GivesWhatItIsTold(), stager=Unserializable())
        for offload in ({"call": "a"}, {"call": "a", "wrong_type": True}):
            reply = await send(engine, [7, 8], **offload)
            assert len(reply["generated_tokens"]) == 5
            error = reply["sampling_params"]["response_metadata"]["ng_capture_error"]
            assert error.startswith(("TypeError", "AttributeError"))

    run(coordinator, scenario)


@pytest.mark.slow
def test_a_request_that_ends_early_leaves_nothing_with_the_hooks(
    coordinator: CoordinatorProcess,
) -> None:
    async def scenario(engine: Any) -> None:
        engine.install_capture(preparer=Preparer(), stager=Stager())
        hooks = engine._loop.core.hooks
        assert failure(await send(engine, [5] * 511, call="too long once prepared"))
        assert len((await send(engine, [5], call="x"))["generated_tokens"]) == 5
        assert hooks._offload == {}

    run(coordinator, scenario)


def offload_of(admission: CaptureAdmission) -> dict[str, Any]:
    return {ADMISSION_KEY: admission.model_dump()}


def continuing(parent: CommitCoords, keys: list[str], call: str) -> CaptureAdmission:
    assert parent.chain_hash is not None
    return CaptureAdmission(
        rollout_id="r",
        model_call_id=call,
        parent_call_id=parent.model_call_id,
        prev_len=parent.cum_len,
        mode="token_in",
        staging_chain=keys,
        parent_chain_hash=parent.chain_hash,
    )


@pytest.mark.slow
def test_the_capture_hooks_stage_two_turns_inside_the_engine(
    coordinator: CoordinatorProcess,
) -> None:
    """The real preparer and stager, a refit between the turns; evidence as the server gives it."""

    async def scenario(engine: MegatronDynamicEngine) -> None:
        with open_store("memory:") as store:
            pair = make_capture(store, "staged")
            assert engine.install_capture(preparer=pair.preparer, stager=pair.stager) == "override"
            await engine.set_weight_version(1)
            root = CaptureAdmission(rollout_id="r", model_call_id="c1", mode="text")
            first = await send(engine, [7, 8, 9], **offload_of(root))
            coords = CommitCoords(**first["sampling_params"]["response_metadata"][COORDS_KEY])
            assert coords.staging_key is not None
            whole = [7, 8, 9, *first["generated_tokens"]]
            await engine.update_weights(change_weights, version=2)
            child = continuing(coords, [coords.staging_key], "c2")
            second = await send(engine, [*whole, 11, 12], **offload_of(child))
            later = CommitCoords(**second["sampling_params"]["response_metadata"][COORDS_KEY])
            assert (later.weight_version, later.prev_len) == (2, len(whole))
            assert later.staging_key is not None
            rows = TokenSource(store).fetch_rows([coords.staging_key, later.staging_key])
            assert rows[0].call.token_ids_delta.tolist() == whole
            assert rows[1].call.token_ids_delta.tolist() == [11, 12, *second["generated_tokens"]]
            assert rows[1].evidence.policy_epochs == ((0, 2),)
            for row in rows:
                assert row.evidence.engine == engine.info.engine
                assert row.evidence.sampling is not None
                assert row.evidence.sampling.temperature == 0
                assert row.evidence.logprobs_mode == "raw"
                assert row.evidence.finish_reason == "length"
            wrong = continuing(coords, ["r/c1/other"], "c3")
            assert failure(await send(engine, [*whole, 11], **offload_of(wrong)))

    run(coordinator, scenario)


def test_native_hooks_stage_the_same_rows() -> None:
    """Through the attributes of Megatron-LM after 0.19.2, with that engine's payload types."""

    class Payloads(LaterEngine):
        def handle(self, prompt: list[int], offload_params: dict[str, Any]) -> dict[str, Any]:
            prepared = self.prompt_preparer.prepare_prompt(prompt, offload_params=offload_params)
            staged = self.payload_stager.stage(
                "u1",
                SimpleNamespace(
                    **dict.fromkeys(("prompt_log_probs", "media_tensors")),
                    routing_indices=None,
                    prompt_token_ids=prepared.prompt,
                    generated_token_ids=[4, 5],
                    generated_log_probs=[-0.5, -0.25],
                ),
                finished_metadata=SimpleNamespace(
                    policy_epoch=[(0, 1)], kv_cache_epoch=[(0, 1)], num_evictions=0
                ),
                offload_params=prepared.offload_params,
            )
            return dict(staged.response_metadata)

    with open_store("memory:") as store:
        pair = make_capture(store, "staged")
        engine = Payloads()
        assert install_hooks(engine, preparer=pair.preparer, stager=pair.stager) == "native"
        root = CaptureAdmission(rollout_id="r", model_call_id="c1", mode="text")
        coords = CommitCoords(**engine.handle([1, 2, 3], offload_of(root))[COORDS_KEY])
        assert coords.staging_key is not None
        child = continuing(coords, [coords.staging_key], "c2")
        later = CommitCoords(**engine.handle([1, 2, 3, 4, 5, 6], offload_of(child))[COORDS_KEY])
        direct = pair.stager.stage(
            "u2",
            OffloadedRequestPayload([1, 2, 3], [4, 5], [-0.5, -0.25]),
            finished_metadata=FinishedRequestRecord([(0, 1)], [(0, 1)]),
            offload_params=offload_of(root),
        )
        assert direct is not None
        same = CommitCoords(**direct.response_metadata[COORDS_KEY])
        assert (same.digest, same.chain_hash) == (coords.digest, coords.chain_hash)
        assert (later.prev_len, later.delta_len) == (5, 3)


def test_hooks_are_not_called_for_ordinary_requests() -> None:
    async def scenario() -> None:
        engine = open_engine()
        stager = Stager()
        engine.install_capture(preparer=Preparer(), stager=stager)
        result = await engine.generate(ask([7, 8]))
        assert result.prompt_token_ids.tolist() == [7, 8]
        assert stager.seen == []
        await engine.close()

    asyncio.run(scenario())
