"""``tokenplane gc``: remove what is old, rollout by rollout, and say what stays and why."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from rich.progress import Progress

from tokenplane.schemas.errors import ConfigError, MissingRowError
from tokenplane.schemas.failure_row import FAILURE_PARTITION
from tokenplane.schemas.gym_ledger_row import GYM_LEDGER_PARTITION
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.schemas.training_row import TRAINING_PARTITION
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import RetentionPolicy, SweepReport
from tokenplane.tools.command_frame import coded_errors, command_parser
from tokenplane.tools.gc_orphans import OrphanReport, open_manifests, remove_orphans
from tokenplane.tools.store_reading import open_existing

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BY_ROLLOUT = (STAGED_PARTITION, FAILURE_PARTITION, GYM_LEDGER_PARTITION)
"""Partitions whose keys begin with the rollout, in the order in which its rows go: without its
failures or its ledger a rollout that is still staged would look like another one."""


_COUNTS = ("rows", "bytes", "blobs", "blob_bytes", "kept_leased", "kept_held", "kept_backlog")


@dataclass(slots=True)
class PartitionReport:
    """What went, or would go, from one partition."""

    partition: str
    rows: int = 0
    bytes: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    kept_leased: int = 0
    kept_held: int = 0
    kept_backlog: int = 0
    rollouts: int | None = None
    """Whole rollouts among them; None where rows are removed one by one."""
    kept_rollouts: int | None = None
    """Rollouts of which some row stays, so that none of their rows goes."""

    def add(self, swept: SweepReport) -> None:
        """Count one sweep."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(swept, name))


@dataclass(slots=True)
class GcReport:
    """Everything that one run did."""

    store: str
    dry_run: bool
    older_than_s: float
    partitions: list[PartitionReport] = field(default_factory=list)
    orphan_rows: OrphanReport | None = None
    """Staged rows that nobody acknowledged; None where nobody asked for them."""
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
        help="only this partition (repeatable; default: staged rows, failures, Gym ledger)",
    )
    parser.add_argument("--rollout", metavar="ID", help="only this rollout's rows")
    parser.add_argument(
        "--include-backlog",
        action="store_true",
        help="also rows that a consumer has not acknowledged",
    )
    parser.add_argument(
        "--orphans",
        metavar="AGE",
        help="also staged rows of this age that the ledger does not list (with --ledger or --gym)",
    )
    parser.add_argument("--ledger", metavar="STORE", help="the store of our ledger for Gym")
    parser.add_argument("--gym", metavar="URL", help="Gym's policy model server")
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
    orphan_age_s = None if options.orphans is None else parse_age(options.orphans, "--orphans")
    if options.rollout is not None and TRAINING_PARTITION in (options.partition or ()):
        raise ConfigError(
            "--rollout: published rows go one by one, by their age",
            expected="a partition whose keys begin with ROLLOUT/",
            got=TRAINING_PARTITION,
        )
    if orphan_age_s is None and (options.ledger is not None or options.gym is not None):
        raise ConfigError("--ledger and --gym say which rows are orphans", expected="--orphans AGE")
    with (
        open_existing(options.store) as store,
        Progress(disable=not sys.stderr.isatty()) as progress,
    ):
        orphans = None
        if orphan_age_s is not None:
            with open_manifests(options.ledger, options.gym) as manifest_of:
                orphans = remove_orphans(
                    store,
                    orphan_age_s,
                    manifest_of,
                    now=time.time(),
                    rollout=options.rollout,
                    dry_run=options.dry_run,
                )
        report = collect_garbage(
            store,
            age_s,
            options.partition or [n for n in _BY_ROLLOUT if n in store.partitions()],
            rollout=options.rollout,
            include_backlog=options.include_backlog,
            seal=options.seal,
            dry_run=options.dry_run,
            track=lambda items: progress.track(list(items), description="collecting"),
        )
        report.orphan_rows = orphans
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    return 0


