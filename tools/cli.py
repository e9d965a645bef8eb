"""The ``tokenplane`` command: finds the subcommand, imports only its module, and runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from tokenplane.tools.exit_status import EXIT_USAGE


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: the module whose ``main(argv) -> int`` it is, and one line about it."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command(
        "tokenplane.tools.demo.command",
        "roll out, stage, collect and check with a real small model",
    ),
    "serve": Command("tokenplane.tools.serve", "serve a model over the OpenAI API, with capture"),
    "collect": Command(
        "tokenplane.tools.collect", "verify a NeMo-Gym run and publish its training rows"
    ),
    "replay": Command(
        "tokenplane.tools.replay", "show a rollout turn by turn, or check published rows"
    ),
    "audit": Command("tokenplane.tools.audit", "how off-policy the rollouts are, and what failed"),
    "verify": Command("tokenplane.tools.verify", "re-verify every staged and published row"),
    "inspect": Command(
        "tokenplane.tools.inspecting.command", "look at one row, at a store, or at a chat template"
    ),
    "export": Command("tokenplane.tools.export_parquet", "write a partition as one Parquet file"),
    "gc": Command("tokenplane.tools.gc_command", "remove what is old, rollout by rollout"),
    "bench": Command("tokenplane.tools.bench.command", "measure the stores, or soak one"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0: done, 1: a check or the work failed, 2: wrong usage."""
    parser = _parser()
    parsed = parser.parse_args(argv)
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    module = import_module(COMMANDS[parsed.command].module)
    status: int = module.main(parsed.arguments)
    return status


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {c.summary}" for name, c in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tokenplane",
        description="The token data plane of agentic RL post-training.",
        epilog=f"commands:\n{listed}\n\n`tokenplane COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"tokenplane {version('tokenplane')}"
    )
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", choices=COMMANDS, help="one of those below"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
