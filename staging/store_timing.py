"""How long a store's puts and gets take, beside a bare append and fdatasync of the same bytes.

``python -m tokenplane.staging.store_timing [URL]`` prints a table; without a URL it times a new
file store in the working directory, and removes it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tokenplane.schemas.errors import TokenplaneError
from tokenplane.schemas.row_message import encode_message
from tokenplane.schemas.staged_call import build_staged_call
from tokenplane.schemas.staged_row import STAGED_PARTITION, CallEvidence, StagedRow
from tokenplane.schemas.tokens import to_log_probs, to_token_ids
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.token_source import TokenSource

BLOCK: Final = 10
CHAINS: Final = (1, 10, 50)


@dataclass(frozen=True, slots=True)
class Timing:
    """One operation, in seconds."""

    name: str
    p50_s: float
    p99_s: float
    count: int


def time_store(
    store: StagingStore, directory: Path, *, rows: int = 1000, tokens: int = 1024
) -> list[Timing]:
    """Timings of one caller: the bare sync, ``put``, and reading chains of rows.

    A disk's sync time drifts within seconds, so bare syncs and puts take turns in small blocks.

    Args:
        directory: on the disk to compare with.
        tokens: int32 ids per row.
    """
    prefix = f"timing-{time.time_ns()}"
    keys = [f"{prefix}/{number}/1" for number in range(rows)]
    batches = [_row(key, tokens).to_batch() for key in keys]
    messages = [encode_message(batch) for batch in batches]
    bare: list[float] = []
    puts: list[float] = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:

        def append(message: bytes) -> None:
            file.write(message)
            os.fdatasync(file.fileno())

        for start in range(0, rows, BLOCK):
            block = range(start, min(start + BLOCK, rows))
            bare += [_seconds(partial(append, messages[number])) for number in block]
            puts += [
                _seconds(partial(store.put, STAGED_PARTITION, keys[number], batches[number]))
                for number in block
            ]
    timings = [
        _timing(f"append and fdatasync of {len(messages[0])} bytes", bare),
        _timing(f"put of {tokens} tokens", puts),
    ]
    source = TokenSource(store)
    for length in CHAINS:
        chains = [keys[at : at + length] for at in range(0, rows - length, max(1, rows // 200))]
        reads = [_seconds(partial(source.fetch_prefix, chain)) for chain in chains]
        timings.append(_timing(f"fetch_prefix of {length} rows", reads))
    store.discard(STAGED_PARTITION, keys)
    return timings


def _row(key: str, tokens: int) -> StagedRow:
    rollout, call, _ = key.split("/")
    generated = tokens // 8
    record = build_staged_call(
        rollout_id=rollout,
        model_call_id=call,
        parent_call_id=None,
        mode="text",
        prev_len=0,
        weight_version=1,
        parent_chain_hash=None,
        prompt_token_ids=to_token_ids(list(range(tokens - generated))),
        generated_token_ids=to_token_ids(list(range(generated))),
        generated_log_probs=to_log_probs([-0.5] * generated),
        extras=None,
    )
    return StagedRow(key, record, CallEvidence(((0, 1),)), time.time())


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _timing(name: str, values: list[float]) -> Timing:
    ranked = sorted(values)
    last = len(ranked) - 1
    return Timing(name, ranked[last // 2], ranked[round(last * 0.99)], len(ranked))


def main(argv: list[str] | None = None) -> int:
    """Print the table of one store; 0, or 1 if the store failed."""
    parser = argparse.ArgumentParser(prog="store_timing", description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1024, help="per row")
    options = parser.parse_args(argv)
    if options.rows <= max(CHAINS) or options.tokens < 1:
        parser.error(f"expected more than {max(CHAINS)} rows, and a token or more")
    try:
        with (
            tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
            open_store(options.url or (Path(folder) / "store").as_uri()) as store,
        ):
            timings = time_store(store, Path(folder), rows=options.rows, tokens=options.tokens)
    except TokenplaneError as exc:
        sys.stderr.write(f"store_timing: {exc.code}: {exc}\n")
        return 1
    for timing in timings:
        sys.stdout.write(
            f"{timing.name:<40} p50 {timing.p50_s * 1e3:7.3f} ms"
            f"  p99 {timing.p99_s * 1e3:7.3f} ms  ({timing.count})\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
