"""How a ``tq:`` store reaches its queue; imports neither Ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """How to reach the queue, and what may be started."""

    address: str
    """``local`` (start a Ray of our own), ``auto``, or ``host:port``; see ``ray.init``."""
    partition: str
    units: int = 2
    """Storage units of a queue that we start."""
    start: bool = True
    """Start a queue where the cluster has none, and anew when one that we started breaks."""
    deadline_s: float = 5.0
    """For one call of a running queue."""
    start_s: float = 180.0
    """For finding or starting everything; on a loaded machine it takes a minute."""
