"""``tokenplane gc``: remove what is old, rollout by rollout, and say what stays and why."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from rich.progress import Progress

from tokenplane.schemas.errors import ConfigError
from tokenplane.schemas.failure_row import FAILURE_PARTITION
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import RetentionPolicy, SweepReport
from tokenplane.tools.command_frame import coded_errors, command_parser

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BY_ROLLOUT = (STAGED_PARTITION, FAILURE_PARTITION)
"""Partitions whose keys begin with the rollout: ``rollout/call/attempt``."""


@dataclass(slots=True)
class PartitionReport:
    """What went, or would go, from one partition."""

    partition: str
    rows: int = 0
    bytes: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    kept_leased: int = 0
    kept_backlog: int = 0
    rollouts: int | None = None
    """Whole rollouts among them; None where rows are removed one by one."""
    kept_rollouts: int | None = None
    """Rollouts with a row that is young enough: none of their rows goes."""

    def add(self, swept: SweepReport) -> None:
        """Count one sweep."""
        for name in ("rows", "bytes", "blobs", "blob_bytes", "kept_leased", "kept_backlog"):
            setattr(self, name, getattr(self, name) + getattr(swept, name))


@dataclass(slots=True)
class GcReport:
    """Everything that one run did."""

    store: str
    dry_run: bool
    older_than_s: float
    partitions: list[PartitionReport] = field(default_factory=list)
    orphans: int = 0
    """Files that a killed writer left behind."""
    sealed: list[str] = field(default_factory=list)
    remaining_bytes: int = 0
    max_bytes: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``gc``."""
    parser.add_argument("store", metavar="STORE", help="store URL or directory")
    parser.add_argument(
        "--older-than",
        default="7d",
        metavar="AGE",
        help="with a unit: 90s, 30m, 12h, 7d (default: 7d)",
    )
    parser.add_argument(
        "--partition",
        action="append",
        metavar="NAME",
        help="only this partition (repeatable; default: staged and failure rows)",
    )
    parser.add_argument("--rollout", metavar="ID", help="only this rollout's rows")
    parser.add_argument(
        "--include-backlog",
        action="store_true",
        help="also rows that a consumer has not acknowledged",
    )
    parser.add_argument(
        "--seal",
        action="append",
        default=[],
        metavar="NAME",
        help="afterwards close a finished partition: a file store keeps it as one Arrow file",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go, change nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


@coded_errors("gc")
def main(argv: list[str] | None = None) -> int:
    """0; 1: the store failed; 2: wrong usage."""
    parser = command_parser("gc", __doc__)
    add_arguments(parser)
    options = parser.parse_args(argv)
    age_s = parse_age(options.older_than)
    with open_store(options.store) as store, Progress(disable=not sys.stderr.isatty()) as progress:
        report = collect_garbage(
            store,
            age_s,
            options.partition or [n for n in _BY_ROLLOUT if n in store.partitions()],
            rollout=options.rollout,
            include_backlog=options.include_backlog,
            seal=options.seal,
            dry_run=options.dry_run,
            track=lambda items, name: progress.track(list(items), description=name),
        )
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    return 0


def parse_age(text: str) -> float:
    """Seconds of an age such as ``12h``.

    Raises:
        ConfigError: not a number with one of the units s, m, h, d.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError("--older-than", expected="a number and s, m, h or d", got=repr(text))
    return float(match[1]) * _UNITS[match[2]]


def collect_garbage(
    store: StagingStore,
    age_s: float,
    partitions: Iterable[str],
    *,
    rollout: str | None = None,
    include_backlog: bool = False,
    seal: Iterable[str] = (),
    dry_run: bool = False,
    track: Callable[[Iterable[str], str], Iterable[str]] = lambda items, name: items,
    now: Callable[[], float] = time.time,
) -> GcReport:
    """Remove old rows. A rollout goes as a whole, when its newest row is old: one that still runs,
    or was just finished and is being collected, keeps its first rows too.
    """
    report = GcReport(store.url, dry_run, age_s)
    for partition in partitions:
        part = PartitionReport(partition)
        report.partitions.append(part)
        prefixes = [""] if rollout is None else [f"{rollout}/"]
        if partition in _BY_ROLLOUT:
            ages = _rollouts(store, partition, rollout)
            old = _removable(ages, now() - age_s)
            part.rollouts, part.kept_rollouts = len(old), len(ages) - len(old)
            if any(ages[name][0] <= now() - age_s for name in ages.keys() - set(old)):
                # Some rows are old whose rollout is not: go rollout by rollout.
                prefixes = [f"{name}/" for name in old]
        for prefix in track(prefixes, partition):
            policy = RetentionPolicy(
                max_age_s=age_s,
                partition=partition,
                prefix=prefix,
                include_backlog=include_backlog,
            )
            part.add(store.sweep(policy, dry_run=dry_run))
    left = store.sweep(RetentionPolicy(), dry_run=dry_run)
    report.orphans = left.blobs
    if not dry_run:
        for name in seal:
            store.seal(name)
            report.sealed.append(name)
    gone = sum(part.bytes + part.blob_bytes for part in report.partitions) if dry_run else 0
    report.remaining_bytes, report.max_bytes = left.remaining_bytes - gone, left.max_bytes
    return report


def _rollouts(
    store: StagingStore, partition: str, rollout: str | None
) -> dict[str, tuple[float, float]]:
    """Times of the oldest and the newest row of each rollout."""
    ages: dict[str, tuple[float, float]] = {}
    prefix = "" if rollout is None else f"{rollout}/"
    for key, row in store.scan(partition, prefix, ["created_at"]):
        name = key.rsplit("/", 2)[0]
        if rollout in (None, name):
            at: float = row.column(0)[0].as_py()
            oldest, newest = ages.get(name, (at, at))
            ages[name] = (min(oldest, at), max(newest, at))
    return ages


def _removable(ages: dict[str, tuple[float, float]], limit: float) -> list[str]:
    """Rollouts whose newest row is old, and whose prefix covers no other rollout that stays."""
    staying = [name for name, (_, newest) in ages.items() if newest > limit]
    covering = {name[:at] for name in staying for at, letter in enumerate(name) if letter == "/"}
    return [name for name in ages if ages[name][1] <= limit and name not in covering]


def _print(report: GcReport) -> None:
    verb = "would remove" if report.dry_run else "removed"
    for part in report.partitions:
        whole = "" if part.rollouts is None else f" of {part.rollouts} rollouts"
        print(
            f"{part.partition}: {verb} {part.rows} rows{whole} "
            f"({part.bytes} bytes, {part.blobs} blobs of {part.blob_bytes} bytes)"
        )
        kept = {
            "rollouts too young": part.kept_rollouts or 0,
            "rows leased": part.kept_leased,
            "rows not acknowledged": part.kept_backlog,
        }
        if said := [f"{count} {name}" for name, count in kept.items() if count]:
            print(f"{part.partition}: kept {', '.join(said)}")
    if report.orphans:
        print(f"{verb} {report.orphans} orphaned files")
    for name in report.sealed:
        print(f"sealed {name}")
    budget = "" if report.max_bytes is None else f" of {report.max_bytes}"
    print(f"{report.remaining_bytes} bytes{budget} {'would be ' if report.dry_run else ''}left")
