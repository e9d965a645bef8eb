"""What ``tokenplane collect`` says: one line per rollout, and why some are not verified."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenplane.capture.collect.collector import PublishReport
    from tokenplane.schemas.training_row import TrainingRow


_WORDS = ("rollout", "status", "reason", "terminal")
"""Columns that are no numbers."""


@dataclass(frozen=True, slots=True)
class CollectedRollout:
    """What became of one rollout."""

    rollout_id: str
    status: str
    """verified, salvaged, or placeholder."""
    reason: str | None
    """Why it is not verified, or where its published rows differ from these."""
    rows: int
    calls: int
    tokens: int
    trainable: int
    terminal: str | None
    """How its terminal call was found."""
    reward: float | None
    published: int
    """Rows that this run added; the others were there already."""
    cleaned: int = 0
    """Staged rows removed after the rows were durable."""
    clean_error: str | None = None


@dataclass(slots=True)
class CollectReport:
    """All rollouts of one run, in the order of the file."""

    rollouts: list[CollectedRollout] = field(default_factory=list)

    @property
    def unverified(self) -> list[CollectedRollout]:
        """Rollouts without a verified row."""
        return [r for r in self.rollouts if r.status != "verified" or r.reason is not None]


def summarize(
    rows: Sequence[TrainingRow], done: PublishReport | None = None, *, conflict: str | None = None
) -> CollectedRollout:
    """The summary of a rollout's rows, which were published unless there was a conflict."""
    first = rows[0]
    status = "salvaged" if first.salvaged else "verified" if first.sample_mask else "placeholder"
    return CollectedRollout(
        rollout_id=first.rollout_id,
        status=status,
        reason=conflict or first.reason,
        rows=len(rows),
        calls=sum(len(row.call_spans) for row in rows),
        tokens=sum(len(row.token_ids) for row in rows) if first.call_spans else 0,
        trainable=sum(row.trainable_tokens for row in rows),
        terminal=first.terminal_selection,
        reward=first.reward,
        published=0 if done is None else done.published,
        cleaned=0 if done is None else done.cleaned_rows,
        clean_error=None if done is None else done.clean_error,
    )


def print_report(report: CollectReport) -> None:
    """One line per rollout, then the reasons with their counts."""
    from rich.table import Table

    from tokenplane.tools.wide_console import open_console

    columns: dict[str, Callable[[CollectedRollout], object]] = {
        "rollout": lambda r: r.rollout_id,
        "status": lambda r: r.status,
        "reason": lambda r: r.reason or "",
        "rows": lambda r: r.rows,
        "calls": lambda r: r.calls,
        "tokens": lambda r: r.tokens,
        "trainable": lambda r: r.trainable,
        "terminal": lambda r: r.terminal or "",
        "reward": lambda r: "" if r.reward is None else f"{r.reward:g}",
        "new": lambda r: r.published,
        "cleaned": lambda r: r.cleaned,
    }
    table = Table(box=None, pad_edge=False)
    for name in columns:
        # On a narrow terminal cells take more lines; none is cut.
        table.add_column(
            name,
            justify="left" if name in _WORDS else "right",
            no_wrap=name == "status",
            overflow="fold",
        )
    for rollout in report.rollouts:
        table.add_row(*(str(show(rollout)) for show in columns.values()))
    console = open_console()
    console.print(table)
    total = len(report.rollouts)
    print(f"\n{total - len(report.unverified)} of {total} rollouts have a verified row")
    for reason, count in Counter(r.reason or r.status for r in report.unverified).most_common():
        print(f"  {count} x {reason}")
    for rollout in report.rollouts:
        if rollout.clean_error is not None:
            print(f"not cleaned: {rollout.rollout_id}: {rollout.clean_error}", file=sys.stderr)
