"""A weight change while requests are in flight: spanning rows, exact boundaries, later tokens."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.server.serving import Served, message_of, serving, tiny_engine, user
from tokenplane.capture.collect.collector import Collector
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.schemas.epochs import generation_versions
from tokenplane.staging.token_source import TokenSource

pytestmark = pytest.mark.engine


async def in_flight(served: Served, rollout: str) -> asyncio.Task[object]:
    """A long call that has sampled at least a few tokens."""
    before = served.parts.engine.stats().generated_tokens
    task: asyncio.Task[object] = asyncio.create_task(
        served.chat([user("Go on.")], rollout=rollout, max_tokens=400, seed=1, ignore_eos=True)
    )
    await until(lambda: served.parts.engine.stats().generated_tokens > before + 5)
    return task


async def test_a_call_that_spans_a_weight_change_says_which_token_came_from_which() -> None:
    async with serving(tiny_engine(), allow_weight_edit=True) as served:
        plain = await served.chat(
            [user("Go on.")], rollout="r0", max_tokens=400, seed=1, ignore_eos=True
        )
        assert plain.status_code == 200
        task = await in_flight(served, "r1")
        body = {"scale": 1.3, "version": 8}
        reply = await served.client.post("/admin/perturb_weights", json=body)
        assert reply.json() == {"version": 8}
        await task
        (row,) = served.rows()
        (start, old), (boundary, new) = row.evidence.policy_epochs
        assert (start, old, new) == (0, 7, 8)
        assert row.call.weight_version == 7
        carried = int((row.call.token_mask_delta == 0).sum())
        versions = generation_versions(row.evidence.policy_epochs, carried, row.call.cum_len)
        assert versions.tolist() == sorted(versions.tolist())
        assert set(versions.tolist()) == {7, 8}
        made_by_old = int((versions == 7).sum())
        untouched = served.rows("r0")[0].call.token_ids_delta[carried:]
        sampled = row.call.token_ids_delta[carried:]
        assert np.array_equal(sampled[:made_by_old], untouched[:made_by_old])
        assert boundary == carried + made_by_old - 1
        (training,) = Collector(TokenSource(served.store), served.parts.ledger).finalize("r1")
        assert training.weight_versions[training.token_mask == 1].tolist() == versions.tolist()
        listed = (await served.client.get("/rollouts/r1/rows")).json()["rows"]
        assert listed[0]["spans_epochs"] is True
        metrics = (await served.client.get("/metrics")).text
        assert "tokenplane_epoch_spanning_calls_total 1.0" in metrics
        assert "tokenplane_weight_version 8.0" in metrics


async def test_the_next_turn_after_a_weight_change_keeps_the_old_tokens() -> None:
    async with serving(tiny_engine(), allow_weight_edit=True) as served:
        said = message_of(await served.chat([user("a")], max_tokens=8))
        await served.client.post("/admin/perturb_weights", json={"scale": 1.1, "version": 8})
        reply = await served.chat([user("a"), said, user("b")], max_tokens=8)
        assert reply.headers["x-tokenplane-capture"] == "staged"
        first, second = served.rows()
        assert (first.call.weight_version, second.call.weight_version) == (7, 8)
        assert second.call.prev_len == first.call.cum_len


async def test_versions_alone_may_change_too() -> None:
    async with serving(tiny_engine()) as served:
        task = await in_flight(served, "r1")
        await served.client.post("/admin/weight_version", json={"version": 9})
        await task
        (row,) = served.rows()
        assert [epoch for _, epoch in row.evidence.policy_epochs] == [7, 9]
