"""The contract suite of an engine: subclass it, say how to make one, and every promise is tested.

::

    class TestMyEngine(EngineContract, SamplingContract, StreamContract):
        def make_engine(self, **limits): ...
        def reference_logits(self, engine, ids): ...

``EngineContract`` is what every engine owes. ``contract_suite.features`` has the suites of what an
engine may lack: take those that apply, override no test.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tokenplane.engine_adapter.contract_suite.lifecycle import LifecycleContract
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.engine_adapter.engine import Engine
from tokenplane.schemas.errors import ContextOverflowError, RequestRejectedError


class EngineContract(LifecycleContract):
    """Answers, batches, evidence and limits; and the life cycle."""

    def test_answer_is_exact_and_frozen(self) -> None:
        async def scenario(engine: Engine) -> None:
            result = await engine.generate(self.request())
            assert result.prompt_token_ids.tolist() == list(self.prompt)
            assert result.finish_reason == "length"
            assert result.stop_reason is None
            arrays = {
                "generated_token_ids": (result.generated_token_ids, np.int32),
                "prompt_token_ids": (result.prompt_token_ids, np.int32),
                "generated_log_probs": (result.generated_log_probs, np.float32),
            }
            for name, (array, dtype) in arrays.items():
                assert array.dtype == dtype, name
                assert array.flags.c_contiguous, name
                assert not array.flags.writeable, name
            assert len(result.generated_token_ids) == len(result.generated_log_probs) == 24
            assert np.isfinite(result.generated_log_probs).all()
            assert (result.generated_log_probs <= 0).all()
            assert min(result.queue_s, result.prefill_s, result.decode_s) >= 0

        self.run(scenario)

    def test_greedy_answer_matches_a_forward_without_cache(self) -> None:
        async def scenario(engine: Engine) -> None:
            result = await engine.generate(self.request(max_tokens=48))
            ids = np.concatenate([result.prompt_token_ids, result.generated_token_ids])
            logits = self.reference_logits(engine, ids)
            best = logits[len(self.prompt) - 1 : -1].argmax(axis=-1)
            assert best.tolist() == result.generated_token_ids.tolist()
            reference = self.reference_log_probs(engine, result)
            assert np.abs(reference - result.generated_log_probs).max() <= self.logprob_tolerance

        self.run(scenario)

    def test_batch_does_not_change_greedy_answers(self) -> None:
        async def scenario(engine: Engine) -> None:
            prompts = [[3 + (7 * i + j) % 90 for j in range(1 + 5 * i)] for i in range(16)]
            alone = [await engine.generate(self.request(p)) for p in prompts]
            together = await asyncio.gather(*(engine.generate(self.request(p)) for p in prompts))
            for one, other in zip(alone, together, strict=True):
                assert one.generated_token_ids.tolist() == other.generated_token_ids.tolist()
                gap = np.abs(one.generated_log_probs - other.generated_log_probs).max()
                assert gap <= self.logprob_tolerance

        self.run(scenario)

    def test_without_a_version_there_are_no_epochs(self) -> None:
        async def scenario(engine: Engine) -> None:
            assert engine.weight_version() is None
            result = await engine.generate(self.request())
            assert result.policy_epochs == ()
            assert result.kv_cache_epochs == ()

        self.run(scenario)

    def test_admission_stamps_the_version(self) -> None:
        async def scenario(engine: Engine) -> None:
            await engine.set_weight_version(7)
            assert engine.weight_version() == 7
            result = await engine.generate(self.request())
            assert result.policy_epochs == ((0, 7),)
            assert result.kv_cache_epochs == ((0, 7),)
            assert result.num_evictions == 0

        self.run(scenario)

    @pytest.mark.parametrize("prompt", [[], [-1], [10**6], [[1, 2]]])
    def test_malformed_prompts_are_rejected(self, prompt: Any) -> None:
        async def scenario(engine: Engine) -> None:
            with pytest.raises(RequestRejectedError, match="prompt_token_ids"):
                await engine.generate(self.request(prompt))
            assert len((await engine.generate(self.request())).generated_token_ids) == 24

        self.run(scenario)

    def test_a_live_request_id_is_not_taken_twice(self) -> None:
        async def scenario(engine: Engine) -> None:
            request = self.request(max_tokens=200)
            task = asyncio.create_task(engine.generate(request))
            await until(lambda: engine.stats().live_requests == 1)
            with pytest.raises(RequestRejectedError, match="request_id"):
                await engine.generate(request)
            assert len((await task).generated_token_ids) == 200
            assert len((await engine.generate(request)).generated_token_ids) == 200

        self.run(scenario)

    def test_context_length(self) -> None:
        async def scenario(engine: Engine) -> None:
            with pytest.raises(ContextOverflowError, match=r"context length is 32 .* has 32 "):
                await engine.generate(self.request([5] * 32))
            one = await engine.generate(self.request([5] * 31, max_tokens=9))
            assert len(one.generated_token_ids) == 1
            assert one.finish_reason == "length"
            assert one.sampling.max_tokens == 1
            full = await engine.generate(self.request([5] * 20, max_tokens=99))
            assert len(full.generated_token_ids) == full.sampling.max_tokens == 12

        self.run(scenario, max_sequence_length=32)
