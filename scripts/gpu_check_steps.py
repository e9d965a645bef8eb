"""The steps of the GPU check that ask whether answers and rows are right."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import numpy as np
import torch
from gpu_check_parts import (
    MAX_LOGPROB_GAP,
    CheckError,
    Plan,
    ask,
    change_weights,
    engine_over,
    gather,
    server_over,
    tokens_made,
)

from tokenplane.capture import Collector
from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
from tokenplane.engine_adapter.worker.generation_config import parse_generation_config
from tokenplane.staging.token_source import TokenSource

PROMPT = [3 + (7 * i) % 90 for i in range(600)]
"""Two blocks of 256 and a bit."""


async def check_agreement(plan: Plan) -> dict[str, Any]:
    """Greedy answers of the CPU engine and the dynamic engine over one tiny fp32 model."""
    prompts = [[3 + (11 * i + 7 * j) % 300 for j in range(3 + 29 * i)] for i in range(8)]
    report: dict[str, Any] = {}
    for spec in ("tiny", "tiny-moe"):
        loaded = load_model(spec)
        cpu = MegatronCpuEngine(loaded.model, loaded.info, loaded.detokenize)
        expected = await gather(cpu, prompts, max_tokens=64)
        await cpu.close()
        engine = engine_over(plan.model(loaded), loaded)
        got = await gather(engine, prompts, max_tokens=64)
        await engine.close()
        equal = [
            a.generated_token_ids.tolist() == b.generated_token_ids.tolist()
            for a, b in zip(expected, got, strict=True)
        ]
        gaps = [
            float(np.abs(a.generated_log_probs - b.generated_log_probs).max())
            for a, b, same in zip(expected, got, equal, strict=True)
            if same
        ]
        report[spec] = {
            "answers": len(equal),
            "equal_answers": sum(equal),
            "max_logprob_gap": max(gaps, default=None),
        }
        if not all(equal) or max(gaps) > MAX_LOGPROB_GAP:
            raise CheckError(f"the engines disagree on {spec}: {report[spec]}")
    return report


async def check_rollout(plan: Plan) -> dict[str, Any]:
    """Three captured turns; the weights change while the second is being generated."""
    loaded = load_model("tiny")
    engine = engine_over(plan.model(loaded), loaded)

    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}"
        async with server_over(engine, loaded, url) as (parts, client):
            messages: list[dict[str, Any]] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"Turn {turn}: what is the weather?"})
                made = engine.stats().generated_tokens
                body = {"messages": messages, "max_tokens": 200, "ignore_eos": True, "seed": turn}
                call = asyncio.create_task(
                    client.post("/rollouts/r/v1/chat/completions", json=body)
                )
                if turn == 1:
                    await tokens_made(engine, made + 20, call)
                    await engine.pause()
                    await engine.update_weights(change_weights, version=2)
                    await engine.unpause()
                reply = await call
                reply.raise_for_status()
                messages.append(reply.json()["choices"][0]["message"])
            rows = Collector(TokenSource(parts.store), parts.ledger).finalize("r")
    (row,) = rows
    versions = sorted(set(row.weight_versions[row.token_mask == 1].tolist()))
    report = {
        "turns": 3,
        "tokens": len(row.token_ids),
        "trainable_tokens": row.trainable_tokens,
        "weight_versions": versions,
        "reason": row.reason,
        "epoch_spanning_calls": parts.stager.epoch_span_count,
    }
    if row.reason or versions != [1, 2] or row.trainable_tokens != 600:
        raise CheckError(f"the captured rollout is not whole: {report}")
    return report


async def check_experts(plan: Plan) -> dict[str, Any]:
    """A mixture-of-experts model: routes of every position, none after a recompute."""
    loaded = load_model("tiny-moe")
    engine = engine_over(plan.model(loaded), loaded)
    await engine.set_weight_version(3)
    whole = await engine.generate(ask("whole", [5, 9, 17, 33], max_tokens=40))
    made = engine.stats().generated_tokens
    task = asyncio.create_task(engine.generate(ask("cut", [5, 9, 17, 33], max_tokens=400)))
    await tokens_made(engine, made + 8, task)
    await engine.pause()
    await engine.suspend("recompute")
    await engine.resume()
    await engine.unpause()
    cut = await task
    await engine.close()
    routes = whole.routing_indices
    report = {
        "routes_shape": None if routes is None else list(routes.shape),
        "routes_dtype": None if routes is None else str(routes.dtype),
        "routes_after_recompute": cut.routing_indices,
        "evictions": cut.num_evictions,
    }
    if report["routes_shape"] != [43, 2, 2] or cut.routing_indices is not None:
        raise CheckError(f"wrong routes: {report}")
    return report


async def check_prefixes(plan: Plan) -> dict[str, Any]:
    """Prefix caching round a refit: cleared, or kept and seen in the epochs; and in a rollout's
    rows, with the refit between the second turn and the third."""
    loaded = load_model("tiny")
    plain = engine_over(plan.model(loaded), loaded)
    await plain.update_weights(change_weights, version=2)
    fresh = await plain.generate(ask("fresh", PROMPT, max_tokens=16))
    await plain.close()
    report: dict[str, Any] = {}
    expected = {False: [[0, 2]], True: [[0, 1], [512, 2]]}
    for keep in (False, True):
        loaded = load_model("tiny")
        engine = engine_over(
            plan.model(loaded), loaded, prefix_caching=True, keep_prefixes_at_refit=keep
        )
        await engine.set_weight_version(1)
        await engine.generate(ask("first", PROMPT, max_tokens=16))
        again = await engine.generate(ask("again", PROMPT, max_tokens=16))
        await engine.update_weights(change_weights, version=2)
        after = await engine.generate(ask("after", PROMPT, max_tokens=16))
        hits = engine._loop.core._prefix_cache_hits
        name = "kept" if keep else "cleared"
        report[name] = {
            "engine": engine.info.engine,
            "hits": hits,
            "kv_epochs_before": [list(pair) for pair in again.kv_cache_epochs],
            "kv_epochs_after": [list(pair) for pair in after.kv_cache_epochs],
            "policy_epochs_after": [list(pair) for pair in after.policy_epochs],
            "gap_to_a_fresh_engine": gap_of(after, fresh),
            "rows": await rollout_rows(engine, loaded),
        }
        await engine.close()
        found = report[name]
        gap = found["gap_to_a_fresh_engine"]
        right = (gap is not None and gap <= MAX_LOGPROB_GAP) or keep
        rows_right = found["rows"][2]["kv_epochs"][0][1] == (3 if keep else 4)
        if found["kv_epochs_after"] != expected[keep] or hits != 1 + keep or not right:
            raise CheckError(f"a stale prefix is not told apart: {report}")
        if not rows_right or name not in found["rows"][2]["engine"]:
            raise CheckError(f"the rows do not say what became of the prefix: {report}")
    return report


def gap_of(one: Any, other: Any) -> float | None:
    """The largest difference of their log-probabilities; None if their ids differ."""
    if one.generated_token_ids.tolist() != other.generated_token_ids.tolist():
        return None
    return float(np.abs(one.generated_log_probs - other.generated_log_probs).max())


async def rollout_rows(engine: Any, loaded: Any) -> list[dict[str, Any]]:
    """Three captured turns, weights 3 for two of them and 4 for the last: what their rows say."""
    await engine.set_weight_version(3)
    with tempfile.TemporaryDirectory() as folder:
        async with server_over(engine, loaded, f"file://{folder}", version=None) as (parts, client):
            messages: list[dict[str, Any]] = []
            for turn in range(3):
                if turn == 2:
                    await engine.update_weights(change_weights, version=4)
                words = " ".join(str(i) for i in range(80))
                messages.append({"role": "user", "content": f"{turn} {words}"})
                body = {"messages": messages, "max_tokens": 8, "ignore_eos": True}
                reply = await client.post("/rollouts/p/v1/chat/completions", json=body)
                reply.raise_for_status()
                messages.append(reply.json()["choices"][0]["message"])
            rows = TokenSource(parts.store).fetch_rows(parts.store.keys("staged"))
    rows.sort(key=lambda row: row.call.prev_len)
    return [
        {
            "prompt_tokens": row.call.prev_len + len(row.call.token_ids_delta) - 8,
            "policy_epochs": [list(pair) for pair in row.evidence.policy_epochs],
            "kv_epochs": [list(pair) for pair in row.evidence.kv_cache_epochs],
            "engine": row.evidence.engine,
        }
        for row in rows
    ]


async def check_colocated(plan: Plan) -> dict[str, Any]:
    """A worker over a model that training shares: graph managers made later, captured, given back
    and captured again; the same answers as the CPU engine's."""
    loaded = load_model("tiny")
    prompts = [[5, 9, 17, 33], [7, 8], [40, 41, 42]]
    cpu = MegatronCpuEngine(loaded.model, loaded.info, loaded.detokenize)
    expected = await gather(cpu, prompts, max_tokens=32)
    await cpu.close()
    graphs = {} if plan.rehearse else {"inference_cuda_graph_scope": "block", "num_cuda_graphs": 2}
    config = parse_generation_config(
        {
            "colocated": True,
            "max_new_tokens": 32,
            "stop_token_ids": [],
            "megatron": {
                "max_sequence_length": 512,
                "max_requests": 8,
                "use_coordinator": False,
                **graphs,
            },
        }
    )
    model = plan.model(loaded)
    worker = MegatronGenerationWorker(loaded, config, model=model)
    data = {
        "input_ids": torch.zeros(3, 4, dtype=torch.int64),
        "input_lengths": torch.tensor([len(ids) for ids in prompts]),
    }
    for row, ids in enumerate(prompts):
        data["input_ids"][row, : len(ids)] = torch.tensor(ids)
    counts: list[int] = []
    equal: list[bool] = []
    try:
        for _ in range(2):
            await asyncio.to_thread(worker.prepare_for_generation)
            counts.append(worker.get_inference_cuda_graph_capture_count())
            out = await asyncio.to_thread(lambda: worker.generate(data=data, greedy=True))
            for row, (ids, result) in enumerate(zip(prompts, expected, strict=True)):
                total = int(out["unpadded_sequence_lengths"][row])
                got = out["output_ids"][row, len(ids) : total].tolist()
                equal.append(got == result.generated_token_ids.tolist())
            await asyncio.to_thread(worker.finish_generation)
            counts.append(worker.get_inference_cuda_graph_capture_count())
    finally:
        await asyncio.to_thread(worker.shutdown)
    report = {"graphs_awake_and_asleep": counts, "equal_answers": sum(equal), "answers": len(equal)}
    captured = plan.rehearse or (counts[0] > 0 and counts[2] > 0)
    if not all(equal) or not captured or counts[1] or counts[3]:
        raise CheckError(f"the colocated worker is wrong: {report}")
    return report
