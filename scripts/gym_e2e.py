"""The whole NeMo-Gym stack against our server: 3 tasks, 2 rollouts each, 6 verified rows.

    gym_e2e.py --out FOLDER [--model scripted|smollm2|tiny] [--ledger ours|gym]

Starts an engine (`tokenplane serve`, or the same server over a scripted engine), Gym's head, model,
agent and resources servers in an environment of their own (Python 3.13), lets `gym eval run` roll
out example_multi_step, and collects. FOLDER keeps the store, Gym's rollouts file, the rows as
Parquet, what the engine itself logged, and all logs.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gym_e2e_processes as processes
import gym_env
from bootstrap import ROOT, VENV, SetupError

TASKS, REPEATS = 3, 2
READY_S = 600.0
ROLLOUTS_S = 1500.0
START_ATTEMPTS = 3
RAY_TOO_SLOW = "The current node timed out during startup"
MARKER = ".tokenplane-gym-e2e"
"""Lies in every folder that this script made, and that it may therefore empty."""


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    url: str
    model: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gym_e2e", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="emptied first")
    parser.add_argument("--model", default="scripted", choices=("scripted", "smollm2", "tiny"))
    parser.add_argument("--ledger", default="ours", choices=processes.LEDGERS)
    options = parser.parse_args(argv)
    os.environ.setdefault("UV_HTTP_TIMEOUT", "300")
    try:
        return run(options.out.absolute(), options.model, options.ledger)
    except (OSError, SetupError, subprocess.SubprocessError) as error:
        print(f"gym_e2e: {error}", file=sys.stderr)
        return 1


def run(out: Path, model: str, ledger: str) -> int:
    """0 if every rollout gives a verified row that is what the engine saw."""
    python = gym_env.make_gym_env(gym_env.FULL)
    prepare(out)
    packages = next((python.parents[1] / "lib").glob("python3.*/site-packages"))
    data = packages / "resources_servers" / processes.RESOURCES_SERVER / "data" / "example.jsonl"
    token = secrets.token_hex(16)
    environment = processes.gym_environment(python, token)
    port = processes.free_port()
    processes.link_environments(out, python)
    with running_engine(out, model, data) as engine:
        config = processes.gym_config(
            out, engine=f"{engine.url}/v1", model=engine.model, model_port=port, ledger=ledger
        )
        start: list[str | Path] = [
            *(python.parent / "gym", "env", "start", "--model-type", "vllm_model"),
            *("--resources-server", processes.RESOURCES_SERVER, "--config", config),
        ]
        with running_gym(start, out, environment):
            say(f"rolling out {TASKS} tasks, {REPEATS} times each")
            roll_out(python, out, config, data, environment)
            say("collecting")
            return collect(out, f"http://127.0.0.1:{port}", token)


def prepare(out: Path) -> None:
    """An empty folder, whose former content is removed only if this script made it.

    Raises:
        SetupError: the folder holds something else.
    """
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise SetupError(f"{out} is not empty and not an earlier run's")
    shutil.rmtree(out, ignore_errors=True)
    (out / "logs").mkdir(parents=True)
    (out / MARKER).touch()


@contextmanager
def running_engine(out: Path, model: str, data: Path) -> Iterator[Engine]:
    """The engine, ready; an orderly end of it when the context ends."""
    store, log = (out / "store").as_uri(), out / "logs" / "engine.log"
    tool: list[str | Path]
    if model == "scripted":
        tool = [VENV / "bin" / "python", ROOT / "scripts" / "gym_e2e_engine.py", "--tasks", data]
    else:
        tool = [VENV / "bin" / "tokenplane", "serve", "--model", model]
        tool += ["--max-answer-tokens", "48"]
    say(f"starting the engine ({model})")
    command = [*tool, "--store", store, "--engine-log", out / "engine.jsonl"]
    with processes.running(command, log, cwd=out) as process:
        line = processes.wait_for_line(process, log, "tokenplane: ready http", READY_S)
        url = line.partition("ready ")[2].split()[0]
        yield Engine(url, "tiny" if model == "scripted" else model)


@contextmanager
def running_gym(
    command: Sequence[str | Path], out: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    """Gym's servers, all of them ready.

    Ray allows its own agents 15 s to start, whatever it is told; on a busy machine they miss that,
    and only a new attempt helps.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        log = out / "logs" / f"gym-servers-{attempt}.log"
        say("starting NeMo-Gym's servers")
        with processes.running(command, log, cwd=out, env=environment) as servers:
            try:
                processes.wait_for_line(servers, log, "servers ready! Polling", READY_S)
            except SetupError:
                if attempt == START_ATTEMPTS or RAY_TOO_SLOW not in log.read_text(errors="replace"):
                    raise
                say("Ray did not start in time")
                continue
            yield
            return


def roll_out(
    python: Path, out: Path, config: Path, data: Path, environment: dict[str, str]
) -> None:
    """Gym's own collector, to its end.

    Raises:
        SetupError: it failed; names its log.
    """
    command: list[str | Path] = [
        *(python.parent / "gym", "eval", "run", "--no-serve", "--agent", processes.AGENT),
        *("--input", data, "--output", out / "rollouts.jsonl", "--config", config),
        *("--limit", str(TASKS), "--num-repeats", str(REPEATS), "--concurrency", "4"),
    ]
    log = out / "logs" / "gym-rollouts.log"
    started = time.monotonic()
    with processes.running(command, log, cwd=out, env=environment) as process:
        process.wait(timeout=ROLLOUTS_S)
    if process.returncode != 0 or not (out / "rollouts.jsonl").exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise SetupError(f"gym eval run ended with status {process.returncode}; {log}:\n{tail}")
    say(f"rolled out in {time.monotonic() - started:.0f} s")


def collect(out: Path, gym: str, token: str) -> int:
    """`tokenplane collect`, then the rows against what the engine logged itself."""
    command: list[str | Path] = [
        *(VENV / "bin" / "tokenplane", "collect", "--gym", gym, "--store", out / "store"),
        *("--rollouts", out / "rollouts.jsonl", "--parquet", out / "rows.parquet"),
    ]
    environment = {**os.environ, processes.CONTROL_TOKEN_ENV: token}
    status = subprocess.run(command, cwd=out, env=environment).returncode
    from gym_e2e_check import check_rows

    problems = check_rows(out / "rows.parquet", out / "engine.jsonl", expected=TASKS * REPEATS)
    for problem in problems:
        print(f"gym_e2e: {problem}", file=sys.stderr)
    if not problems:
        print(f"all {TASKS * REPEATS} rows are, id by id, what the engine saw and sampled")
    return 1 if status or problems else 0


def say(text: str) -> None:
    """One line of progress."""
    print(f"gym_e2e: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
