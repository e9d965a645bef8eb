"""Contract suites of what not every engine offers: sampling controls, stops, streams, cancelling.

Take those that apply beside ``EngineContract`` (see ``testing``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tokenplane.engine_adapter.contract_suite.suite import EngineSuite, until
from tokenplane.engine_adapter.engine import Engine


def _log_softmax(rows: np.ndarray) -> np.ndarray:
    shifted = rows - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


class SamplingContract(EngineSuite):
    """Seeds, temperature, top-k, top-p, and both modes of log-probabilities."""

    def test_a_seed_gives_the_same_tokens_in_any_batch(self) -> None:
        async def scenario(engine: Engine) -> None:
            def ask(seed: int) -> Any:
                return engine.generate(self.request(temperature=1.0, seed=seed, max_tokens=32))

            alone = await ask(11)
            batch = await asyncio.gather(*(ask(seed) for seed in range(4, 20)))
            answers = [r.generated_token_ids.tolist() for r in batch]
            assert answers[11 - 4] == alone.generated_token_ids.tolist()
            assert len({tuple(answer) for answer in answers}) == 16

        self.run(scenario)

    def test_an_engine_made_seed_is_reported_and_repeats_the_answer(self) -> None:
        async def scenario(engine: Engine) -> None:
            first = await engine.generate(self.request(temperature=1.0))
            other = await engine.generate(self.request(temperature=1.0))
            assert first.sampling.seed != other.sampling.seed
            again = await engine.generate(self.request(temperature=1.0, seed=first.sampling.seed))
            assert again.generated_token_ids.tolist() == first.generated_token_ids.tolist()
            assert again.generated_log_probs.tobytes() == first.generated_log_probs.tobytes()

        self.run(scenario)

    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
    def test_the_narrowest_sampling_is_greedy(self, narrow: dict[str, Any]) -> None:
        async def scenario(engine: Engine) -> None:
            greedy = await engine.generate(self.request())
            result = await engine.generate(self.request(temperature=0.7, **narrow))
            assert result.generated_token_ids.tolist() == greedy.generated_token_ids.tolist()

        self.run(scenario)

    @pytest.mark.parametrize(
        "shape", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.5, "temperature": 1.3}]
    )
    def test_raw_and_processed_log_probs(self, shape: dict[str, Any]) -> None:
        """Both are of the same sampled ids; processed ones are of the narrowed distribution."""

        async def scenario(engine: Engine) -> None:
            settings = {"temperature": 1.0, "seed": 5} | shape
            raw = await engine.generate(self.request(**settings))
            processed = await engine.generate(self.request(**settings, logprobs_mode="processed"))
            assert processed.sampling.logprobs_mode == "processed"
            assert raw.generated_token_ids.tolist() == processed.generated_token_ids.tolist()
            reference = self.reference_log_probs(engine, raw)
            assert np.abs(reference - raw.generated_log_probs).max() <= self.logprob_tolerance
            ids = np.concatenate([raw.prompt_token_ids, raw.generated_token_ids])
            logits = self.reference_logits(engine, ids).astype(np.float64)
            rows = logits[len(self.prompt) - 1 : -1] / settings["temperature"]
            for row, token, value in zip(
                rows, processed.generated_token_ids, processed.generated_log_probs, strict=True
            ):
                kept = _kept(row, settings.get("top_k", 0), settings.get("top_p", 1.0))
                assert int(token) in kept
                expected = _log_softmax(row[kept])[kept.index(int(token))]
                assert math.isclose(expected, value, abs_tol=10 * self.logprob_tolerance)

        self.run(scenario)

    def test_greedy_processed_log_probs_are_certain(self) -> None:
        async def scenario(engine: Engine) -> None:
            result = await engine.generate(self.request(logprobs_mode="processed"))
            assert (result.generated_log_probs == 0).all()

        self.run(scenario)


def _kept(row: np.ndarray, top_k: int, top_p: float) -> list[int]:
    order = np.argsort(-row, kind="stable")
    if top_k:
        order = order[:top_k]
    probs = np.exp(_log_softmax(row[order]))
    before = np.cumsum(probs) - probs
    return [int(token) for token, mass in zip(order, before, strict=True) if mass < top_p]


class StopContract(EngineSuite):
    """Stop ids, the model's own end ids, and stop strings."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` as the engine decodes it."""
        raise AssertionError("a suite with stop strings must say how ids become text")

    def test_a_stop_id_ends_the_answer_and_stays_in_it(self) -> None:
        async def scenario(engine: Engine) -> None:
            whole = (await engine.generate(self.request())).generated_token_ids.tolist()
            stop = whole[6]
            result = await engine.generate(self.request(stop_token_ids=(stop,)))
            assert result.finish_reason == "stop"
            assert result.stop_reason == stop
            end = whole.index(stop) + 1
            assert result.generated_token_ids.tolist() == whole[:end]
            assert len(result.generated_log_probs) == end

        self.run(scenario)

    def test_the_models_end_ids_stop_unless_ignored(self) -> None:
        async def scenario(engine: Engine) -> None:
            eos = set(engine.info.eos_token_ids)
            seed = 0
            while True:
                settings = {"temperature": 1.5, "seed": seed, "max_tokens": 64}
                ignoring = await engine.generate(self.request(**settings))
                ids = ignoring.generated_token_ids.tolist()
                ends = [index for index, token in enumerate(ids[:-1]) if token in eos]
                if ends:
                    break
                seed += 1
            stopping = await engine.generate(self.request(**settings, ignore_eos=False))
            assert stopping.generated_token_ids.tolist() == ids[: ends[0] + 1]
            assert stopping.stop_reason == ids[ends[0]]
            assert stopping.finish_reason == "stop"
            assert len(ids) == 64

        self.run(scenario)

    def test_a_stop_string_ends_the_answer_with_the_id_that_completed_it(self) -> None:
        async def scenario(engine: Engine) -> None:
            settings = {"temperature": 1.0, "seed": 3, "max_tokens": 60}
            whole = await engine.generate(self.request(**settings))
            ids = whole.generated_token_ids.tolist()
            text = self.detokenize(ids)
            at = next(i for i in range(len(text) // 2, len(text)) if text[i : i + 3].isascii())
            stop = text[at : at + 3]
            streamed: list[int] = []
            result = await engine.generate(
                self.request(
                    **settings,
                    stop_strings=("never to be seen", stop),
                    on_tokens=lambda new: streamed.extend(new.tolist()),
                )
            )
            got = result.generated_token_ids.tolist()
            assert result.stop_reason == stop
            assert result.finish_reason == "stop"
            assert got == ids[: len(got)]
            assert stop in self.detokenize(got)
            assert stop not in self.detokenize(got[:-1])
            assert streamed == got[: len(streamed)]
            assert len(self.detokenize(streamed)) <= self.detokenize(got).index(stop)

        self.run(scenario)


class StreamContract(EngineSuite):
    """``on_tokens`` while generating."""

    def test_released_ids_are_the_answer_in_order(self) -> None:
        async def scenario(engine: Engine) -> None:
            batches: list[np.ndarray] = []
            result = await engine.generate(self.request(on_tokens=batches.append, max_tokens=40))
            assert np.concatenate(batches).tolist() == result.generated_token_ids.tolist()
            assert len(batches) > 1
            assert all(b.dtype == np.int32 and b.size and not b.flags.writeable for b in batches)

        self.run(scenario)

    def test_a_raising_callback_fails_its_own_request_alone(self) -> None:
        async def scenario(engine: Engine) -> None:
            def broken(_ids: np.ndarray) -> None:
                raise RuntimeError("the reader is gone")

            good, bad = await asyncio.gather(
                engine.generate(self.request()),
                engine.generate(self.request(on_tokens=broken)),
                return_exceptions=True,
            )
            assert isinstance(bad, RuntimeError)
            assert not isinstance(good, BaseException)
            assert len(good.generated_token_ids) == 24
            assert engine.stats().failed_requests == 1
            assert engine.stats().live_requests == 0

        self.run(scenario)


class CancelContract(EngineSuite):
    """Cancelling the task that awaits an answer."""

    @pytest.mark.parametrize("waiting", [False, True])
    def test_cancelling_frees_the_request_and_no_other(self, waiting: bool) -> None:
        async def scenario(engine: Engine) -> None:
            reference = await engine.generate(self.request(max_tokens=100))
            made = engine.stats().generated_tokens
            if waiting:
                await engine.pause()
            tasks = [
                asyncio.create_task(engine.generate(self.request(max_tokens=n)))
                for n in (5000, 100, 5000)
            ]
            stats = engine.stats
            if waiting:
                await until(lambda: stats().waiting_requests == 3)
            else:
                await until(lambda: stats().generated_tokens > made + 6)
            tasks[0].cancel()
            tasks[2].cancel()
            await until(lambda: stats().cancelled_requests == 2)
            assert stats().live_requests + stats().waiting_requests <= 1
            if waiting:
                await engine.unpause()
            result = await tasks[1]
            assert result.generated_token_ids.tolist() == reference.generated_token_ids.tolist()
            assert tasks[0].cancelled()
            assert tasks[2].cancelled()
            end = stats()
            assert (end.live_requests, end.waiting_requests) == (0, 0)
            assert (end.kv_tokens, end.kv_bytes) == (0, 0)

        self.run(scenario, max_sequence_length=6000)

    def test_many_cancelled_requests_leave_nothing(self) -> None:
        async def scenario(engine: Engine) -> None:
            for _ in range(5):
                tasks = [
                    asyncio.create_task(engine.generate(self.request(max_tokens=5000)))
                    for _ in range(8)
                ]
                await asyncio.sleep(0.01)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            assert len((await engine.generate(self.request())).generated_token_ids) == 24
            end = engine.stats()
            assert (end.live_requests, end.waiting_requests, end.kv_bytes) == (0, 0, 0)
            assert end.cancelled_requests <= 40
            assert end.finished_requests == 1

        self.run(scenario, max_sequence_length=6000)
