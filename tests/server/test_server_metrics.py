"""Metrics count what happened, exactly."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.server.serving import Served, message_of, say, scripted, serving, user
from tokenplane.schemas.errors import StoreUnavailableError
from tokenplane.staging.memory_backend.store import MemoryStore


async def samples(served: Served) -> dict[str, float]:
    """``name{label=value}`` to value, without the timestamps of creation."""
    reply = await served.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def test_calls_tokens_prefixes_and_times() -> None:
    async with serving(scripted([say("One."), say("Two."), say("3"), say("4")])) as served:
        messages = [user("a")]
        messages += [message_of(await served.chat(messages)), user("b")]
        await served.chat(messages, headers={"Idempotency-Key": "k"})
        await served.chat(messages, headers={"Idempotency-Key": "k"})
        await served.chat([user("plain")], rollout=None)
        await served.chat([user("z"), {"role": "assistant", "content": "?"}, user("y")])
        await served.chat([user("n")], n=3)
        await served.chat([user("x" * 9000)])
        got = await samples(served)
        calls = {k: v for k, v in got.items() if k.startswith("tokenplane_calls_total")}
        assert calls == {
            "tokenplane_calls_total{outcome=staged}": 2,
            "tokenplane_calls_total{outcome=repeated}": 1,
            "tokenplane_calls_total{outcome=off}": 1,
            "tokenplane_calls_total{outcome=unproven}": 1,
            "tokenplane_calls_total{outcome=unsupported_parameter}": 1,
            "tokenplane_calls_total{outcome=context_length_exceeded}": 1,
        }
        assert got["tokenplane_capture_failures_total{code=unresolved_parent}"] == 1
        rows = served.rows()
        generated = sum(int(row.call.token_mask_delta.sum()) for row in rows)
        carried = sum(row.call.delta_len for row in rows) - generated
        assert got["tokenplane_tokens_total{kind=generated}"] == generated
        assert got["tokenplane_tokens_total{kind=carried}"] == carried
        assert got["tokenplane_prefixes_total{source=root}"] == 1
        assert got["tokenplane_prefixes_total{source=cache}"] == 1
        assert got["tokenplane_prefix_cache_hits{}"] == 1
        assert got["tokenplane_prefix_cache_misses{}"] == 0
        for stage in ("resolve", "splice", "queue", "prefill", "decode", "stage", "total"):
            assert got[f"tokenplane_call_seconds_count{{stage={stage}}}"] == 4
        assert got["tokenplane_call_seconds_sum{stage=stage}"] > 0
        assert got["tokenplane_staged_rows{}"] == 2
        assert got["tokenplane_staged_bytes{}"] > 1000
        assert got["tokenplane_engine_live_requests{}"] == 0
        assert got["tokenplane_engine_waiting_requests{}"] == 0
        assert got["tokenplane_weight_version{}"] == 7
        assert got["tokenplane_epoch_spanning_calls_total{}"] == 0
        assert got["tokenplane_store_up{}"] == 1


async def test_a_store_that_does_not_answer_shows_and_breaks_no_scrape() -> None:
    class Silent(MemoryStore):
        def stats(self, *args: Any, **kwargs: Any) -> Any:
            raise StoreUnavailableError("nobody answers")

    async with serving(scripted([]), store=Silent()) as served:
        got = await samples(served)
        assert got["tokenplane_store_up{}"] == 0
        assert "tokenplane_staged_rows{}" not in got
        status = (await served.client.get("/admin/status")).json()
        assert status["store"]["staged"]["error"]["code"] == "store_unavailable"


async def test_servers_do_not_share_counters() -> None:
    async with serving(scripted([say("1")])) as one, serving(scripted([])) as other:
        await one.chat([user("a")])
        assert (await samples(one))["tokenplane_calls_total{outcome=staged}"] == 1
        assert "tokenplane_calls_total{outcome=staged}" not in await samples(other)
