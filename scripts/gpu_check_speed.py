"""The step of the GPU check that measures throughput with the capture off and on."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from typing import Any

import httpx
from gpu_check_parts import CheckError, Plan, engine_over, server_over

from tokenplane.engine_adapter.dynamic.gpu_model import build_gpu_gpt
from tokenplane.engine_adapter.models.megatron_build import GptShape
from tokenplane.engine_adapter.models.source import load_model

CONCURRENCY = 32
MIN_RATIO = 0.98


async def measure_throughput(plan: Plan) -> dict[str, Any]:
    """Chat completions at concurrency 32, capture off and on in turns."""
    loaded = load_model("tiny")
    shape = GptShape(
        num_layers=16,
        hidden_size=1024,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=64,
        ffn_hidden_size=2816,
        layernorm_epsilon=1e-5,
        vocab_size=loaded.info.vocab_size,
        max_sequence_length=2048,
        rotary_base=10000,
        tied_embeddings=False,
    )
    model = loaded.model if plan.rehearse else build_gpu_gpt(shape, graphs=plan.graphs)
    began = time.monotonic()
    engine = engine_over(
        model,
        loaded,
        max_sequence_length=1024,
        max_live_requests=CONCURRENCY,
        num_cuda_graphs=8,
        switch_interval_s=plan.switch_interval_s,
    )
    built_s = time.monotonic() - began
    rates: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        async with server_over(engine, loaded, f"file://{folder}") as (parts, client):
            await one_round(plan, client, "on", "warm")
            warm_s = time.monotonic() - began - built_s
            pair_s = 0.0
            for number in range(plan.pairs):
                if number and plan.left_s() < 1.2 * pair_s:
                    break
                pair_began = time.monotonic()
                order = ("off", "on") if number % 2 else ("on", "off")
                for capture in order:
                    rate = await one_round(plan, client, capture, str(number))
                    rates[capture].append(rate)
                    print(f"capture {capture}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
                pair_s = time.monotonic() - pair_began
            staged = parts.stager.staged_count
            failures = parts.failures.counts()
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "cuda_graphs": "none" if plan.rehearse else plan.graphs,
        "switch_interval_s": plan.switch_interval_s,
        "engine_build_s": round(built_s, 2),
        "warm_round_s": round(warm_s, 2),
        "concurrency": CONCURRENCY,
        "mean_answer_tokens": plan.answer_tokens,
        "answers_per_round": 4 * CONCURRENCY,
        "tokens_per_s": {name: [round(x, 1) for x in values] for name, values in rates.items()},
        "median_tokens_per_s": {n: round(statistics.median(v), 1) for n, v in rates.items()},
        "ratio_of_medians": round(
            statistics.median(rates["on"]) / statistics.median(rates["off"]), 4
        ),
        "pair_ratios": [round(x, 4) for x in ratios],
        "staged_calls": staged,
        "capture_failures": failures,
    }
    if failures:
        raise CheckError(f"capture failed: {failures}")
    if report["ratio_of_medians"] < MIN_RATIO and not plan.rehearse:
        raise CheckError(f"capture costs too much: {report}")
    return report


async def one_round(plan: Plan, client: httpx.AsyncClient, capture: str, name: str) -> float:
    """Tokens per second of four answers to each of 32 clients.

    Answers differ in length, so that clients end and ask at different times: were they in step, the
    engine would stand still while every one of them is being answered.
    """

    async def talk(index: int) -> int:
        base = f"/rollouts/{capture}-{name}-{index}" if capture == "on" else ""
        messages: list[dict[str, Any]] = []
        total = 0
        for turn in range(4):
            messages.append({"role": "user", "content": f"{index} {turn} " + "abc " * 10})
            length = plan.answer_tokens * (4 + (5 * index + 3 * turn) % 9) // 8
            reply = await client.post(
                f"{base}/v1/chat/completions",
                json={
                    "messages": messages,
                    "max_tokens": length,
                    "ignore_eos": True,
                    "seed": index,
                },
            )
            reply.raise_for_status()
            values = reply.json()
            messages.append(values["choices"][0]["message"])
            total += values["usage"]["completion_tokens"]
        return total

    began = time.monotonic()
    tokens = sum(await asyncio.gather(*(talk(i) for i in range(CONCURRENCY))))
    return tokens / (time.monotonic() - began)
