"""What a sweep of the memory store removes, and what it leaves and why."""

from __future__ import annotations

from tokenplane.staging.memory_backend.state import MemoryState, Partition, Row
from tokenplane.staging.store_types import RetentionPolicy, SweepReport


class Sweep:
    """One sweep: rows are judged first and removed afterwards. Its owner locks."""

    def __init__(self, state: MemoryState, policy: RetentionPolicy, now: float) -> None:
        self._state = state
        self._policy = policy
        self._now = now
        self._doomed: list[tuple[Partition, str]] = []
        self._kept = {"leased": 0, "held": 0, "backlog": 0}
        for name, held in state.partitions.items():
            if policy.max_age_s is not None and policy.partition in (None, name):
                self._judge(name, held)

    def _judge(self, name: str, held: Partition) -> None:
        doomed, stays = [], False
        for key, row in held.rows.items():
            if not key.startswith(self._policy.prefix):
                continue
            why = self._why_kept(name, held, key, row)
            if why is None:
                doomed.append((held, key))
                continue
            stays = True
            if why in self._kept:
                self._kept[why] += 1
        if not (stays and self._policy.whole):
            self._doomed += doomed

    def _why_kept(self, name: str, held: Partition, key: str, row: Row) -> str | None:
        readers = held.consumers.values()
        if self._now - row.created_at < (self._policy.max_age_s or 0.0):
            return "young"
        if any(reader.is_leased(row.seq, self._now) for reader in readers):
            return "leased"
        if self._state.is_held(name, key, self._now):
            return "held"
        if not self._policy.include_backlog and any(row.seq not in r.acked for r in readers):
            return "backlog"
        return None

    def report(self, max_bytes: int | None, *, dry_run: bool) -> SweepReport:
        """What goes; it is gone when this returns, unless ``dry_run``."""
        removed = [held.rows[key] for held, key in self._doomed]
        lost: dict[bytes, int] = {}
        for sha in (sha for row in removed for sha in row.blobs):
            lost[sha] = lost.get(sha, 0) + 1
        blobs = self._state.blobs
        gone = [sha for sha, count in lost.items() if count == blobs[sha].refs]
        row_bytes = sum(len(row.packed.message) for row in removed)
        blob_bytes = sum(len(blobs[sha].data) for sha in gone)
        remaining = self._state.nbytes - row_bytes - blob_bytes
        if not dry_run:
            for held, key in self._doomed:
                self._state.remove(held, key)
        return SweepReport(
            rows=len(removed),
            bytes=row_bytes,
            blobs=len(gone),
            blob_bytes=blob_bytes,
            kept_leased=self._kept["leased"],
            kept_held=self._kept["held"],
            kept_backlog=self._kept["backlog"],
            remaining_bytes=remaining,
            max_bytes=max_bytes,
            dry_run=dry_run,
        )
