"""What `make gpu-check` measures on one GPU: agreement, capture over a refit, routes, throughput.

Writes `gpu-check.json` and `gpu-check.md` into `--out`. Exit status 1 if a check fails. With
`--rehearse` the same steps run on the CPU under the tests' facade, with small numbers that mean
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from tokenplane.capture import Collector
from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine
from tokenplane.engine_adapter.dynamic.attention import install_torch_attention
from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.dynamic.gpu_model import (
    GraphScope,
    build_gpu_gpt,
    gpu_twin,
    require_gpu_process,
)
from tokenplane.engine_adapter.dynamic.settings import DynamicSettings
from tokenplane.engine_adapter.engine import Engine, GenerationRequest, SamplingParams
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.models.megatron_build import GptShape
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.engine_adapter.server.app import create_app
from tokenplane.engine_adapter.server.config import parse_config
from tokenplane.engine_adapter.server.parts import ServerParts, build_parts
from tokenplane.staging import open_store
from tokenplane.staging.token_source import TokenSource

CONCURRENCY = 32
MAX_LOGPROB_GAP = 1e-4
MIN_RATIO = 0.98
_PACKAGES = ("megatron-core", "torch", "transformers", "triton", "pyarrow", "apsw", "numpy")


@dataclass(frozen=True)
class Plan:
    """How much each step does."""

    rehearse: bool
    answer_tokens: int
    pairs: int
    graphs: GraphScope
    switch_interval_s: float = 0.0005
    throughput_s: float = 150.0
    """No pair of rounds begins after this."""

    def model(self, loaded: LoadedModel) -> torch.nn.Module:
        """Where the tiny model runs."""
        return loaded.model if self.rehearse else gpu_twin(loaded.model)


def engine_over(model: torch.nn.Module, loaded: LoadedModel, **settings: Any) -> Any:
    """A dynamic engine, sized for these checks unless told otherwise."""
    given = {"max_sequence_length": 2048, "max_live_requests": 64, "block_tokens": 256} | settings
    return MegatronDynamicEngine(
        model, loaded.info, loaded.detokenize, settings=DynamicSettings(**given)
    )


def ask(name: str, ids: list[int], **sampling: Any) -> GenerationRequest:
    """A request that ignores end ids."""
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | sampling))
    return GenerationRequest(name, np.array(ids, dtype=np.int32), params)


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
            raise AssertionError(f"the engines disagree on {spec}: {report[spec]}")
    return report


async def gather(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """All answers, asked for at once."""
    tasks = [engine.generate(ask(f"p{i}", ids, **sampling)) for i, ids in enumerate(prompts)]
    return list(await asyncio.gather(*tasks))


@asynccontextmanager
async def server_over(
    engine: Engine, loaded: LoadedModel, url: str
) -> AsyncIterator[tuple[ServerParts, httpx.AsyncClient]]:
    """The OpenAI server in this process, over a store at ``url``."""
    store = open_store(url)
    parts = build_parts(
        parse_config({"model": "tiny", "max_in_flight": 256}),
        engine=engine,
        tokenizer=loaded.tokenizer,
        generation_config=loaded.generation_config,
        detokenize=loaded.detokenize,
        store=store,
    )
    await engine.set_weight_version(1)
    transport = httpx.ASGITransport(create_app(parts))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://server", timeout=120
    ) as client:
        yield parts, client
    await parts.close()
    store.close()


async def check_rollout(plan: Plan) -> dict[str, Any]:
    """Three captured turns; the weights change while the second is being generated."""
    loaded = load_model("tiny")
    engine = engine_over(plan.model(loaded), loaded)

    def change(model: torch.nn.Module) -> None:
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.02 if index % 2 else 0.97)

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
                    while engine.stats().generated_tokens < made + 20:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                    await engine.pause()
                    await engine.update_weights(change, version=2)
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
        raise AssertionError(f"the captured rollout is not whole: {report}")
    return report


async def check_experts(plan: Plan) -> dict[str, Any]:
    """A mixture-of-experts model: routes of every position, none after a recompute."""
    loaded = load_model("tiny-moe")
    engine = engine_over(plan.model(loaded), loaded)
    await engine.set_weight_version(3)
    whole = await engine.generate(ask("whole", [5, 9, 17, 33], max_tokens=40))
    task = asyncio.create_task(engine.generate(ask("cut", [5, 9, 17, 33], max_tokens=400)))
    made = engine.stats().generated_tokens
    while engine.stats().generated_tokens < made + 8:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
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
        raise AssertionError(f"wrong routes: {report}")
    return report


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
            ends = time.monotonic() + plan.throughput_s
            for number in range(plan.pairs):
                if number and time.monotonic() > ends:
                    break
                order = ("off", "on") if number % 2 else ("on", "off")
                for capture in order:
                    rate = await one_round(plan, client, capture, str(number))
                    rates[capture].append(rate)
                    print(f"capture {capture}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
            staged = parts.stager.staged_count
            failures = parts.failures.counts()
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "cuda_graphs": "none" if plan.rehearse else plan.graphs,
        "switch_interval_s": plan.switch_interval_s,
        "engine_build_s": round(built_s, 2),
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
        raise AssertionError(f"capture failed: {failures}")
    if report["ratio_of_medians"] < MIN_RATIO and not plan.rehearse:
        raise AssertionError(f"capture costs too much: {report}")
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


CHECKS: dict[str, Callable[[Plan], Any]] = {
    "agreement": check_agreement,
    "rollout": check_rollout,
    "experts": check_experts,
    "throughput": measure_throughput,
}


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    found["attention"] = install_torch_attention()
    return found


def to_markdown(report: dict[str, Any]) -> str:
    """The report as a short page."""
    lines = ["# gpu-check", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in report["versions"].items()]
    for name, check in report["checks"].items():
        lines += ["", f"## {name}: {check['status']} ({check['seconds']} s)", "", "```json"]
        lines += [json.dumps(check["result"], indent=1), "```"]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """0 if every check passed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check-out"))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", action="append", choices=tuple(CHECKS))
    parser.add_argument("--graphs", default="block", choices=("none", "layer", "block"))
    parser.add_argument("--pairs", type=int, default=12, help="rounds of throughput, off and on")
    parser.add_argument("--switch-interval-s", type=float, default=0.0005)
    args = parser.parse_args(argv)
    if args.rehearse:
        from tests.dynamic import cpu_facade

        cpu_facade.install()
        plan = Plan(True, answer_tokens=8, pairs=2, graphs="none")
    elif torch.cuda.is_available():
        require_gpu_process()
        plan = Plan(False, 128, args.pairs, args.graphs, args.switch_interval_s)
    else:
        print("gpu_check: no CUDA device (--rehearse runs the steps on the CPU)", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"versions": versions(), "checks": {}}
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only or CHECKS:
        began = time.monotonic()
        try:
            result, status = asyncio.run(CHECKS[name](plan)), "passed"
        except Exception as error:  # noqa: BLE001 - the other checks still tell something
            traceback.print_exc()
            result, status = f"{type(error).__name__}: {error}", "failed"
        seconds = round(time.monotonic() - began, 1)
        report["checks"][name] = {"status": status, "seconds": seconds, "result": result}
        print(f"{name}: {status} in {seconds} s: {result}", flush=True)
        (args.out / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / "gpu-check.md").write_text(to_markdown(report))
    return int(any(check["status"] != "passed" for check in report["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
