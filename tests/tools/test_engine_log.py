"""The engine's log: what is written is what the engine gave; torn ends are survived."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tokenplane.engine_adapter.engine import (
    Engine,
    EngineState,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from tokenplane.engine_adapter.engine_log import LoggedEngine, read_engine_log
from tokenplane.schemas.errors import InvalidRecordError
from tokenplane.schemas.tokens import frozen

LOG_PROBS = np.array([-0.0, -1e-45, -3.4e38], np.float32)


class EchoEngine:
    """Answers every prompt with the ids 7, 8, 9 and notes what it is asked to do."""

    info: Any = object()

    def __init__(self) -> None:
        self.done: list[object] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return GenerationResult(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=frozen(np.array([7, 8, 9], np.int32)),
            generated_log_probs=frozen(LOG_PROBS),
            finish_reason="stop",
            stop_reason=9,
            policy_epochs=((0, 0),),
            kv_cache_epochs=((0, 0),),
            num_evictions=0,
            routing_indices=None,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            sampling=request.sampling,
        )

    def __getattr__(self, name: str) -> Any:
        async def method(*args: Any, **options: Any) -> None:
            self.done.append((name, *args, *sorted(options.items())))

        return method

    def weight_version(self) -> int | None:
        return 5

    def state(self) -> EngineState:
        return EngineState.PAUSED

    def stats(self) -> EngineStats:
        return EngineStats(steps=3)


async def test_each_request_is_written_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "log"
    engine = LoggedEngine(cast(Engine, EchoEngine()), path)
    prompt = frozen(np.array([1, 2**31 - 1], np.int32))
    for name in ("a", "b"):
        result = await engine.generate(
            GenerationRequest(name, prompt, SamplingParams(max_tokens=3))
        )
        assert result.request_id == name
    first, second = read_engine_log(path)
    assert (first.request_id, second.request_id) == ("a", "b")
    assert first.prompt_token_ids.tolist() == prompt.tolist()
    assert first.generated_token_ids.tolist() == [7, 8, 9]
    assert first.generated_log_probs.view(np.int32).tolist() == LOG_PROBS.view(np.int32).tolist()
    await engine.close()


async def test_everything_else_reaches_the_engine(tmp_path: Path) -> None:
    inner = EchoEngine()
    engine = LoggedEngine(cast(Engine, inner), tmp_path / "log")
    assert isinstance(engine, Engine)

    def apply(model: object) -> None:
        raise AssertionError("nobody calls this")

    await engine.pause(timeout_s=1)
    await engine.suspend("persist", timeout_s=2)
    await engine.resume(timeout_s=3)
    await engine.unpause(timeout_s=4)
    await engine.set_weight_version(6, timeout_s=5)
    await engine.update_weights(apply, version=7, timeout_s=6)
    await engine.close()
    assert inner.done == [
        ("pause", ("timeout_s", 1)),
        ("suspend", "persist", ("timeout_s", 2)),
        ("resume", ("timeout_s", 3)),
        ("unpause", ("timeout_s", 4)),
        ("set_weight_version", 6, ("timeout_s", 5)),
        ("update_weights", apply, ("timeout_s", 6), ("version", 7)),
        ("close",),
    ]
    assert engine.info is inner.info
    assert (engine.weight_version(), engine.state()) == (5, EngineState.PAUSED)
    assert engine.stats().steps == 3


async def test_a_torn_last_line_is_left_out_and_another_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    engine = LoggedEngine(cast(Engine, EchoEngine()), path)
    request = GenerationRequest("a", frozen(np.array([1], np.int32)), SamplingParams(max_tokens=3))
    await engine.generate(request)
    await engine.close()
    line = path.read_bytes()
    path.write_bytes(line + line[:-9])
    assert [r.request_id for r in read_engine_log(path)] == ["a"]
    path.write_bytes(line[:-9] + b"\n" + line)
    with pytest.raises(InvalidRecordError, match="line 1"):
        list(read_engine_log(path))
