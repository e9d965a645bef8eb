"""Which rows one claim takes: the same choice in every backend."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import pyarrow as pa

from tokenplane.schemas.errors import ConfigError, SchemaMismatchError


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How rows of a group belong together; see ``StagingStore.claim``."""

    column: str
    size: int | None = None
    wait_s: float | None = None


class PendingRow(NamedTuple):
    """A row that the consumer has not acknowledged."""

    number: int
    group: Hashable
    """Value in the group column; None: a group of its own."""
    leased: bool = False
    """Under a live lease."""
    delivered: bool = False
    """The consumer was given it before."""
    created_at: float = 0.0


@dataclass(slots=True)
class _Group:
    members: list[int] = field(default_factory=list)
    busy: bool = False
    started: bool = False
    newest: float = float("-inf")

    def add(self, row: PendingRow) -> None:
        self.members.append(row.number)
        self.busy = self.busy or row.leased
        self.started = self.started or row.delivered or row.group is None
        self.newest = max(self.newest, row.created_at)

    def is_complete(self, rule: GroupRule, now: float) -> bool:
        if rule.size is None or self.started or len(self.members) >= rule.size:
            return True
        return rule.wait_s is not None and now - self.newest >= rule.wait_s


MOST_ROWS: Final = 2**31 - 1
"""What every backend's database takes as a limit."""


def check_claim(
    max_rows: int,
    lease_s: float,
    group_column: str | None = None,
    group_size: int | None = None,
    group_wait_s: float | None = None,
) -> GroupRule | None:
    """The rule for groups; None: rows are claimed one by one.

    Raises:
        ConfigError: see ``StagingStore.claim``.
    """
    if not isinstance(max_rows, int) or not 1 <= max_rows <= MOST_ROWS:
        raise ConfigError("max_rows", expected=f"an integer, 1 to {MOST_ROWS}", got=max_rows)
    check_lease(lease_s)
    if group_size is not None and (group_column is None or group_size < 1):
        raise ConfigError("group_size", expected=">= 1, with a group_column", got=group_size)
    if group_wait_s is not None and (group_size is None or not group_wait_s >= 0):
        raise ConfigError("group_wait_s", expected=">= 0, with a group_size", got=group_wait_s)
    return None if group_column is None else GroupRule(group_column, group_size, group_wait_s)


def check_lease(lease_s: float) -> None:
    """Raises:
    ConfigError: ``lease_s`` <= 0.
    """
    if not lease_s > 0:
        raise ConfigError("lease_s", expected="> 0", got=lease_s)


def group_value(row: pa.RecordBatch) -> Hashable:
    """The value in the only column of ``row``.

    Raises:
        SchemaMismatchError: a list or struct, which names no group.
    """
    value = row.column(0)[0].as_py()
    if isinstance(value, Hashable):
        return value
    raise SchemaMismatchError("rows cannot be grouped by this column", got=row.schema.names[0])


def choose_groups(
    rows: Iterable[PendingRow], max_rows: int, rule: GroupRule, now: float
) -> list[tuple[int, ...]]:
    """Row numbers to claim, one tuple per group, oldest group first.

    Args:
        rows: in write order.
        now: by the clock that gave ``created_at``.

    Whole groups are taken while they fit into ``max_rows``; the first is taken even if it does not.
    A group with a leased row is passed over: its rows stay together when the lease ends. So is one
    that is not complete yet.
    """
    groups: dict[Hashable, _Group] = {}
    for row in rows:
        name: Hashable = ("row", row.number) if row.group is None else ("group", row.group)
        groups.setdefault(name, _Group()).add(row)
    chosen: list[tuple[int, ...]] = []
    room = max_rows
    for group in groups.values():
        if group.busy or not group.is_complete(rule, now):
            continue
        if chosen and len(group.members) > room:
            continue
        chosen.append(tuple(group.members))
        room -= len(group.members)
        if room <= 0:
            break
    return chosen
