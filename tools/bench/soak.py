"""``tokenplane bench soak``: many rollouts through one store, with nothing lost, wrong or left.

Each rollout is staged call by call, resolved and verified, published as a row, claimed by a
consumer, acknowledged, and removed by retention: what a training run does for weeks.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np
from rich.progress import Progress

from tokenplane.schemas.errors import TokenplaneError
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import RetentionPolicy
from tokenplane.staging.token_sink import TokenSink
from tokenplane.staging.token_source import TokenSource
from tokenplane.tools.bench.rows import make_chain
from tokenplane.tools.command_frame import at_least_one, coded_errors, command_parser
from tokenplane.tools.exit_status import EXIT_FAILED

CONSUMER = "soak-trainer"
CLAIM_ROWS = 64
LEASE_S = 600.0
SWEEP_EVERY = 500
"""Rollouts between two sweeps."""


@dataclass(slots=True)
class SoakReport:
    """What a soak did and found."""

    store: str
    durable: str
    rollouts: int
    calls: int
    rows_staged: int = 0
    rows_claimed: int = 0
    rows_lost: int = 0
    """Acknowledged rows that were not there, and published rows that were never handed out."""
    rows_wrong: int = 0
    """Rows that came back with other tokens than were staged, or handed out twice."""
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    rows_per_s: float = 0.0
    most_bytes: int = 0
    """Greatest size of the store at a sweep, messages and blobs."""
    bytes_left: int = 0
    rows_left: int = 0
    peak_rss_bytes: int = 0
    """Of this process."""
    rss_bytes_at_tenth: int = 0
    """Peak after the first tenth: the two differ little if nothing grows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench soak``."""
    parser.add_argument("--store", required=True, metavar="URL", help="a store to use")
    parser.add_argument("--rollouts", type=at_least_one, default=10_000)
    parser.add_argument("--calls", type=at_least_one, default=3, help="per rollout")
    parser.add_argument("--tokens", type=at_least_one, default=200, help="per call")
    parser.add_argument("--writers", type=at_least_one, default=4, help="threads")
    parser.add_argument("--json", action="store_true", help="print JSON")


@coded_errors("bench soak")
def main(argv: list[str] | None = None) -> int:
    """0; 1: a row was lost or wrong, or the store failed; 2: wrong usage."""
    parser = command_parser("bench soak", __doc__)
    add_arguments(parser)
    options = parser.parse_args(argv)
    with open_store(options.store) as store, Progress(disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("rollouts", total=options.rollouts)
        report = _Soak(store, options.rollouts, options.calls, options.tokens).run(
            options.writers, lambda: progress.advance(task)
        )
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        for name, value in asdict(report).items():
            print(f"{name:20} {value}")
    bad = report.rows_lost or report.rows_wrong or report.errors or report.rows_left
    return EXIT_FAILED if bad else 0


class _Soak:
    """One run; two partitions of the store are its own."""

    def __init__(self, store: StagingStore, rollouts: int, calls: int, tokens: int) -> None:
        self._store = store
        self._tokens = tokens
        run_id = uuid.uuid4().hex[:8]
        self._staged = f"soak-{run_id}-staged"
        self._rows = f"soak-{run_id}-rows"
        self._sink = TokenSink(store, self._staged)
        self._source = TokenSource(store, self._staged)
        self._report = SoakReport(store.url, store.durable, rollouts, calls)
        self._lock = threading.Lock()
        self._done = 0
        self._handed_out: set[str] = set()

    def run(self, writers: int, advance: Callable[[], None]) -> SoakReport:
        """Everything, with this many threads; ``advance`` is called after each rollout."""
        report = self._report
        started = time.perf_counter()
        with ThreadPoolExecutor(writers) as pool:
            for _ in pool.map(self._rollout, range(report.rollouts)):
                self._after_one()
                advance()
        self._consume()
        report.rows_lost += report.rollouts - len(self._handed_out) - len(report.errors)
        self._sweep()
        report.seconds = time.perf_counter() - started
        report.rows_per_s = report.rows_staged / report.seconds
        left = [self._store.stats(name) for name in (self._staged, self._rows)]
        report.rows_left = sum(stats.rows for stats in left)
        report.bytes_left = sum(stats.bytes + stats.blob_bytes for stats in left)
        report.peak_rss_bytes = _peak_rss()
        return report

    def _rollout(self, number: int) -> None:
        report = self._report
        chain = make_chain(f"rollout-{number}", report.calls, self._tokens, seed=number)
        keys = [row.staging_key for row in chain]
        try:
            for row in chain:
                staged = self._sink.stage(row)
                if not staged.ok:
                    raise TokenplaneError(str(staged.error))
            wanted = np.concatenate([row.call.token_ids_delta for row in chain])
            right = np.array_equal(self._source.fetch_prefix(keys), wanted)
            calls = [row.call.digest for row in self._source.fetch_rows(keys)]
            right = right and calls == [row.call.digest for row in chain]
            self._store.put(self._rows, keys[-1], chain[-1].to_batch())
            removed = self._store.discard(self._staged, keys)
        except TokenplaneError as exc:
            with self._lock:
                report.errors.append(f"rollout {number}: {exc.code}: {exc}")
            return
        with self._lock:
            report.rows_staged += len(chain)
            report.rows_wrong += not right
            report.rows_lost += len(chain) - removed

    def _after_one(self) -> None:
        self._done += 1
        if self._done % CLAIM_ROWS == 0:
            self._consume()
        if self._done % SWEEP_EVERY == 0:
            self._sweep()
        if self._done == max(1, self._report.rollouts // 10):
            self._report.rss_bytes_at_tenth = _peak_rss()

    def _consume(self) -> None:
        while claims := self._store.claim(
            self._rows, CONSUMER, max_rows=CLAIM_ROWS, lease_s=LEASE_S
        ):
            keys = [claim.key for claim in claims]
            self._report.rows_claimed += len(keys)
            self._report.rows_wrong += len(self._handed_out.intersection(keys))
            self._handed_out.update(keys)
            self._store.ack(self._rows, CONSUMER, keys)

    def _sweep(self) -> None:
        stats = [self._store.stats(name) for name in (self._staged, self._rows)]
        size = sum(part.bytes + part.blob_bytes for part in stats)
        self._report.most_bytes = max(self._report.most_bytes, size)
        self._store.sweep(RetentionPolicy(max_age_s=0, partition=self._rows))


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