def parse_age(text: str, option: str = "--older-than") -> float:
    """Seconds of an age such as ``12h``.

    Raises:
        ConfigError: not a number with one of the units s, m, h, d, or beyond all numbers.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    age_s = math.inf if match is None else float(match[1]) * _UNITS[match[2]]
    if math.isinf(age_s):
        raise ConfigError(option, expected="a number and s, m, h or d", got=repr(text))
    return age_s


def collect_garbage(
    store: StagingStore,
    age_s: float,
    partitions: Iterable[str],
    *,
    rollout: str | None = None,
    include_backlog: bool = False,
    seal: Iterable[str] = (),
    dry_run: bool = False,
    track: Callable[[Iterable[str]], Iterable[str]] = lambda items: items,
) -> GcReport:
    """Remove old rows. A rollout goes as a whole, when its newest row is old: one that still runs,
    or was just finished, keeps its first rows too. One that is being read stays. The store decides
    and removes in one step, by its own clock.

    Args:
        seal: partitions to close afterwards. One that has lost its last row is left as it is.

    Raises:
        MissingRowError: a partition of ``seal`` holds no row; nothing was removed.
    """
    seal = list(seal)
    if empty := sorted(set(seal) - set(store.partitions())):
        raise MissingRowError("a partition to seal holds no row", key=empty[0])
    report = GcReport(store.url, dry_run, age_s)
    parts = {name: PartitionReport(name) for name in partitions}
    report.partitions += parts.values()

    def sweep(partition: str, prefix: str, *, whole: bool, dry: bool = dry_run) -> SweepReport:
        policy = RetentionPolicy(
            max_age_s=age_s,
            partition=partition,
            prefix=prefix,
            include_backlog=include_backlog,
            whole=whole,
            orphan_age_s=None,
        )
        return store.sweep(policy, dry_run=dry)

    families = _families(store, rollout) if parts.keys() & set(_BY_ROLLOUT) else {}
    for name in parts.keys() & set(_BY_ROLLOUT):
        parts[name].rollouts = parts[name].kept_rollouts = 0
    for family in track(families):
        _sweep_family(f"{family}/", families[family], parts, sweep)
    for name, part in parts.items():
        if name not in _BY_ROLLOUT:
            part.add(sweep(name, "" if rollout is None else f"{rollout}/", whole=False))
    left = store.sweep(RetentionPolicy(), dry_run=dry_run)
    report.orphans = left.blobs
    for name in seal:
        if dry_run:
            report.sealed.append(name)
            continue
        with suppress(MissingRowError):  # all of it has just been removed
            store.seal(name)
            report.sealed.append(name)
    gone = sum(part.bytes + part.blob_bytes for part in report.partitions) if dry_run else 0
    report.remaining_bytes, report.max_bytes = left.remaining_bytes - gone, left.max_bytes
    return report


def _sweep_family(
    prefix: str,
    members: dict[str, set[str]],
    parts: dict[str, PartitionReport],
    sweep: Callable[..., SweepReport],
) -> None:
    """Remove one rollout's rows from every partition that was asked for, or from none."""
    goes = True
    for partition in (name for name in _BY_ROLLOUT if name in members):
        swept = sweep(partition, prefix, whole=True, dry=True)
        part = parts.get(partition)
        if not swept.rows:
            goes = False
            if part is not None:
                part.add(swept)
    for partition in (name for name in _BY_ROLLOUT if name in members):
        part = parts.get(partition)
        if part is None:
            goes = False  # it stays here, so what comes after must stay too
            continue
        removed = sweep(partition, prefix, whole=True) if goes else None
        if removed is not None and removed.rows:
            part.add(removed)
            part.rollouts = (part.rollouts or 0) + len(members[partition])
        else:
            goes = False
            part.kept_rollouts = (part.kept_rollouts or 0) + len(members[partition])


def _families(store: StagingStore, rollout: str | None) -> dict[str, dict[str, set[str]]]:
    """Which rollouts have rows in which partition, by the name that all their keys begin with.

    A rollout whose name begins with another one's and a slash goes and stays with that one.
    """
    found: dict[str, dict[str, set[str]]] = {}
    for partition in _BY_ROLLOUT:
        for key in store.keys(partition, "" if rollout is None else f"{rollout}/"):
            name = key.partition("/")[0]
            if partition != GYM_LEDGER_PARTITION:
                name = key.rsplit("/", 2)[0]
            found.setdefault(name, {}).setdefault(partition, set()).add(name)
    families: dict[str, dict[str, set[str]]] = {}
    for name in sorted(found):
        heads = (name[:at] for at, letter in enumerate(name) if letter == "/")
        head = next((head for head in heads if head in found), name)
        for partition, names in found[name].items():
            families.setdefault(head, {}).setdefault(partition, set()).update(names)
    return families


def _print(report: GcReport) -> None:
    verb = "would remove" if report.dry_run else "removed"
    for part in report.partitions:
        whole = "" if part.rollouts is None else f" of {part.rollouts} rollouts"
        print(
            f"{part.partition}: {verb} {part.rows} rows{whole} "
            f"({part.bytes} bytes, {part.blobs} blobs of {part.blob_bytes} bytes)"
        )
        kept = {
            "rollouts": part.kept_rollouts or 0,
            "rows leased": part.kept_leased,
            "rows being read": part.kept_held,
            "rows not acknowledged": part.kept_backlog,
        }
        if said := [f"{count} {name}" for name, count in kept.items() if count]:
            print(f"{part.partition}: kept {', '.join(said)}")
    if report.orphan_rows is not None:
        found = report.orphan_rows
        print(f"{verb} {found.rows} orphaned rows ({found.bytes} bytes)")
        if found.held or found.unknown_rollouts:
            print(
                f"kept {found.held} orphaned rows being read, and {found.unknown_rollouts} "
                "rollouts that the ledger does not know"
            )
    if report.orphans:
        print(f"{verb} {report.orphans} orphaned files")
    for name in report.sealed:
        print(f"{'would seal' if report.dry_run else 'sealed'} {name}")
    budget = "" if report.max_bytes is None else f" of {report.max_bytes}"
    print(f"{report.remaining_bytes} bytes{budget} {'would be ' if report.dry_run else ''}left")
