"""Decode speed of the CPU engine: one forward for all requests, against one forward for each.

    python -m tokenplane.engine_adapter.cpu.bench --model tiny --concurrency 1 4 16

The second way (a context per request, taken in turn) is the obvious one over a stock GPTModel; it
runs here over the same kernels and caches, so the difference is batching alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from tokenplane.engine_adapter.cpu.batch import KVCache, make_plan
from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine
from tokenplane.engine_adapter.cpu.forward import StepForward
from tokenplane.engine_adapter.engine import GenerationRequest, SamplingParams
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.models.source import MODEL_SPECS, load_model
from tokenplane.engine_adapter.sampling import make_generator, sample_token


def main(argv: list[str] | None = None) -> int:
    """Print one JSON line per model and concurrency, the best of ``--rounds``."""
    parser = argparse.ArgumentParser(prog="python -m tokenplane.engine_adapter.cpu.bench")
    parser.add_argument("--model", choices=MODEL_SPECS, default="tiny")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    loaded = load_model(
        options.model,
        cache_dir=options.cache_dir,
        progress=lambda line: _write(sys.stderr, line),
    )
    for concurrency in options.concurrency:
        prompts = [
            [3 + (7 * i + 13 * j) % 250 for j in range(options.prompt_tokens)]
            for i in range(concurrency)
        ]
        speeds: dict[str, float] = {"batched": 0.0, "one_by_one": 0.0}
        for _ in range(options.rounds):
            total = concurrency * options.new_tokens
            # In turn, so that what else the machine does falls on both alike.
            work = (loaded, prompts, options.new_tokens, options.threads)
            batched = total / asyncio.run(_batched_s(*work))
            with ThreadPoolExecutor(1) as own:  # a thread of its own, as the engine has
                single = total / own.submit(_one_by_one_s, *work).result()
            speeds["batched"] = max(speeds["batched"], batched)
            speeds["one_by_one"] = max(speeds["one_by_one"], single)
        rounded = {name: round(speed, 1) for name, speed in speeds.items()}
        line = {"model": options.model, "concurrency": concurrency, "tokens_per_s": rounded}
        _write(sys.stdout, json.dumps(line))
    return 0


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def _sampling(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=1.0, seed=1, ignore_eos=True)


async def _batched_s(
    loaded: LoadedModel, prompts: list[list[int]], new_tokens: int, num_threads: int
) -> float:
    engine = MegatronCpuEngine(
        loaded.model, loaded.info, loaded.detokenize, num_threads=num_threads
    )
    began = time.perf_counter()
    await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(f"r{i}", np.array(prompt, np.int32), _sampling(new_tokens))
            )
            for i, prompt in enumerate(prompts)
        )
    )
    spent = time.perf_counter() - began
    await engine.close()
    return spent


def _one_by_one_s(
    loaded: LoadedModel, prompts: list[list[int]], new_tokens: int, num_threads: int
) -> float:
    forward = StepForward(loaded.model)
    sampling = _sampling(new_tokens)
    caches = [KVCache(len(prompt) + new_tokens) for prompt in prompts]
    pending = [list(prompt) for prompt in prompts]
    generators = [make_generator(sampling) for _ in prompts]
    torch.set_num_threads(num_threads)
    began = time.perf_counter()
    with torch.inference_mode():
        for _ in range(new_tokens):
            for index, cache in enumerate(caches):
                logits, _routes = forward.run(make_plan([(pending[index], cache, True)]))
                cache.commit(len(pending[index]))
                token, _log_prob = sample_token(logits[0], sampling, generators[index])
                pending[index] = [token]
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
