"""``tokenplane bench stores``: staging and resolving in each store beside its raw peer.

Ours and the peer's calls alternate, so that what else the machine does falls on both alike. Stage
is ``StagingStore.put`` of a finished row. Resolve is ``TokenSource.fetch_prefix``, which verifies,
while the peer decodes the ids unverified; a cached resolve is one that a worker's
``PrefixResolver`` remembers; a cold one (tq:) is of another host's rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from tokenplane.capture.prefix_resolver import PrefixResolver
from tokenplane.schemas.row_message import encode_message
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.schemas.wire import CaptureAdmission
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import to_blob
from tokenplane.staging.token_source import TokenSource
from tokenplane.tools.bench.peers import Peer, concat_ids, open_peer
from tokenplane.tools.bench.rows import make_chain
from tokenplane.tools.command_frame import at_least_one, coded_errors, command_parser

MEDIA_BYTES = 4 << 20
CHAIN_ROWS = (1, 10, 50)
GOALS = {
    ("redis", "stage"): 1.3,
    ("redis", "resolve"): 1.2,
    ("tq", "stage"): 1.15,
    ("tq", "cached resolve"): 0.05,
    ("tq", "cold resolve"): 1.0,
    ("file", "stage"): 2.0,
}
"""Scheme and kind of work to the greatest wanted ratio of medians."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of work in one store. Times in milliseconds."""

    store: str
    work: str
    runs: int
    p50_ms: float
    p99_ms: float
    peer: str | None
    peer_p50_ms: float | None
    peer_p99_ms: float | None
    ratio: float | None
    """Of the medians."""
    goal: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench stores``."""
    parser.add_argument(
        "--store",
        action="append",
        metavar="URL",
        help="a store to measure (repeatable); memory: and a file store in a new folder if none is "
        "given. What is written is removed again.",
    )
    parser.add_argument("--runs", type=at_least_one, default=200, help="of each kind of work")
    parser.add_argument("--json", action="store_true", help="print JSON")


@coded_errors("bench stores")
def main(argv: list[str] | None = None) -> int:
    """0; 1: a store failed; 2: wrong usage."""
    parser = command_parser("bench stores", __doc__)
    add_arguments(parser)
    options = parser.parse_args(argv)
    results = []
    with tempfile.TemporaryDirectory(prefix="tokenplane-bench-", dir=os.getcwd()) as folder:
        for url in options.store or ["memory:", (Path(folder) / "store").as_uri()]:
            print(f"bench stores: {url}", file=sys.stderr)
            results += measure(url, options.runs, Path(folder))
    if options.json:
        machine = {"python": platform.python_version(), "cores": os.cpu_count()}
        machine["pyarrow"] = version("pyarrow")
        print(json.dumps({"machine": machine, "results": [asdict(r) for r in results]}, indent=2))
    else:
        _print_table(results)
    return 0


def measure(url: str, runs: int, folder: Path) -> list[Measured]:
    """Every kind of work in the store behind ``url``, and in its peer where it has one."""
    scheme = url.partition(":")[0]
    run_id = uuid.uuid4().hex[:8]
    with ExitStack() as stack:
        store = stack.enter_context(open_store(url))
        peer = stack.enter_context(_peer(url, folder))
        partition = f"bench-{run_id}"
        stack.callback(lambda: store.discard(partition, store.keys(partition)))
        bench = _Bench(url, scheme, store, peer, partition, runs)
        results = [
            bench.stage("stage 1k", 1000, None, run_id),
            bench.stage("stage 8k", 8000, None, run_id),
            bench.stage("stage 1k + 4 MB", 1000, MEDIA_BYTES, run_id),
        ]
        results += bench.resolve("resolve", store, run_id)
        results += bench.resolve("cached resolve", store, run_id, cached=True)
        if scheme == "tq":
            cold = stack.enter_context(open_store(_elsewhere(url)))
            results += bench.resolve("cold resolve", cold, run_id)
        return results


@dataclass(frozen=True, slots=True)
class _Bench:
    url: str
    scheme: str
    store: StagingStore
    peer: Peer | None
    partition: str
    runs: int

    def stage(self, work: str, tokens: int, media: int | None, run_id: str) -> Measured:
        runs = self.runs if media is None else max(5, self.runs // 10)
        rows = [make_chain(f"{run_id}-{work}-{n}", 1, tokens, seed=n)[0] for n in range(runs)]
        batches = [row.to_batch() for row in rows]
        messages = [encode_message(batch) for batch in batches]
        contents = [os.urandom(media) if media else None for _ in range(runs)]

        def ours(at: int) -> None:
            content = contents[at]
            blobs = [] if content is None else [to_blob(content)]
            self.store.put(self.partition, rows[at].staging_key, batches[at], blobs=blobs)

        def theirs(at: int) -> None:
            needed(self.peer).stage(rows[at], messages[at], contents[at])

        return self._measured(work, "stage", runs, ours, theirs)

    def resolve(
        self, kind: str, store: StagingStore, run_id: str, *, cached: bool = False
    ) -> list[Measured]:
        chain = make_chain(f"{run_id}-{kind}", max(CHAIN_ROWS), 1000)
        keys = [row.staging_key for row in chain]
        for row in chain:
            self.store.put(self.partition, row.staging_key, row.to_batch())
            if self.peer is not None:
                self.peer.stage(row, encode_message(row.to_batch()), None)
        source = TokenSource(store, self.partition)
        resolver = PrefixResolver(source)
        results = []
        for count in CHAIN_ROWS:
            admission = _continuing(chain[:count])

            def ours(
                at: int,
                wanted: list[str] = keys[:count],
                admission: CaptureAdmission = admission,
            ) -> None:
                if cached:
                    resolver.resolve(admission)
                else:
                    source.fetch_prefix(wanted)

            def theirs(at: int, wanted: list[str] = keys[:count]) -> None:
                concat_ids(needed(self.peer).fetch(wanted))

            results.append(self._measured(f"{kind} {count}", kind, self.runs, ours, theirs))
        return results

    def _measured(
        self,
        work: str,
        kind: str,
        runs: int,
        ours: Callable[[int], None],
        theirs: Callable[[int], None],
    ) -> Measured:
        mine: list[float] = []
        peers: list[float] = []
        for at in range(runs):
            mine.append(_timed(ours, at))
            if self.peer is not None:
                peers.append(_timed(theirs, at))
        return Measured(
            store=self.url,
            work=work,
            runs=runs,
            p50_ms=_percentile(mine, 50),
            p99_ms=_percentile(mine, 99),
            peer=None if self.peer is None else self.peer.name,
            peer_p50_ms=_percentile(peers, 50) if peers else None,
            peer_p99_ms=_percentile(peers, 99) if peers else None,
            ratio=_percentile(mine, 50) / _percentile(peers, 50) if peers else None,
            goal=GOALS.get((self.scheme, kind)),
        )


def _continuing(chain: list[StagedRow]) -> CaptureAdmission:
    """The admission of the next call of this chain."""
    tip = chain[-1].call
    return CaptureAdmission(
        rollout_id=tip.rollout_id,
        model_call_id="next",
        parent_call_id=tip.model_call_id,
        prev_len=tip.prev_len + len(tip.token_ids_delta),
        mode="token_in",
        staging_chain=[row.staging_key for row in chain],
        parent_chain_hash=tip.chain_hash,
    )


def needed(peer: Peer | None) -> Peer:
    """The peer, which is there whenever its work is run."""
    if peer is None:
        raise TypeError("this store has no peer")
    return peer


def _timed(work: Callable[[int], None], at: int) -> float:
    started = time.perf_counter()
    work(at)
    return (time.perf_counter() - started) * 1000


def _percentile(times: list[float], percent: int) -> float:
    """Nearest rank."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@contextmanager
def _peer(url: str, folder: Path) -> Iterator[Peer | None]:
    peer = open_peer(url, folder)
    try:
        yield peer
    finally:
        if peer is not None:
            peer.close()


def _elsewhere(url: str) -> str:
    """The same queue as another host sees it: with a journal that holds nothing."""
    head, _, query = url.partition("?")
    rest = [part for part in query.split("&") if not part.startswith("journal=")]
    return f"{head}?journal={quote('memory:')}" + "".join(f"&{part}" for part in rest if part)


def _print_table(results: list[Measured]) -> None:
    table = Table("store", "work", "p50 ms", "p99 ms", "peer p50", "ratio", "goal")
    for r in results:
        table.add_row(
            r.store,
            r.work,
            f"{r.p50_ms:.3f}",
            f"{r.p99_ms:.3f}",
            "" if r.peer_p50_ms is None else f"{r.peer_p50_ms:.3f}",
            "" if r.ratio is None else f"{r.ratio:.2f}",
            "" if r.goal is None else f"{r.goal:.2f}",
        )
    Console().print(table)
