"""Leases and acknowledgements of one consumer, kept in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Lease:
    """One delivery. Ended leases stay, for the attempt count."""

    lease_id: str
    attempt: int
    expires_at_s: float


@dataclass(slots=True)
class Consumer:
    """What one consumer of one partition was given and is done with, by row number."""

    acked: set[int] = field(default_factory=set)
    leases: dict[int, Lease] = field(default_factory=dict)

    def is_leased(self, seq: int, now: float) -> bool:
        """True while the row's lease is live."""
        lease = self.leases.get(seq)
        return lease is not None and lease.expires_at_s > now

    def was_given(self, seq: int) -> bool:
        """True if the row was delivered before and not acknowledged since."""
        return seq in self.leases

    def lease(self, seqs: Iterable[int], now: float, lease_s: float) -> list[tuple[int, Lease]]:
        """New leases for rows that the caller knows to be free."""
        lease_id = uuid.uuid4().hex
        given = []
        for seq in seqs:
            before = self.leases.get(seq)
            attempt = 1 if before is None else before.attempt + 1
            self.leases[seq] = Lease(lease_id, attempt, now + lease_s)
            given.append((seq, self.leases[seq]))
        return given

    def ack(self, seqs: Sequence[int]) -> int:
        """Mark as done; counts those that were not."""
        fresh = set(seqs) - self.acked
        self.acked |= fresh
        for seq in fresh:
            self.leases.pop(seq, None)
        return len(fresh)

    def release(self, seqs: Sequence[int], now: float) -> int:
        """End live leases; counts them."""
        live = [seq for seq in set(seqs) if self.is_leased(seq, now)]
        for seq in live:
            self.leases[seq].expires_at_s = now
        return len(live)

    def forget(self, seq: int) -> None:
        """The row is gone."""
        self.acked.discard(seq)
        self.leases.pop(seq, None)
