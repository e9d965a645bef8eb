"""Chat over a real engine: rollouts are conditioned on exactly what was staged, and stay apart."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.server.serving import Served, message_of, serving, tiny, tiny_engine, user, whole
from tokenplane.capture.collect.collector import Collector
from tokenplane.engine_adapter.engine import Engine, GenerationRequest, GenerationResult
from tokenplane.schemas.digests import cumulative_hash
from tokenplane.staging.token_source import TokenSource

pytestmark = pytest.mark.engine


class Tap:
    """Looks over an engine's shoulder: what was it conditioned on, and what did it sample?"""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.results: dict[str, GenerationResult] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await self._engine.generate(request)
        self.results[request.request_id] = result
        return result


async def roll(served: Served, rollout: str, turns: int = 3, **body: Any) -> list[str]:
    """A conversation of ``turns`` turns; gives the response ids."""
    messages = [user(f"Rollout {rollout} begins.")]
    ids = []
    for turn in range(turns):
        settings = {"max_tokens": 24, "seed": turn} | body
        reply = await served.chat(messages, rollout=rollout, **settings)
        messages += [message_of(reply), user(f"Go on, turn {turn}.")]
        ids.append(reply.json()["id"])
        assert reply.headers["x-tokenplane-capture"] == "staged"
    return ids


async def test_every_turn_is_conditioned_on_exactly_the_staged_tokens() -> None:
    tap = Tap(tiny_engine())
    async with serving(tap) as served:
        ids = await roll(served, "r1")
        rows = served.rows()
        assert [row.ledger.response_id for row in rows if row.ledger] == ids
        for turn, row in enumerate(rows):
            seen = tap.results[ids[turn]]
            chain = whole(rows[: turn + 1])
            conditioned = chain[: len(chain) - len(seen.generated_token_ids)]
            assert conditioned.tolist() == seen.prompt_token_ids.tolist()
            sampled = row.call.token_mask_delta.astype(bool)
            assert row.call.token_ids_delta[sampled].tolist() == seen.generated_token_ids.tolist()
            staged = row.call.generation_log_probs_delta[sampled]
            assert staged.tobytes() == seen.generated_log_probs.tobytes()
            assert row.call.cumulative_hash == cumulative_hash(chain)
            assert row.evidence.policy_epochs == seen.policy_epochs == ((0, 7),)
        assert [row.call.mode for row in rows] == ["text", "token_in", "token_in"]
        assert [row.evidence.prefix_source for row in rows] == ["root", "cache", "cache"]


async def test_the_first_prompt_is_what_the_template_prints() -> None:
    tap = Tap(tiny_engine())
    async with serving(tap) as served:
        messages = [{"role": "system", "content": "Be brief."}, user("Hello")]
        reply = await served.chat(messages, max_tokens=4)
        rendered = tiny().tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert tap.results[reply.json()["id"]].prompt_token_ids.tolist() == list(rendered)


async def test_sixteen_rollouts_at_once_stay_apart_and_verify() -> None:
    async with serving(tiny_engine()) as served:
        names = [f"r{i}" for i in range(16)]
        answered = await asyncio.gather(*(roll(served, name) for name in names))
        collector = Collector(TokenSource(served.store), served.parts.ledger)
        for name, ids in zip(names, answered, strict=True):
            rows = served.rows(name)
            assert [row.ledger.response_id for row in rows if row.ledger] == ids
            (training,) = collector.finalize(name)
            assert training.sample_mask == 1, training.reason
            assert training.token_ids.tolist() == whole(rows).tolist()
            assert (training.weight_versions[training.token_mask == 1] == 7).all()
        assert not any([await served.failures(name) for name in names])
        assert served.parts.engine.stats().live_requests == 0


async def test_the_effective_sampling_is_in_the_row() -> None:
    async with serving(tiny_engine(), top_p=0.9) as served:
        await served.chat([user("a")], max_completion_tokens=3, max_tokens=99, top_k=-1)
        await served.chat(
            [user("b")], rollout="r2", temperature=0, top_k=5, stop=["zz"], seed=11, max_tokens=2
        )
        first, second = served.rows()[0].evidence, served.rows("r2")[0].evidence
        assert first.sampling is not None
        assert second.sampling is not None
        assert (first.sampling.temperature, first.sampling.top_p) == (1.0, 0.9)
        assert (first.sampling.max_tokens, first.sampling.top_k) == (3, 0)
        assert isinstance(first.sampling.seed, int)
        assert (second.sampling.temperature, second.sampling.top_k) == (0.0, 5)
        assert (second.sampling.seed, second.sampling.stop_strings) == (11, ("zz",))
        assert first.logprobs_mode == "raw"
        assert first.engine == served.parts.engine.info.engine
        again = await served.chat([user("a")], rollout="r3", max_tokens=3, seed=first.sampling.seed)
        assert again.status_code == 200
        repeated = served.rows("r3")[0].call.token_ids_delta
        assert repeated.tolist() == served.rows()[0].call.token_ids_delta.tolist()


async def test_a_second_server_continues_a_rollout_from_the_store() -> None:
    first_engine = tiny_engine()
    async with serving(first_engine) as first:
        await roll(first, "r1", turns=1)
        row = first.rows()[0]
        assert row.ledger is not None
        assert row.ledger.response_body is not None
        echoed = orjson.loads(row.ledger.response_body)["choices"][0]["message"]
        messages = [user("Rollout r1 begins."), echoed, user("Go on, elsewhere.")]
        async with serving(tiny_engine(), store=first.store) as second:
            reply = await second.chat(messages, max_tokens=8)
            assert reply.headers["x-tokenplane-capture"] == "staged"
            rows = second.rows()
            assert rows[1].evidence.prefix_source == "store"
            assert rows[1].call.prev_len == rows[0].call.cum_len


async def test_branches_of_one_turn_share_its_prefix() -> None:
    async with serving(tiny_engine()) as served:
        opening = [user("Think.")]
        said = message_of(await served.chat(opening, max_tokens=6, seed=1))
        for branch in range(3):
            messages = [*opening, said, user(f"Branch {branch}.")]
            reply = await served.chat(messages, max_tokens=6, seed=branch)
            assert reply.headers["x-tokenplane-capture"] == "staged"
        root, *leaves = served.rows()
        assert {leaf.call.parent_call_id for leaf in leaves} == {root.call.model_call_id}
        assert {leaf.call.prev_len for leaf in leaves} == {root.call.cum_len}


async def test_token_prompts_continue_what_they_start_with() -> None:
    """Bare completions: a prompt of ids is matched by hash, not by text."""
    async with serving(tiny_engine()) as served:
        ask = "/rollouts/r1/v1/completions"
        first = await served.client.post(ask, json={"prompt": "Once", "max_tokens": 5, "seed": 1})
        assert first.headers["x-tokenplane-capture"] == "staged"
        sequence = whole(served.rows())
        body = {"prompt": [*sequence.tolist(), 70, 71], "max_tokens": 5}
        second = await served.client.post(ask, json=body)
        assert second.headers["x-tokenplane-capture"] == "staged"
        rows = served.rows()
        assert rows[1].call.mode == "token_in"
        assert rows[1].call.token_ids_delta[:2].tolist() == [70, 71]
        assert rows[1].evidence.splice_notes == ("already_prefixed",)
        assert rows[1].call.prev_len == len(sequence)
