"""``tokenplane demo``: agents roll out on a real model; all they said is staged and proven."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenplane.schemas.errors import ConfigError
from tokenplane.tools.command_frame import coded_errors, command_parser
from tokenplane.tools.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from tokenplane.schemas.training_row import TrainingRow
    from tokenplane.tools.demo.agent import Agent
    from tokenplane.tools.demo.server import DemoServer

_OURS = ("store", "rows.parquet", "summary.json", "engine.jsonl", "server.log")
_REFIT_SCALE = 1.002
_EXTRA_TURNS = 5
"""Turns that may be added where no answer was long enough for the refit to catch it."""
_ANSWER_TIMEOUT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run, and where to leave it."""
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for the results (demo-out)"
    )
    parser.add_argument("--model", default="smollm2", help="as for `tokenplane serve` (smollm2)")
    parser.add_argument("--turns", type=int, default=3, help="model calls per rollout (3)")
    parser.add_argument("--max-tokens", type=int, default=40, help="of one answer (40)")


@coded_errors("demo")
def main(argv: list[str] | None = None) -> int:
    """0: everything that the summary claims holds; 1: something does not."""
    parser = command_parser("demo", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.turns < 1 or args.max_tokens < 1:
        parser.error("--turns and --max-tokens are at least 1")
    if find_spec("openai") is None:
        raise ConfigError("the demo needs the extra demo", expected="the openai package")
    prepare_folder(args.out)
    return Demo(args.out, args.model, args.turns, args.max_tokens).run()


def prepare_folder(out: Path) -> None:
    """Make the folder, and remove what an earlier demo left in it.

    Raises:
        ConfigError: the folder holds something that no demo wrote; nothing is touched then.
    """
    out.mkdir(parents=True, exist_ok=True)
    strange = sorted(path.name for path in out.iterdir() if path.name not in _OURS)
    if strange:
        raise ConfigError("the folder holds other things", key=str(out), got=strange[:5])
    for name in _OURS:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class Demo:
    """One run into one folder."""

    def __init__(self, out: Path, model: str, turns: int, max_tokens: int) -> None:
        from rich.console import Console

        self._out = out
        self._model = model
        self._turns = turns
        self._max_tokens = max_tokens
        self._progress = Console(stderr=True, highlight=False)
        self._started = time.monotonic()

    def run(self) -> int:
        """Serve, roll out, collect, check, report."""
        from tokenplane.tools.demo.server import DemoServer

        store, log = self._out / "store", self._out / "engine.jsonl"
        self._say(f"starting the server with {self._model}")
        with DemoServer(
            [
                *("--model", self._model, "--store", str(store), "--weight-version", "0"),
                *("--allow-weight-edit", "--engine-log", str(log)),
            ],
            self._out / "server.log",
            self._say,
        ) as server:
            self._say(f"ready: {server.url}")
            agents = asyncio.run(self._roll_out(server))
            stage_ms = {
                row["model_call_id"]: row["stage_ms"]
                for name in agents
                for row in server.get(f"/rollouts/{name}/rows")["rows"]
            }
            self._say("collecting the rollouts, from another process than the server's")
            rows = self._collect(store, list(agents))
        return self._report(agents, rows, stage_ms)

    async def _roll_out(self, server: DemoServer) -> dict[str, Agent]:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        from tokenplane.tools.demo.agent import TASKS, Agent, refit_in_flight

        refit = asyncio.create_task(refit_in_flight(server, 1, _REFIT_SCALE))
        async with contextlib.AsyncExitStack() as clients:
            agents = {}
            for at, questions in enumerate(TASKS):
                name = f"rollout-{at}"
                client = AsyncOpenAI(
                    base_url=f"{server.url}/rollouts/{name}/v1",
                    api_key="none",
                    timeout=_ANSWER_TIMEOUT_S,
                    max_retries=0,
                    # Loopback is not behind the proxy that the environment may name.
                    http_client=DefaultAsyncHttpxClient(trust_env=False),
                )
                await clients.enter_async_context(client)
                agents[name] = Agent(client, self._model, questions, self._max_tokens)
            try:
                await asyncio.gather(*(self._rollout(name, a) for name, a in agents.items()))
                first = next(iter(agents.values()))
                for _ in range(_EXTRA_TURNS):
                    if refit.done():
                        break
                    self._say("no answer was long enough for the refit: one more turn")
                    first.max_tokens *= 2
                    await first.take_turn()
            finally:
                if not refit.done():
                    refit.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await refit
        return agents

    async def _rollout(self, name: str, agent: Agent) -> None:
        for number in range(1, self._turns + 1):
            turn = await agent.take_turn()
            self._say(f"{name}: turn {number} of {self._turns} answered, {turn.capture}")

    def _collect(self, store_path: Path, names: list[str]) -> list[TrainingRow]:
        from tokenplane.capture import Collector, Ledger, RolloutOutcome
        from tokenplane.staging import TokenSource, open_store

        with open_store(str(store_path)) as store:
            collector = Collector(TokenSource(store), Ledger(store))
            outcomes = [RolloutOutcome(name, reward=1.0, group_id="demo") for name in names]
            rows = collector.finalize_group(outcomes)
            collector.publish(rows, store)
        return rows

    def _report(
        self, agents: dict[str, Agent], rows: list[TrainingRow], stage_ms: dict[str, float]
    ) -> int:
        from tokenplane.schemas.epochs import spans_epochs
        from tokenplane.tools.demo.checks import replay_elsewhere, rows_equal_engine
        from tokenplane.tools.demo.report import DemoSummary, show_rollout
        from tokenplane.tools.export_parquet import export
        from tokenplane.tools.rollout_view import load_rollout
        from tokenplane.tools.store_reading import find_rollouts, open_for_reading
        from tokenplane.tools.wide_console import open_console

        store_path, parquet = self._out / "store", self._out / "rows.parquet"
        with open_for_reading(str(store_path)) as store:
            found = sorted(find_rollouts(store).items(), key=lambda item: (len(item[0]), item[0]))
            views = [load_rollout(store, name, keys) for name, keys in found]
            export(store, parquet, "rows", set())
        self._say("comparing the staged rows with what the engine saw, id by id")
        differences = rows_equal_engine(views, self._out / "engine.jsonl")
        self._say("replaying from disk in a fresh process")
        identical, said = replay_elsewhere(store_path, parquet)
        turns = [turn for agent in agents.values() for turn in agent.turns]
        calls = [call for view in views for call in view.calls]
        summary = DemoSummary(
            calls=len(turns),
            staged=len(calls),
            capture_failed=sum(turn.capture != "staged" for turn in turns)
            + sum(len(view.failures) for view in views),
            rollouts=len(agents),
            training_rows=sum(row.sample_mask for row in rows),
            prefix_exact=not differences,
            spanning_calls=sum(spans_epochs(c.row.evidence.policy_epochs) for c in calls),
            replay_identical=identical,
            row_tokens=sum(len(row.token_ids) for row in rows),
            trainable_tokens=sum(row.trainable_tokens for row in rows),
            stage_ms_p50=round(statistics.median(stage_ms.values()), 3),
        )
        text = json.dumps(summary.to_json(), indent=2)
        (self._out / "summary.json").write_text(text + "\n")
        console = open_console()
        for view in views:
            show_rollout(console, view, stage_ms)
        console.print(text)
        for trouble in [*differences, *([] if identical else [said])]:
            self._say(trouble)
        missing = summary.shortcomings()
        if missing:
            self._say(f"NOT as it should be: {', '.join(missing)}")
            return EXIT_FAILED
        self._say(f"done; see {self._out}/. Go on with:")
        for words in (f"replay {store_path} {next(iter(agents))}", f"audit {store_path}"):
            self._progress.print(f"  {_own_command()} {words}", style="bold", soft_wrap=True)
        return 0

    def _say(self, text: Any) -> None:
        elapsed = time.monotonic() - self._started
        self._progress.print(f"[{elapsed:6.1f} s] {text}", markup=False, soft_wrap=True)


def _own_command() -> str:
    """How this installation's command can be called from here."""
    script = Path(sys.executable).with_name("tokenplane")
    found = shutil.which("tokenplane")
    if found is not None and Path(found) == script:
        return "tokenplane"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


if __name__ == "__main__":
    raise SystemExit(main())
