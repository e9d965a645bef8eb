"""The scripted engine keeps the contract of every engine, as far as a script can."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tokenplane.engine_adapter.contract_suite.features import (
    CancelContract,
    StopContract,
    StreamContract,
)
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.engine_adapter.engine import (
    Engine,
    EngineInfo,
    EngineState,
    GenerationRequest,
    SamplingParams,
)
from tokenplane.engine_adapter.scripted_engine import ScriptedEngine, replay
from tokenplane.schemas.errors import (
    EngineDeadError,
    EngineError,
    EngineStateError,
    RequestCancelledError,
    RequestRejectedError,
)

VOCAB = 96
EOS = 95


def spell(ids: Sequence[int]) -> str:
    return "".join(chr(32 + i) for i in ids)


def dice(request: GenerationRequest) -> Iterator[tuple[int, float]]:
    """Endless pseudo-random ids that depend on prompt and seed as a model's would."""
    sampling = request.sampling
    seed = sampling.seed if sampling.temperature else 0
    rng = random.Random(f"{seed}/{request.prompt_token_ids.tolist()}")
    while True:
        yield rng.randrange(VOCAB), -rng.random()


def info(max_sequence_length: int = 4096) -> EngineInfo:
    return EngineInfo(
        name="script",
        model_id="tests/script",
        model_fingerprint="0" * 64,
        tokenizer_fingerprint="1" * 64,
        max_sequence_length=max_sequence_length,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        engine="script",
    )


class TestScriptedEngine(StreamContract, CancelContract, StopContract):
    def make_engine(self, **limits: int) -> Engine:
        return ScriptedEngine(info(**limits), dice, spell)

    def reference_logits(self, engine: Engine, ids: np.ndarray) -> np.ndarray:
        raise AssertionError("a script has no logits")

    def detokenize(self, ids: Sequence[int]) -> str:
        return spell(ids)


def ask(name: str = "r", **sampling: Any) -> GenerationRequest:
    settings: dict[str, Any] = {"max_tokens": 8} | sampling
    return GenerationRequest(name, np.array([1, 2], np.int32), SamplingParams(**settings))


async def test_replays_answers_in_order_and_says_when_there_is_none() -> None:
    engine = ScriptedEngine(info(), replay([(5, -0.5), (EOS, -0.25)], [(6, -1.0)]))
    first = await engine.generate(ask())
    assert first.generated_token_ids.tolist() == [5, EOS]
    assert first.generated_log_probs.tolist() == [-0.5, -0.25]
    assert (first.finish_reason, first.stop_reason) == ("stop", EOS)
    second = await engine.generate(ask())
    assert (second.finish_reason, second.stop_reason) == ("length", None)
    with pytest.raises(EngineError, match="no further") as caught:
        await engine.generate(ask())
    assert caught.value.code == "script_exhausted"
    assert engine.stats().failed_requests == 1
    assert len(engine.requests) == 3


async def test_a_version_change_opens_a_boundary_as_in_a_real_engine() -> None:
    engine = ScriptedEngine(info(), dice, step_s=0.005)
    await engine.set_weight_version(3)
    seen: list[int] = []
    task = asyncio.create_task(
        engine.generate(
            GenerationRequest(
                "r",
                np.array([1, 2], np.int32),
                SamplingParams(max_tokens=60, ignore_eos=True),
                lambda ids: seen.extend(ids.tolist()),
            )
        )
    )
    await until(lambda: len(seen) >= 3)
    await engine.pause()
    made = len(seen)
    await engine.suspend("recompute")
    await engine.set_weight_version(4)
    await engine.resume()
    await asyncio.sleep(0.01)
    assert len(seen) == made
    await engine.unpause()
    result = await task
    assert result.policy_epochs == ((0, 3), (2 + made - 1, 4))
    assert result.kv_cache_epochs[-1][1] == 4
    assert result.num_evictions == 1
    assert result.generated_token_ids.tolist() == seen


async def test_illegal_transitions_are_refused() -> None:
    engine = ScriptedEngine(info(), dice)
    with pytest.raises(EngineStateError, match="running"):
        await engine.suspend("persist")
    with pytest.raises(RequestRejectedError, match="no weights"):
        await engine.update_weights(lambda _model: None, version=1)
    await engine.close()
    with pytest.raises(EngineStateError, match="closed"):
        await engine.generate(ask())


@pytest.mark.parametrize(
    ("end", "error"), [("close", RequestCancelledError), ("fail", EngineDeadError)]
)
async def test_the_end_reaches_everybody_even_in_a_long_step(
    end: str, error: type[Exception]
) -> None:
    engine = ScriptedEngine(info(), dice, step_s=600)
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", ignore_eos=True))) for i in range(3)]
    await until(lambda: engine.stats().generated_tokens == 3)
    if end == "close":
        await engine.close()
        assert engine.state() is EngineState.CLOSED
    else:
        engine.fail()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, error)
    assert engine.stats().live_requests == 0
