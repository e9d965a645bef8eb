"""``tokenplane verify contract``: our digests and models against a NeMo-Gym, bit by bit."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenplane.tools.command_frame import coded_errors, command_parser
from tokenplane.tools.exit_status import EXIT_FAILED

PACKAGE = "nemo_gym"
_GYM_SCRIPT = Path(__file__).with_name("contract_answers_gym.py")
_SHOWN = 5
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Check:
    """One operation, or one model: how often both sides were asked, and where they differ."""

    name: str
    asked: int = 0
    accepted: int = 0
    """Questions that both accepted, with the same answer."""
    differences: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where Gym is."""
    parser.add_argument(
        "--gym-source",
        required=True,
        type=Path,
        metavar="DIR",
        help=f"folder with {PACKAGE}/: a checkout, an unpacked wheel, or a site-packages",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="FILE",
        help="interpreter for Gym's code, with pydantic and orjson (default: this one)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


@coded_errors("verify contract")
def main(argv: list[str] | None = None) -> int:
    """0: everything is equal; 1: something differs, or Gym's code does not run."""
    parser = command_parser("verify contract", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    from tokenplane.tools.contract_questions import questions

    asked = list(questions())
    gym_version, theirs = ask_gym(args.gym_source, args.python, asked)
    checks = compare(asked, theirs)
    wrong = [check for check in checks if check.differences]
    if args.json:
        shown = {"gym": gym_version, "equal": not wrong, "checks": [asdict(c) for c in checks]}
        print(json.dumps(shown, indent=2))
    else:
        _print_checks(gym_version, checks)
    return EXIT_FAILED if wrong else 0


def ask_gym(
    source: Path, python: str, asked: Sequence[tuple[str, list[Any]]]
) -> tuple[str, list[dict[str, Any]]]:
    """Gym's version, and its answers in the order of the questions.

    Only the package itself is taken from ``source``; what it imports is the interpreter's.

    Raises:
        ConfigError: there is no such package, or its code does not run.
    """
    from tokenplane.schemas.errors import ConfigError

    package = source / PACKAGE if source.name != PACKAGE else source
    if not (package / "token_id_capture").is_dir():
        raise ConfigError("no NeMo-Gym with token capture", expected=f"{PACKAGE}/", key=str(source))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, PACKAGE).symlink_to(package.resolve())
        try:
            done = subprocess.run(
                [python, "-B", _GYM_SCRIPT],
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                env={**os.environ, "PYTHONPATH": folder},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"Gym's code cannot be run: {error}", key=python) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"Gym's code does not run: {last}", key=str(source))
    said = json.loads(done.stdout.splitlines()[-1])
    return said["version"], said["answers"]


def compare(
    asked: Sequence[tuple[str, list[Any]]], theirs: Sequence[dict[str, Any]]
) -> list[Check]:
    """Our answers beside theirs: equal values, or both refuse (with Gym's code, if it has one)."""
    from tokenplane.tools.contract_answers import answer

    checks: dict[str, Check] = {}
    for (operation, arguments), said in zip(asked, theirs, strict=True):
        name = f"model {arguments[0]}" if operation == "model" else operation
        check = checks.setdefault(name, Check(name))
        check.asked += 1
        # The text keeps 1 and 1.0, 0.0 and -0.0 apart.
        ours: dict[str, Any] = json.loads(json.dumps(answer(operation, arguments)))
        if _same(ours, said):
            check.accepted += "value" in said
        else:
            question = json.dumps(arguments)
            check.differences.append(f"{_short(question)}: Gym {_short(said)}, we {_short(ours)}")
    return list(checks.values())


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    if "value" in theirs:
        return json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)
    return "value" not in ours and theirs["rejected"] in (None, ours["rejected"])


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _print_checks(gym_version: str, checks: Sequence[Check]) -> None:
    from rich.table import Table

    from tokenplane.tools.wide_console import open_console

    table = Table("check", box=None, pad_edge=False)
    for name in ("asked", "accepted", "rejected", "different"):
        table.add_column(name, justify="right")
    for check in checks:
        different = len(check.differences)
        counts = (check.asked, check.accepted, check.asked - check.accepted - different, different)
        table.add_row(check.name, *map(str, counts))
    open_console().print(table)
    for check in checks:
        for difference in check.differences[:_SHOWN]:
            print(f"DIFFERENT {check.name} {difference}")
    total = sum(check.asked for check in checks)
    wrong = sum(len(check.differences) for check in checks)
    verdict = f"{wrong} of {total} answers differ" if wrong else f"all {total} answers are equal"
    print(f"\nnemo-gym {gym_version}: {verdict}")


if __name__ == "__main__":
    raise SystemExit(main())
