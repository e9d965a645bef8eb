"""Which groups one claim takes, against a plain statement of the rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenplane.staging.claim_order import choose_groups

ROWS = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", 1]), st.booleans()), max_size=12)


@given(rows=ROWS, max_rows=st.integers(1, 6))
def test_groups_are_whole_free_and_fit(
    rows: list[tuple[str | int | None, bool]], max_rows: int
) -> None:
    numbered = [(number, value, leased) for number, (value, leased) in enumerate(rows)]
    chosen = choose_groups(numbered, max_rows)
    members: dict[object, list[int]] = {}
    for number, value, _ in numbered:
        members.setdefault(number if value is None else (value,), []).append(number)
    leased = {number for number, _, is_leased in numbered if is_leased}
    free = [tuple(group) for group in members.values() if not leased & set(group)]
    taken = [number for group in chosen for number in group]
    assert all(group in free for group in chosen)
    assert chosen == sorted(chosen)
    assert len(set(taken)) == len(taken)
    assert len(taken) <= max_rows or len(chosen) == 1
    if free:
        # The oldest free group is always among them, and no group that would still fit is left.
        assert chosen[0] == min(free)
        room = max_rows - len(taken)
        assert not [group for group in free if group not in chosen and len(group) <= room]
