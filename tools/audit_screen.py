"""An audit on the screen: one table, what its columns mean, a histogram, and what failed."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Console
from rich.table import Table

from tokenplane.tools.audit_numbers import Audit, RolloutAudit
from tokenplane.tools.wide_console import open_console

_BAR = 40
_COLUMNS = (
    ("rollout", "id"),
    ("calls", "model calls that are staged"),
    ("sampled", "tokens that the model sampled, in all branches"),
    ("trained", "tokens that carry loss in the training row (~: none is published yet)"),
    ("weights", "versions of the weights that sampled them"),
    ("behind", "how many versions behind the trainer: mean, and the most"),
    ("spanning", "calls during which the weights changed"),
    ("kv-stale", "tokens sampled on top of KV entries of older weights (?: not recorded)"),
    (
        "prefix",
        "where the tokens of the turns before came from: r root, c cache, s store, i inline",
    ),
    ("failed", "calls that were answered but not captured"),
    ("verified", "every digest, chain and published row was recomputed"),
)


def show_audit(result: Audit) -> None:
    """Print to stdout."""
    console = open_console()
    if not result.rollouts:
        console.print("the store holds no rollout")
        return
    version = "none" if result.trainer_version is None else f"v{result.trainer_version}"
    console.print(f"trainer version {version}, {len(result.rollouts)} rollouts")
    console.print(_table(result))
    for name, meaning in _COLUMNS[1:]:
        console.print(f"  {name:<9}{meaning}", style="dim", soft_wrap=True)
    _histogram(console, result)
    _details(console, result.rollouts)


def _table(result: Audit) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_footer=len(result.rollouts) > 1, pad_edge=False)
    totals = _totals(result)
    for at, (name, _) in enumerate(_COLUMNS):
        table.add_column(
            name,
            footer=totals[at],
            justify="right" if 0 < at < 8 or name == "failed" else "left",
            overflow="fold",
        )
    for one in result.rollouts:
        style = "" if one.verified else "bold red"
        table.add_row(*_cells(one), style=style)
    return table


def _cells(one: RolloutAudit) -> list[str]:
    versions = list(one.tokens_by_version)
    behind = "-"
    if one.mean_staleness is not None:
        behind = f"{one.mean_staleness:.2f} / {one.max_staleness}"
    return [
        one.rollout_id,
        str(one.calls),
        str(one.sampled_tokens),
        f"{'' if one.published else '~'}{one.trainable_tokens}",
        _range(versions),
        behind,
        str(one.spanning_calls),
        f"{one.kv_stale_tokens}{'?' if one.kv_unknown_tokens else ''}",
        " ".join(f"{name[0]}{count}" for name, count in one.prefix_sources.items()) or "-",
        str(sum(one.failures.values())),
        "yes" if one.verified else "NO",
    ]


def _totals(result: Audit) -> list[str]:
    rollouts = result.rollouts
    sources: Counter[str] = Counter()
    for one in rollouts:
        sources.update(one.prefix_sources)
    sampled = sum(result.staleness.values())
    behind = "-"
    if sampled:
        mean = sum(age * count for age, count in result.staleness.items()) / sampled
        behind = f"{mean:.2f} / {max(result.staleness)}"
    return [
        "all",
        str(sum(one.calls for one in rollouts)),
        str(sum(one.sampled_tokens for one in rollouts)),
        str(sum(one.trainable_tokens for one in rollouts)),
        _range([version for one in rollouts for version in one.tokens_by_version]),
        behind,
        str(sum(one.spanning_calls for one in rollouts)),
        str(sum(one.kv_stale_tokens for one in rollouts)),
        " ".join(f"{name[0]}{count}" for name, count in sorted(sources.items())) or "-",
        str(sum(sum(one.failures.values()) for one in rollouts)),
        "yes" if all(one.verified for one in rollouts) else "NO",
    ]


def _range(versions: list[int]) -> str:
    if not versions:
        return "-"
    low, high = min(versions), max(versions)
    return f"v{low}" if low == high else f"v{low}..v{high}"


def _histogram(console: Console, result: Audit) -> None:
    total = sum(result.staleness.values())
    if not total:
        return
    console.print()
    console.print("sampled tokens by how many versions they are behind the trainer")
    most = max(result.staleness.values())
    for behind, count in result.staleness.items():
        bar = "█" * max(1, round(_BAR * count / most))
        console.print(
            f"  {behind:>4}  {bar:<{_BAR}}  {count} ({count / total:.1%})", soft_wrap=True
        )


def _details(console: Console, rollouts: tuple[RolloutAudit, ...]) -> None:
    console.print()
    modes = sorted({mode for one in rollouts for mode in one.logprobs_modes})
    console.print(f"log-probabilities: {', '.join(modes) or '-'}", soft_wrap=True)
    ways = sorted({way for one in rollouts for way in one.sampling})
    drifting = [one.rollout_id for one in rollouts if len(one.sampling) > 1]
    console.print(f"sampling: {'; '.join(ways) or '-'}", soft_wrap=True)
    if drifting:
        console.print(f"  changed within: {', '.join(drifting)}", style="yellow", soft_wrap=True)
    _splits(console, rollouts)
    for title, name, style in (
        ("answered but not captured", "failures", "yellow"),
        ("does not verify (`tokenplane verify` names the rows)", "problems", "bold red"),
    ):
        for one in rollouts:
            codes: dict[str, int] = getattr(one, name)
            if codes:
                listed = ", ".join(f"{count} x {code}" for code, count in codes.items())
                console.print(f"{title}: {one.rollout_id}: {listed}", style=style, soft_wrap=True)


def _splits(console: Console, rollouts: tuple[RolloutAudit, ...]) -> None:
    known = [one for one in rollouts if one.splits_avoided is not None]
    if not known:
        return
    avoided = sum(one.splits_avoided or 0 for one in known)
    console.print(
        f"splits avoided: {avoided} of {sum(one.continuations for one in known)} continuations "
        "(the answer before, sent as text, would have been other tokens)",
        soft_wrap=True,
    )
