"""The capture hooks inside the engine: overridden in 0.19.2, native where Megatron has them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.inference import inference_request
from megatron.core.inference.sampling_params import SamplingParams as MegatronSampling

from tests.dynamic.dynamic_engines import open_engine
from tokenplane.capture.hook_types import (
    RequestPayloadStageResult,
    RequestPromptPreparationResult,
)
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.dynamic.hooks import install_hooks
from tokenplane.schemas.errors import ConfigError

pytestmark = pytest.mark.engine


class Preparer:
    """Puts a prefix before the prompt; an object for the stager rides along."""

    def prepare_prompt(self, prompt: Any, *, offload_params: Any = None) -> Any:
        if offload_params.get("boom"):
            raise ValueError("no such chain")
        return RequestPromptPreparationResult(
            [1, 2, 3, *prompt], offload_params | {"_left": object()}
        )


class Stager:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, Any]] = []

    def stage(self, uid: str, payload: Any, *, finished_metadata: Any, offload_params: Any) -> Any:
        self.seen.append((payload, finished_metadata, offload_params))
        if offload_params.get("break_stager"):
            raise RuntimeError("the store is gone")
        if offload_params.get("decline"):
            return None
        return RequestPayloadStageResult({"row": uid})


async def send(engine: MegatronDynamicEngine, prompt: list[int], **offload: Any) -> dict[str, Any]:
    """A foreign request through Megatron's client, as its own frontends send them."""
    loop: Any = engine._loop

    async def ask() -> Any:
        params = MegatronSampling(num_tokens_to_generate=5, top_k=1, termination_id=-1)
        if offload:
            params.add_attributes({"offload_params": offload})
        return await loop._client.add_request(prompt, params)

    future = asyncio.run_coroutine_threadsafe(ask(), loop._loop)
    reply: dict[str, Any] = await asyncio.wrap_future(future)
    return reply


def run(
    coordinator: CoordinatorProcess, scenario: Callable[[Any], Awaitable[None]], **settings: Any
) -> None:
    async def bounded() -> None:
        engine = open_engine(mode="coordinator", coordinator=coordinator, **settings)
        try:
            async with asyncio.timeout(60):
                await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(bounded())


@pytest.mark.slow
def test_overridden_hooks_prepare_stage_and_answer(coordinator: CoordinatorProcess) -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        await engine.set_weight_version(4)
        stager = Stager()
        assert engine.install_capture(preparer=Preparer(), stager=stager) == "override"
        with pytest.raises(ConfigError, match="already"):
            engine.install_capture(preparer=Preparer(), stager=stager)
        reply = await send(engine, [7, 8], call="a")
        assert reply["prompt_length"] == 5
        assert reply["sampling_params"]["response_metadata"]["row"].startswith("engine-")
        payload, metadata, offload = stager.seen[0]
        assert payload.prompt_token_ids.tolist() == [1, 2, 3, 7, 8]
        assert payload.generated_token_ids == reply["generated_tokens"]
        assert payload.generated_log_probs == reply["generated_log_probs"]
        assert metadata.policy_epoch == ((0, 4),)
        assert metadata.kv_cache_epoch == ((0, 4),)
        assert type(offload["_left"]) is object
        ordinary = await send(engine, [7, 8])
        assert "response_metadata" not in ordinary["sampling_params"]
        declined = await send(engine, [7, 8], decline=True)
        assert "response_metadata" not in declined["sampling_params"]
        assert len(stager.seen) == 2

    run(coordinator, scenario)


@pytest.mark.slow
def test_a_raising_hook_never_reaches_the_loop(coordinator: CoordinatorProcess) -> None:
    async def scenario(engine: MegatronDynamicEngine) -> None:
        engine.install_capture(preparer=Preparer(), stager=Stager())
        refused, broken, good = await asyncio.gather(
            send(engine, [7, 8], boom=True),
            send(engine, [7, 8], break_stager=True),
            send(engine, [7, 8], call="c"),
        )
        assert refused["status"] == "FAILED"
        assert refused["generated_tokens"] == []
        assert "no such chain" in refused["sampling_params"]["tokenplane_failure"][1]
        assert len(broken["generated_tokens"]) == 5
        metadata = broken["sampling_params"]["response_metadata"]
        assert "the store is gone" in metadata["ng_capture_error"]
        assert len(good["generated_tokens"]) == 5
        assert engine.state().value == "running"

    run(coordinator, scenario)


class LaterEngine:
    """The hooks of Megatron-LM after 0.19.2: two attributes, called by the engine itself."""

    def __init__(self) -> None:
        self.prompt_preparer: Any = None
        self.payload_stager: Any = None

    def handle(self, prompt: list[int], offload_params: dict[str, Any]) -> dict[str, Any]:
        """One request as that engine drives it: what a preparation raises fails the request, what
        the stager raises would end the loop."""
        try:
            prepared = self.prompt_preparer.prepare_prompt(prompt, offload_params=offload_params)
        except Exception as error:  # noqa: BLE001 - as that engine does
            return {"error": str(error)}
        assert isinstance(prepared, inference_request.RequestPromptPreparationResult)
        assert isinstance(prepared.prompt, list)
        staged = self.payload_stager.stage(
            "u1",
            SimpleNamespace(),
            finished_metadata=SimpleNamespace(),
            offload_params=prepared.offload_params,
        )
        if staged is None:
            return {"prompt": prepared.prompt}
        assert isinstance(staged, inference_request.RequestPayloadStageResult)
        return {"prompt": prepared.prompt, **staged.response_metadata}


def test_native_hooks_are_used_where_the_engine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prepared:
        def __init__(self, prompt: Any, offload_params: Any) -> None:
            self.prompt, self.offload_params = prompt, offload_params

    class Staged:
        def __init__(self, response_metadata: Any) -> None:
            self.response_metadata = response_metadata

    monkeypatch.setattr(
        inference_request, "RequestPromptPreparationResult", Prepared, raising=False
    )
    monkeypatch.setattr(inference_request, "RequestPayloadStageResult", Staged, raising=False)
    engine = LaterEngine()
    assert install_hooks(engine, preparer=Preparer(), stager=Stager()) == "native"
    assert engine.handle([9], {"x": 1}) == {"prompt": [1, 2, 3, 9], "row": "u1"}
    assert engine.handle([9], {"boom": 1}) == {"error": "no such chain"}
    assert engine.handle([9], {"decline": 1}) == {"prompt": [1, 2, 3, 9]}
    broken = engine.handle([9], {"break_stager": 1})
    assert "the store is gone" in broken["ng_capture_error"]
    with pytest.raises(ConfigError, match="already"):
        install_hooks(engine, preparer=Preparer(), stager=Stager())


def test_an_engine_without_any_hooks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no capture hooks"):
        install_hooks(object(), preparer=Preparer(), stager=Stager())
