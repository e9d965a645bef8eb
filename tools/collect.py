"""``tokenplane collect``: verify the rollouts of a NeMo-Gym run and publish their training rows."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tokenplane.tools.collect_report import CollectReport, print_report, summarize
from tokenplane.tools.command_frame import coded_errors, command_parser
from tokenplane.tools.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from tokenplane.capture.collect.collector import ManifestProvider, Segments
    from tokenplane.capture.collect.receipt import Strictness
    from tokenplane.capture.collect.training_rows import RolloutOutcome
    from tokenplane.schemas.training_row import TrainingRow
    from tokenplane.staging.store import StagingStore

CONTROL_TOKEN_ENV = "NEMO_GYM_TOKEN_CAPTURE_CONTROL_TOKEN"
STRICTNESS = ("chain", "gym")
SEGMENTS = ("terminal", "roots", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the rollouts, their manifests and their staged rows are."""
    manifests = parser.add_mutually_exclusive_group(required=True)
    manifests.add_argument("--gym", metavar="URL", help="Gym's policy model server")
    manifests.add_argument(
        "--ledger", metavar="STORE", help="the store of our own ledger for Gym, in place of --gym"
    )
    parser.add_argument("--store", required=True, metavar="URL", help="staging store, or a folder")
    parser.add_argument(
        "--rollouts", required=True, type=Path, metavar="FILE", help="rollouts file of the run"
    )
    parser.add_argument(
        "--parquet", type=Path, metavar="OUT", help="also write the rows of these rollouts here"
    )
    parser.add_argument(
        "--strictness",
        choices=STRICTNESS,
        default="chain",
        help="chain: the terminal's chain must verify (default); gym: every call of the rollout",
    )
    parser.add_argument(
        "--segments",
        choices=SEGMENTS,
        default="terminal",
        help="which chains become rows: the terminal's (default), every root's, or every leaf's",
    )
    parser.add_argument(
        "--salvage",
        action="store_true",
        help="publish the verified part of a damaged rollout, marked, instead of a placeholder",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove staged rows once their row is published"
    )
    parser.add_argument(
        "--control-token-env",
        default=CONTROL_TOKEN_ENV,
        metavar="NAME",
        help=f"environment variable with the control secret (default: {CONTROL_TOKEN_ENV})",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, metavar="S", help="of each request (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


@coded_errors("collect")
def main(argv: list[str] | None = None) -> int:
    """0: every rollout has a verified row; 1: one has none, or a store or server failed."""
    parser = command_parser("collect", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    from tokenplane.capture.collect.gym_rollouts import read_outcomes
    from tokenplane.tools.export_parquet import export
    from tokenplane.tools.store_reading import open_existing

    outcomes = list(read_outcomes(args.rollouts))
    with open_existing(args.store) as store, _open_manifests(args) as manifests:
        report = collect(
            _with_progress(outcomes),
            manifests,
            store,
            strictness=args.strictness,
            segments=args.segments,
            salvage=args.salvage,
            clean=args.clean,
        )
        if args.parquet is not None and outcomes:
            export(store, args.parquet, "rows", {outcome.rollout_id for outcome in outcomes})
    if args.json:
        shown = {
            "rollouts": [asdict(rollout) for rollout in report.rollouts],
            "verified": len(report.rollouts) - len(report.unverified),
            "unverified": len(report.unverified),
        }
        print(json.dumps(shown, indent=2))
    else:
        print_report(report)
    return EXIT_FAILED if report.unverified or not report.rollouts else 0


@contextmanager
def _open_manifests(args: argparse.Namespace) -> Iterator[ManifestProvider]:
    from tokenplane.capture.collect.gym_rollouts import GymManifests
    from tokenplane.schemas.errors import ConfigError

    if args.ledger is not None:
        from tokenplane.tools.store_reading import open_for_reading

        with open_for_reading(args.ledger) as store:
            yield _LedgerManifests(store)
        return
    token = os.environ.get(args.control_token_env)
    if not token:
        raise ConfigError("the environment holds no control secret", key=args.control_token_env)
    with GymManifests(args.gym, token, timeout_s=args.timeout_s) as client:
        yield client


class _LedgerManifests:
    """Manifests from the ledger's own rows."""

    def __init__(self, store: StagingStore) -> None:
        from tokenplane.capture.gym_ledger import GymLedger

        self.manifest = GymLedger(store).read_manifest


def collect(
    outcomes: Iterable[RolloutOutcome],
    manifests: ManifestProvider,
    store: StagingStore,
    *,
    strictness: Strictness = "chain",
    segments: Segments = "terminal",
    salvage: bool = False,
    clean: bool = False,
) -> CollectReport:
    """Finalize and publish each rollout. Running it again adds nothing and removes nothing new.

    A rollout whose rows were published, and whose staged rows were cleaned, keeps those rows.

    Raises:
        TokenplaneError: a store or the model server cannot be asked; rollouts before it are
            published.
    """
    from tokenplane.capture.collect.collector import Collector
    from tokenplane.schemas.errors import KeyConflictError
    from tokenplane.schemas.staged_row import STAGED_PARTITION
    from tokenplane.staging.token_source import TokenSource

    collector = Collector(
        TokenSource(store), manifests, strictness=strictness, segments=segments, salvage=salvage
    )
    report = CollectReport()
    for outcome in outcomes:
        there = _verified_rows(store, outcome)
        rows = there
        if not there or not _is_cleaned(there, store):
            rows = collector.finalize(outcome)
            if not rows[0].sample_mask or rows[0].salvaged:
                rows = there or rows
        try:
            done = collector.publish(
                rows, store, clean_partition=STAGED_PARTITION if clean else None
            )
        except KeyConflictError as error:
            # An earlier collection said something else; what is published is never replaced.
            report.rollouts.append(summarize(rows, conflict=error.code))
            continue
        report.rollouts.append(summarize(rows, done))
    return report


def _verified_rows(store: StagingStore, outcome: RolloutOutcome) -> list[TrainingRow]:
    """The verified rows of the rollout that are published already with this reward and group, in
    order; empty if none is, or if they have others."""
    from tokenplane.capture.collect.published import published_rows

    there = published_rows(store, outcome.rollout_id)
    verified = [row for row in there if row.sample_mask and not row.salvaged]
    if any((row.reward, row.group_id) != (outcome.reward, outcome.group_id) for row in verified):
        return []
    return verified


def _is_cleaned(published: list[TrainingRow], store: StagingStore) -> bool:
    """Whether none of their staged rows is left: then there is nothing to read or to warn of."""
    from tokenplane.schemas.staged_row import STAGED_PARTITION

    left = set(store.keys(STAGED_PARTITION, f"{published[0].rollout_id}/"))
    return left.isdisjoint(span.staging_key for row in published for span in row.call_spans)


def _with_progress(outcomes: list[RolloutOutcome]) -> Iterator[RolloutOutcome]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        outcomes,
        description="collecting",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    raise SystemExit(main())
