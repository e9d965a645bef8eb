"""Which rows one claim takes: the same choice in every backend."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pyarrow as pa

from tokenplane.schemas.errors import ConfigError, SchemaMismatchError


def check_claim(max_rows: int, lease_s: float) -> None:
    """Raises:
    ConfigError: ``max_rows`` < 1 or ``lease_s`` <= 0.
    """
    if max_rows < 1:
        raise ConfigError("max_rows", expected=">= 1", got=max_rows)
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
    rows: Iterable[tuple[int, Hashable, bool]], max_rows: int
) -> list[tuple[int, ...]]:
    """Row numbers to claim, one tuple per group, oldest group first.

    Args:
        rows: (row number, group value, under a live lease) of every row that the consumer has not
            acknowledged, in write order. A row whose group value is None is a group of its own.

    Whole groups are taken while they fit into ``max_rows``; the first is taken even if it does not.
    A group with a leased row is passed over: its rows stay together when the lease ends.
    """
    groups: dict[Hashable, list[int]] = {}
    busy: set[Hashable] = set()
    for number, value, leased in rows:
        name: Hashable = ("row", number) if value is None else ("group", value)
        groups.setdefault(name, []).append(number)
        if leased:
            busy.add(name)
    chosen: list[tuple[int, ...]] = []
    room = max_rows
    for name, members in groups.items():
        if name in busy or (chosen and len(members) > room):
            continue
        chosen.append(tuple(members))
        room -= len(members)
        if room <= 0:
            break
    return chosen
