"""What the demo shows and leaves behind: a table per rollout, and ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from tokenplane.tools.rollout_view import RolloutView


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """``summary.json``."""

    calls: int
    """Answers that the agents got."""
    staged: int
    """Verified rows in the store."""
    capture_failed: int
    """Answers without a row, and recorded failures."""
    rollouts: int
    training_rows: int
    """Published rows that can be trained on."""
    prefix_exact: bool
    """Engine-side ids equal staged ids for every call: prompts, samples and log-probabilities."""
    spanning_calls: int
    """Calls during which the weights changed."""
    replay_identical: bool
    """A fresh process read everything from disk, verified it, and made the same rows again."""
    row_tokens: int
    trainable_tokens: int
    stage_ms_p50: float
    """Median of the time from a finished generation to its durable row."""

    def shortcomings(self) -> list[str]:
        """What is not as it must be; empty for a good run."""
        wanted = {
            "calls >= 6": self.calls >= 6,
            "staged == calls": self.staged == self.calls,
            "capture_failed == 0": self.capture_failed == 0,
            "training_rows == rollouts": self.training_rows == self.rollouts,
            "prefix_exact": self.prefix_exact,
            "spanning_calls >= 1": self.spanning_calls >= 1,
            "replay_identical": self.replay_identical,
        }
        return [name for name, holds in wanted.items() if not holds]

    def to_json(self) -> dict[str, object]:
        """By field name."""
        return asdict(self)


def show_rollout(console: Console, rollout: RolloutView, stage_ms: Mapping[str, float]) -> None:
    """One table: a line per turn.

    Args:
        stage_ms: milliseconds of staging by model call id.
    """
    table = Table(
        title=f"{rollout.rollout_id}", box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left"
    )
    for name in (
        "turn",
        "prompt",
        "carried over",
        "new",
        "generated",
        "prefix",
        "weights",
        "stage",
    ):
        table.add_column(name, justify="left" if name in ("prefix", "weights") else "right")
    for call in rollout.calls:
        staged = call.row.call
        versions = sorted(set(call.versions().tolist()))
        spent = stage_ms.get(call.call_id)
        table.add_row(
            str(call.turn),
            str(staged.cum_len - staged.generation_len),
            str(staged.prev_len),
            str(staged.carry_len),
            str(staged.generation_len),
            call.row.evidence.prefix_source or "-",
            " → ".join(f"v{version}" for version in versions),
            "-" if spent is None else f"{spent:.1f} ms",
        )
    console.print(table)
