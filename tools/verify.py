"""``tokenplane verify``: every staged row, every chain and every published row, proven again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tokenplane.tools import verify_contract
from tokenplane.tools.command_frame import coded_errors, command_parser
from tokenplane.tools.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from tokenplane.schemas.training_row import TrainingRow
    from tokenplane.staging.store import StagingStore
    from tokenplane.tools.store_reading import Problem, RolloutKeys

CONTRACT = "contract"
"""``tokenplane verify contract`` is a command of its own."""


@dataclass(slots=True)
class VerifyReport:
    """What was looked at, and what of it does not hold."""

    rollouts: int = 0
    staged: int = 0
    """Staged rows that were checked, good and bad."""
    published: int = 0
    """Published rows that were checked, good and bad."""
    cleaned: int = 0
    """Published rows whose staged rows were removed, so that only their own hash was checked."""
    leftovers: int = 0
    """Staged rows, left behind when the calls that they continue were published and removed."""
    failures: int = 0
    """Failure rows: calls that were served and not staged. No defect of the store."""
    problems: list[Problem] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to verify."""
    parser.add_argument("store", help="store URL or folder")
    parser.add_argument(
        "--partition",
        choices=("staged", "rows"),
        help="only staged rows, or only published ones (default: both)",
    )
    parser.add_argument(
        "--rollout", action="append", default=[], metavar="ID", help="only this one (repeatable)"
    )
    parser.add_argument(
        "--parquet",
        type=Path,
        metavar="FILE",
        help="also demand that this export holds exactly the published rows",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


@coded_errors("verify")
def main(argv: list[str] | None = None) -> int:
    """0: everything holds; 1: something does not, or the store cannot be read."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == [CONTRACT]:
        return verify_contract.main(arguments[1:])
    parser = command_parser("verify", __doc__)
    parser.epilog = (
        f"`tokenplane verify {CONTRACT} --help`: digests and models against a NeMo-Gym. "
        f"(For a folder named {CONTRACT}, say ./{CONTRACT}.)"
    )
    add_arguments(parser)
    args = parser.parse_args(arguments)
    from tokenplane.tools.store_reading import find_rollout, find_rollouts, open_for_reading

    with open_for_reading(args.store) as store:
        if args.rollout:
            found = {name: find_rollout(store, name) for name in args.rollout}
        else:
            found = find_rollouts(store)
        report = verify(store, _with_progress(found), args.partition, args.parquet)
    if args.json:
        print(json.dumps(asdict(report) | {"verified": not report.problems}, indent=2))
    else:
        _print_report(report)
    return EXIT_FAILED if report.problems else 0


def verify(
    store: StagingStore,
    rollouts: Iterable[tuple[str, RolloutKeys]],
    partition: str | None = None,
    parquet: Path | None = None,
) -> VerifyReport:
    """Check the rollouts' rows; one rollout is held in memory at a time.

    Raises:
        StoreError: the store itself cannot be read.
        ConfigError: ``parquet`` is no Parquet file.
    """
    from tokenplane.tools.published_rows import check_published, compare_parquet, is_cleaned
    from tokenplane.tools.rollout_view import load_rollout

    report = VerifyReport()
    published: list[TrainingRow] = []
    for rollout_id, keys in rollouts:
        view = load_rollout(store, rollout_id, keys)
        problems = [*view.problems, *check_published(view)]
        report.rollouts += 1
        report.failures += len(view.failures)
        if partition != "rows":
            bad = sum(problem.partition == "staged" for problem in view.problems)
            report.staged += len(view.calls) + bad
            report.leftovers += len(view.leftovers)
        if partition != "staged":
            unread = sum(problem.partition == "rows" for problem in view.problems)
            report.published += len(view.training) + unread
            report.cleaned += sum(
                bool(row.call_spans) and is_cleaned(row, view) for row in view.training
            )
        report.problems += [p for p in problems if partition in (None, p.partition)]
        if parquet is not None:
            published += view.training
    if parquet is not None:
        report.problems += compare_parquet(parquet, published)
    return report


def _with_progress(found: dict[str, RolloutKeys]) -> Iterator[tuple[str, RolloutKeys]]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        found.items(),
        description="verifying",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _print_report(report: VerifyReport) -> None:
    print(
        f"{report.staged} staged rows and {report.published} published rows "
        f"of {report.rollouts} rollouts checked"
    )
    if report.cleaned:
        print(f"{report.cleaned} published rows: staged rows removed, own hash checked only")
    if report.leftovers:
        print(f"{report.leftovers} staged rows left over: their parents were published, removed")
    if report.failures:
        print(f"{report.failures} calls were served without capture (see `tokenplane audit`)")
    for problem in report.problems:
        print(f"BAD {problem.partition} {problem.key}: {problem.code}: {problem.message}")
    print("everything verifies" if not report.problems else f"{len(report.problems)} do not verify")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
