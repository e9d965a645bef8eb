"""The step of the GPU check that measures throughput with the capture off and on."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
from gpu_check_parts import CheckError, Plan, engine_over, server_over

from tokenplane.engine_adapter.dynamic.gpu_model import build_gpu_gpt
from tokenplane.engine_adapter.models.megatron_build import GptShape
from tokenplane.engine_adapter.models.source import load_model

CONCURRENCY = 32
TURNS = 4
MIN_RATIO = 0.98
ONE_TOKEN = "q"
"""Of the tiny model's tokenizer: repeated n times it gives n tokens."""
LOADS = ("spread", "in_step")
"""Clients whose answers differ in length, so that they end and ask at different times: the limit
is for these. And clients whose answers are all equally long: the engine stands still while all of
them are answered."""


SHAPES = {
    "4b": GptShape(
        num_layers=36,
        hidden_size=2560,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=9728,
        layernorm_epsilon=1e-6,
        vocab_size=0,
        max_sequence_length=2048,
        rotary_base=1_000_000,
        tied_embeddings=False,
    ),
    "small": GptShape(
        num_layers=16,
        hidden_size=1024,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=64,
        ffn_hidden_size=2816,
        layernorm_epsilon=1e-5,
        vocab_size=0,
        max_sequence_length=2048,
        rotary_base=10000,
        tied_embeddings=False,
    ),
}
"""By name, without the vocabulary, which is the tiny tokenizer's. One has the layers of Qwen3-4B:
the limit is for this. The other is so small that a step takes hardly longer than its Python, which
shows what a captured call costs."""


async def measure_throughput(plan: Plan, name: str) -> dict[str, Any]:
    """Chat completions at concurrency 32, capture off and on in turns, with each of ``LOADS``."""
    loaded = load_model("tiny")
    shape = replace(SHAPES[name], vocab_size=loaded.info.vocab_size)
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
    loads: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with server_over(engine, loaded, f"file://{folder}") as (parts, client):
            await one_round(plan, client, "spread", "on", "warm")
            warm_s = time.monotonic() - began - built_s
            share_s = plan.left_s() / len(plan.loads)
            for number, load in enumerate(plan.loads):
                end_s = share_s * (len(plan.loads) - 1 - number)
                loads[load] = await measure_load(plan, client, load, end_s)
            staged = parts.stager.staged_count
            failures = parts.failures.counts()
    report = {
        "model": "tiny" if plan.rehearse else name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "cuda_graphs": "none" if plan.rehearse else plan.graphs,
        "switch_interval_s": plan.switch_interval_s,
        "engine_build_s": round(built_s, 2),
        "warm_round_s": round(warm_s, 2),
        "concurrency": CONCURRENCY,
        "answers_per_round": TURNS * CONCURRENCY,
        "mean_answer_tokens": plan.answer_tokens,
        "loads": loads,
        "staged_calls": staged,
        "capture_failures": failures,
    }
    check_captured(staged, 1 + sum(len(load["pair_ratios"]) for load in loads.values()), failures)
    spread = loads.get("spread", {"ratio_of_medians": 1.0})
    if name == "4b" and spread["ratio_of_medians"] < MIN_RATIO and not plan.rehearse:
        raise CheckError(f"capture costs too much: {report}")
    return report


def check_captured(staged: int, rounds: int, failures: Mapping[str, int]) -> None:
    """Whether every call of the ``rounds`` with capture was captured: an answer that was given
    without it is a cheap one.

    Raises: CheckError.
    """
    asked = rounds * TURNS * CONCURRENCY
    if failures or staged != asked:
        raise CheckError(f"{staged} of {asked} calls were captured, and failed: {dict(failures)}")


async def measure_load(
    plan: Plan, client: httpx.AsyncClient, load: str, keep_s: float
) -> dict[str, Any]:
    """Pairs of rounds with the capture off and on, first the one and then the other.

    As many as the plan says, or as fit while ``keep_s`` seconds of its time are left.
    """
    rates: dict[str, list[float]] = {"off": [], "on": []}
    prompts: dict[str, list[int]] = {"off": [], "on": []}
    pair_s = 0.0
    for number in range(plan.pairs):
        if number and plan.left_s() - keep_s < 1.2 * pair_s:
            break
        began = time.monotonic()
        for capture in ("off", "on") if number % 2 else ("on", "off"):
            rate, read = await one_round(plan, client, load, capture, str(number))
            rates[capture].append(rate)
            prompts[capture].append(read)
            print(f"{load}, capture {capture}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
        pair_s = time.monotonic() - began
    medians = {name: statistics.median(values) for name, values in rates.items()}
    tokens_per_call = statistics.mean(_shares(load)) * plan.answer_tokens
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    read_ratio = sum(prompts["on"]) / sum(prompts["off"])
    if abs(read_ratio - 1) > 0.01:
        raise CheckError(f"rounds are not alike: prompt tokens on to off {read_ratio:.3f}")
    return {
        "prompt_tokens_ratio": round(read_ratio, 4),
        "tokens_per_s": {name: [round(x, 1) for x in values] for name, values in rates.items()},
        "median_tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "ratio_of_medians": round(medians["on"] / medians["off"], 4),
        "ms_per_captured_call": round(
            1000 * tokens_per_call * (1 / medians["on"] - 1 / medians["off"]), 2
        ),
        "pair_ratios": [round(x, 4) for x in ratios],
    }


async def one_round(
    plan: Plan, client: httpx.AsyncClient, load: str, capture: str, name: str
) -> tuple[float, int]:
    """Four answers to each of 32 clients, with one of ``LOADS``.

    Returns: tokens generated per second, and the tokens of all prompts together.

    Without capture the client sends back a text of as many tokens as the answer had. The answer's
    own text, of random ids, makes far more tokens when it is tokenized again, and the prompts
    without capture would be the longer ones: both kinds of round then read equally many tokens.
    """

    prompts = 0
    shares = _shares(load)

    async def talk(index: int) -> int:
        nonlocal prompts
        base = f"/rollouts/{load}-{capture}-{name}-{index}" if capture == "on" else ""
        messages: list[dict[str, Any]] = []
        total = 0
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{index} {turn} " + "abc " * 10})
            reply = await client.post(
                f"{base}/v1/chat/completions",
                json={
                    "messages": messages,
                    "max_tokens": int(plan.answer_tokens * shares[TURNS * index + turn]),
                    "ignore_eos": True,
                    "seed": index,
                },
            )
            reply.raise_for_status()
            values = reply.json()
            message, usage = values["choices"][0]["message"], values["usage"]
            if capture == "off":
                message["content"] = ONE_TOKEN * usage["completion_tokens"]
            messages.append(message)
            total += usage["completion_tokens"]
            prompts += usage["prompt_tokens"]
        return total

    began = time.monotonic()
    tokens = sum(await asyncio.gather(*(talk(i) for i in range(CONCURRENCY))))
    return tokens / (time.monotonic() - began), prompts


def _shares(load: str) -> list[float]:
    """Length of each client's answers, in turn, as a share of the mean."""
    if load == "in_step":
        return [1.0] * (TURNS * CONCURRENCY)
    return [(4 + (5 * i + 3 * turn) % 9) / 8 for i in range(CONCURRENCY) for turn in range(TURNS)]
