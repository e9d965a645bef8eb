"""Which groups one claim takes, against a plain statement of the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.schemas.errors import ConfigError
from tokenplane.staging.claim_order import GroupRule, PendingRow, check_claim, choose_groups

NOW = 100.0
ROWS = st.lists(
    st.tuples(
        st.sampled_from([None, "a", "b", "c", 1]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([90.0, 95.0, 99.0]),
    ),
    max_size=12,
)


@given(
    rows=ROWS,
    max_rows=st.integers(1, 6),
    size=st.none() | st.integers(1, 4),
    wait_s=st.none() | st.sampled_from([0.0, 4.0, 7.0]),
)
def test_groups_are_whole_free_complete_and_fit(
    rows: list[tuple[str | int | None, bool, bool, float]],
    max_rows: int,
    size: int | None,
    wait_s: float | None,
) -> None:
    numbered = [PendingRow(number, *row) for number, row in enumerate(rows)]
    rule = GroupRule("group", size, None if size is None else wait_s)
    chosen = choose_groups(numbered, max_rows, rule, NOW)
    members: dict[object, list[PendingRow]] = {}
    for row in numbered:
        members.setdefault(row.number if row.group is None else (row.group,), []).append(row)
    ready = [
        tuple(row.number for row in group)
        for group in members.values()
        if not any(row.leased for row in group) and is_complete(group, rule)
    ]
    taken = [number for group in chosen for number in group]
    assert all(group in ready for group in chosen)
    assert chosen == sorted(chosen)
    assert len(set(taken)) == len(taken)
    assert len(taken) <= max_rows or len(chosen) == 1
    if ready:
        # The oldest ready group is always among them, and no group that would still fit is left.
        assert chosen[0] == min(ready)
        room = max_rows - len(taken)
        assert not [group for group in ready if group not in chosen and len(group) <= room]


def is_complete(group: list[PendingRow], rule: GroupRule) -> bool:
    if rule.size is None or group[0].group is None or len(group) >= rule.size:
        return True
    if any(row.delivered for row in group):
        return True
    return rule.wait_s is not None and all(NOW - row.created_at >= rule.wait_s for row in group)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 2},
        {"group_column": "g", "group_size": 0},
        {"group_column": "g", "group_wait_s": 1.0},
        {"group_column": "g", "group_size": 2, "group_wait_s": -1.0},
        {"group_column": "g", "group_size": 2, "group_wait_s": float("nan")},
    ],
)
def test_half_a_rule_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        check_claim(1, 1.0, **options)  # type: ignore[arg-type]
