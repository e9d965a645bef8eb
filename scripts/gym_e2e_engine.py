"""`tokenplane serve` with a scripted engine: it answers example_multi_step's tasks as it should.

    gym_e2e_engine.py --store URL --tasks FILE --engine-log FILE

Everything but the model is what `tokenplane serve` runs: server, renderer, resolver, splice, tool
parser, stager, store. A small model calls no tool twice in a row; this one makes four calls a task.
It reads its prompt's ids back as text to know the task and how far it has come.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from tokenplane.engine_adapter.engine import GenerationRequest
from tokenplane.engine_adapter.engine_log import LoggedEngine
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.engine_adapter.scripted_engine import ScriptedEngine
from tokenplane.engine_adapter.server.app import create_app
from tokenplane.engine_adapter.server.config import parse_config
from tokenplane.engine_adapter.server.parts import build_parts
from tokenplane.engine_adapter.tokenizer_artifact import store_tokenizer
from tokenplane.staging.open_store import open_store

CONTEXT_TOKENS = 65536
"""The tiny tokenizer needs about a token per byte, and the tasks have long instructions."""
STEP_S = 0.0005
ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>"


@dataclass(frozen=True)
class Task:
    """One line of the data file, as far as the answers need it."""

    question: str
    synonyms: tuple[str, ...]
    values: tuple[int, ...]


def read_tasks(path: Path) -> list[Task]:
    """The tasks of example_multi_step."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Task(
            line["responses_create_params"]["input"][-1]["content"],
            tuple(line["expected_synonyms"]),
            tuple(line["expected_synonym_values"]),
        )
        for line in lines
    ]


def answer(tasks: list[Task], prompt: str) -> str:
    """What a good model says next: each value, then all of them, then a sentence."""
    (task,) = (task for task in tasks if task.question in prompt)
    turn = prompt.count(ASSISTANT) - 1
    if turn < len(task.synonyms):
        return _call("get_synonym_value", {"synonym": task.synonyms[turn]})
    if turn == len(task.synonyms):
        return _call("extract_synonym_values", {"synonym_values": list(task.values)})
    return f"The values are {', '.join(map(str, task.values))}."


def _call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def serve(store_url: str, tasks: list[Task], engine_log: Path) -> None:
    """Serve until a signal."""
    loaded = load_model("tiny")

    def script(request: GenerationRequest) -> Iterator[tuple[int, float]]:
        prompt = loaded.tokenizer.decode(request.prompt_token_ids.tolist())
        ids = loaded.tokenizer(answer(tasks, prompt) + END, add_special_tokens=False)["input_ids"]
        return ((token, -0.125 * (1 + at % 7)) for at, token in enumerate(ids))

    info = replace(loaded.info, max_sequence_length=CONTEXT_TOKENS)
    engine = ScriptedEngine(info, script, loaded.detokenize, step_s=STEP_S)
    with open_store(store_url) as store, socket.create_server(("127.0.0.1", 0)) as listener:
        store_tokenizer(store, loaded.tokenizer)
        await engine.set_weight_version(0)
        parts = build_parts(
            parse_config({"model": "tiny", "store": store_url}),
            engine=LoggedEngine(engine, engine_log),
            tokenizer=loaded.tokenizer,
            generation_config=loaded.generation_config,
            detokenize=loaded.detokenize,
            store=store,
        )
        try:
            server = _Server(
                uvicorn.Config(create_app(parts), lifespan="off", log_config=None, ws="none")
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, _stopper(server))
            print(f"tokenplane: ready http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
            await server.serve([listener])
        finally:
            await parts.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ours end it in order


def _stopper(server: uvicorn.Server) -> Callable[[], None]:
    def stop() -> None:
        server.should_exit = True

    return stop


def main() -> int:
    parser = argparse.ArgumentParser(prog="gym_e2e_engine", description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--tasks", required=True, type=Path)
    parser.add_argument("--engine-log", required=True, type=Path)
    options = parser.parse_args()
    asyncio.run(serve(options.store, read_tasks(options.tasks), options.engine_log))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
