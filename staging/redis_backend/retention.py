"""Sizes and retention of a Redis store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.redis_backend.retention_scripts import STATS, SWEEP
from tokenplane.staging.redis_backend.scripts import PARTITIONS
from tokenplane.staging.store_types import RetentionPolicy, StoreStats, SweepReport

ROWS_PER_STEP: Final = 500
"""A sweep holds the server up for this many rows at a time."""
_COUNTS: Final = (
    "rows",
    "bytes",
    "kept_leased",
    "kept_held",
    "kept_backlog",
    "blobs",
    "blob_bytes",
)
"""What the script counts, in its order."""


def read_stats(
    connection: RedisConnection,
    total: bytes,
    now: str,
    partition: str | None,
    prefix: str,
    max_bytes: int | None,
) -> StoreStats:
    """See ``StagingStore.stats``; all numbers are of one moment."""
    rows, nbytes, blobs, blob_bytes, sealed, readers = connection.script(
        STATS, [total], now, int(partition is None), partition or "", prefix
    )
    backlog: dict[str, int] = {}
    leased: dict[str, int] = {}
    for name, pending, live in readers:
        consumer = name.decode()
        backlog[consumer] = backlog.get(consumer, 0) + pending
        leased[consumer] = leased.get(consumer, 0) + live
    return StoreStats(
        rows=int(rows),
        bytes=int(nbytes),
        blobs=int(blobs),
        blob_bytes=int(blob_bytes),
        max_bytes=max_bytes,
        backlog=backlog,
        leased=leased,
        sealed=tuple(sorted(name.decode() for name in sealed)),
    )


def sweep_rows(
    connection: RedisConnection,
    total: bytes,
    now: Callable[[], str],
    policy: RetentionPolicy,
    max_bytes: int | None,
    *,
    dry_run: bool,
) -> SweepReport:
    """See ``StagingStore.sweep``. Whether a row goes is decided in the step that removes it."""
    counted = [0] * len(_COUNTS)
    lost: dict[bytes, int] = {}
    for partition in _partitions(connection, total, policy):
        after: bytes | int = 0
        while after != b"":
            after, *counts, shas = connection.script(
                SWEEP,
                [total],
                now(),
                partition,
                policy.prefix,
                repr(policy.max_age_s),
                int(not policy.include_backlog),
                int(not dry_run),
                after,
                0 if policy.whole else ROWS_PER_STEP,
            )
            counted = [sum_ + int(more) for sum_, more in zip(counted, counts, strict=True)]
            for at in range(0, len(shas), 32):
                lost[shas[at : at + 32]] = lost.get(shas[at : at + 32], 0) + 1
    found = dict(zip(_COUNTS, counted, strict=True))
    if dry_run:
        for sha, count in lost.items():
            if count == int(connection.command("GET", total[:-1] + b"n:" + sha) or 0):
                found["blobs"] += 1
                found["blob_bytes"] += connection.command("STRLEN", total[:-1] + b"b:" + sha)
    left = read_stats(connection, total, now(), None, "", max_bytes)
    remaining = left.bytes + left.blob_bytes
    return SweepReport(
        **found,
        remaining_bytes=remaining - (found["bytes"] + found["blob_bytes"] if dry_run else 0),
        max_bytes=max_bytes,
        dry_run=dry_run,
    )


def _partitions(connection: RedisConnection, total: bytes, policy: RetentionPolicy) -> list[bytes]:
    if policy.max_age_s is None:
        return []
    names: list[bytes] = sorted(connection.script(PARTITIONS, [total], ""))
    return [name for name in names if policy.partition in (None, name.decode())]
