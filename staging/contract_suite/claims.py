"""Contract of every store: claims, leases and acknowledgements."""

from __future__ import annotations

import pytest

from tokenplane.schemas.errors import ConfigError, SchemaMismatchError
from tokenplane.staging.contract_suite.backend import FakeClock, plain_row, same_bits
from tokenplane.staging.contract_suite.rows import run_together
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import Claimed


def fill(store: StagingStore, groups: str, partition: str = "p") -> None:
    """A row per letter, keys ``0``, ``1``, ...; the letter is its group, a dot is no group."""
    for number, group in enumerate(groups):
        row = plain_row(number, group=None if group == "." else group)
        store.put(partition, str(number), row)


def taken(claims: list[Claimed]) -> str:
    """The claimed keys in one string."""
    return "".join(claim.key for claim in claims)


class ClaimContract:
    """See ``StagingStoreContract``."""

    def test_claims_hand_out_the_oldest_rows_once(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        fill(store, ".....")
        first = store.claim("p", "c", max_rows=2, lease_s=10)
        assert taken(first) == "01"
        assert all(same_bits(claim.row, plain_row(int(claim.key))) for claim in first)
        assert {claim.attempt for claim in first} == {1}
        assert {claim.expires_at_s for claim in first} == {clock() + 10}
        assert len({claim.lease_id for claim in first}) == 1
        second = store.claim("p", "c", max_rows=9, lease_s=10)
        assert taken(second) == "234"
        assert second[0].lease_id != first[0].lease_id
        assert store.claim("p", "c", max_rows=9, lease_s=10) == []

    def test_an_acknowledged_row_is_gone_for_its_consumer_only(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        fill(store, "...")
        store.claim("p", "c", max_rows=9, lease_s=10)
        assert store.ack("p", "c", ["0", "2", "2", "no such row"]) == 2
        assert store.ack("p", "c", ["0"]) == 0
        clock.advance(11)
        assert taken(store.claim("p", "c", max_rows=9, lease_s=10)) == "1"
        assert taken(store.claim("p", "d", max_rows=9, lease_s=10)) == "012"
        assert store.keys("p") == ["0", "1", "2"]

    def test_a_row_whose_lease_expired_comes_again(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        fill(store, "..")
        before = store.claim("p", "c", max_rows=1, lease_s=10)
        clock.advance(9.5)
        assert taken(store.claim("p", "c", max_rows=9, lease_s=10)) == "1"
        clock.advance(0.5)
        again = store.claim("p", "c", max_rows=9, lease_s=10)
        assert taken(again) == "0"
        assert again[0].attempt == 2
        assert again[0].lease_id != before[0].lease_id
        # At least once: the first holder may still finish.
        assert store.ack("p", "c", ["0"]) == 1
        clock.advance(100)
        assert taken(store.claim("p", "c", max_rows=9, lease_s=10)) == "1"

    def test_a_released_row_can_be_claimed_at_once(self, store: StagingStore) -> None:
        fill(store, "..")
        store.claim("p", "c", max_rows=9, lease_s=10)
        assert store.release("p", "c", ["0", "0", "no such row"]) == 1
        assert store.release("p", "c", ["0"]) == 0
        again = store.claim("p", "c", max_rows=9, lease_s=10)
        assert taken(again) == "0"
        assert again[0].attempt == 2

    def test_acknowledging_without_a_claim_skips_the_row(self, store: StagingStore) -> None:
        fill(store, "...")
        assert store.ack("p", "c", ["1"]) == 1
        assert taken(store.claim("p", "c", max_rows=9, lease_s=10)) == "02"

    def test_rows_that_come_later_are_claimed_later(self, store: StagingStore) -> None:
        assert store.claim("p", "c", max_rows=9, lease_s=10) == []
        fill(store, "..")
        store.ack("p", "c", ["0", "1"])
        store.put("p", "2", plain_row(2))
        assert taken(store.claim("p", "c", max_rows=9, lease_s=10)) == "2"

    def test_a_discarded_row_is_claimed_no_more(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        fill(store, "...")
        store.claim("p", "c", max_rows=2, lease_s=10)
        assert store.discard("p", ["0", "2"]) == 2
        assert store.ack("p", "c", ["0"]) == 0
        clock.advance(11)
        assert taken(store.claim("p", "c", max_rows=9, lease_s=10)) == "1"

    def test_a_new_row_under_a_discarded_key_is_a_new_row(self, store: StagingStore) -> None:
        fill(store, ".")
        store.claim("p", "c", max_rows=1, lease_s=10)
        store.ack("p", "c", ["0"])
        store.discard("p", ["0"])
        store.put("p", "0", plain_row(5))
        (claim,) = store.claim("p", "c", max_rows=1, lease_s=10)
        assert claim.attempt == 1
        assert same_bits(claim.row, plain_row(5))

    def test_concurrent_claims_share_no_row(self, store: StagingStore) -> None:
        fill(store, "." * 40)

        def take() -> list[str]:
            keys: list[str] = []
            while claims := store.claim("p", "c", max_rows=3, lease_s=1000):
                keys += [claim.key for claim in claims]
            return keys

        results = run_together(take, take, take, take)
        keys = [key for result in results if isinstance(result, list) for key in result]
        assert sorted(keys, key=int) == [str(number) for number in range(40)]

    def test_groups_are_claimed_whole(self, store: StagingStore) -> None:
        fill(store, "aba.bcc")
        assert taken(store.claim("p", "c", max_rows=3, lease_s=9, group_column="group")) == "023"
        assert taken(store.claim("p", "c", max_rows=3, lease_s=9, group_column="group")) == "14"
        assert taken(store.claim("p", "c", max_rows=3, lease_s=9, group_column="group")) == "56"
        assert store.claim("p", "c", max_rows=3, lease_s=9, group_column="group") == []

    def test_the_first_group_is_whole_even_if_it_is_large(self, store: StagingStore) -> None:
        fill(store, "aaaab")
        assert taken(store.claim("p", "c", max_rows=2, lease_s=9, group_column="group")) == "0123"

    def test_a_group_under_lease_waits_for_its_rows(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        fill(store, "aab")
        store.claim("p", "c", max_rows=1, lease_s=9)
        assert taken(store.claim("p", "c", max_rows=9, lease_s=9, group_column="group")) == "2"
        clock.advance(9)
        store.ack("p", "c", ["2"])
        assert taken(store.claim("p", "c", max_rows=9, lease_s=9, group_column="group")) == "01"

    def test_concurrent_claims_split_no_group(self, store: StagingStore) -> None:
        fill(store, "abcabcabcabcdedede")

        def take() -> list[str]:
            groups: list[str] = []
            while claims := store.claim("p", "c", max_rows=5, lease_s=99, group_column="group"):
                groups += sorted({claim.row.column("group")[0].as_py() for claim in claims})
            return groups

        results = run_together(take, take, take)
        groups = [group for result in results if isinstance(result, list) for group in result]
        assert sorted(groups) == ["a", "b", "c", "d", "e"]

    def test_a_group_waits_for_its_members(self, store: StagingStore, clock: FakeClock) -> None:
        def claim(wait_s: float | None = None) -> str:
            return taken(
                store.claim(
                    "p",
                    "c",
                    max_rows=9,
                    lease_s=5,
                    group_column="group",
                    group_size=3,
                    group_wait_s=wait_s,
                )
            )

        fill(store, "ab.a")  # from several publishers, one by one
        assert claim() == "2"  # without a group: complete by itself
        assert store.stats("p").backlog == {"c": 4}
        store.ack("p", "c", ["2"])
        clock.advance(20)
        store.put("p", "4", plain_row(4, group="a"))
        assert claim() == "034"
        # A group that was handed out once stays claimable, whatever is left of it.
        store.ack("p", "c", ["0", "3"])
        assert claim() == ""
        clock.advance(5)
        assert claim() == "4"
        store.ack("p", "c", ["4"])
        assert claim() == ""
        assert claim(wait_s=26) == ""
        assert claim(wait_s=25) == "1"  # the newest member is that old: the others never come
        assert store.stats("p").backlog == {"c": 1}

    def test_a_late_member_starts_the_wait_anew(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        fill(store, "a")
        clock.advance(10)
        store.put("p", "1", plain_row(1, group="a"))

        def claim() -> str:
            return taken(
                store.claim(
                    "p",
                    "c",
                    max_rows=9,
                    lease_s=5,
                    group_column="group",
                    group_size=3,
                    group_wait_s=10,
                )
            )

        assert claim() == ""
        clock.advance(10)
        assert claim() == "01"

    def test_half_a_group_rule_is_refused(self, store: StagingStore) -> None:
        with pytest.raises(ConfigError):
            store.claim("p", "c", max_rows=1, lease_s=1, group_size=2)
        with pytest.raises(ConfigError):
            store.claim("p", "c", max_rows=1, lease_s=1, group_column="group", group_wait_s=1)

    def test_claims_and_order_survive_a_clock_that_jumps(
        self, store: StagingStore, clock: FakeClock
    ) -> None:
        fill(store, ".")
        store.claim("p", "c", max_rows=9, lease_s=10)
        clock.advance(-1e6)
        store.put("p", "1", plain_row(1))
        assert store.keys("p") == ["0", "1"]
        assert taken(store.claim("p", "c", max_rows=9, lease_s=10)) == "1"
        clock.advance(1e6 + 9)
        assert store.release("p", "c", ["0"]) == 1  # its lease was longer than it should be
        claims = store.claim("p", "c", max_rows=9, lease_s=10)
        assert [(claim.key, claim.attempt) for claim in claims] == [("0", 2), ("1", 2)]
        assert store.ack("p", "c", ["0", "1"]) == 2

    def test_rows_are_grouped_by_plain_values_only(self, store: StagingStore) -> None:
        fill(store, "ab")
        with pytest.raises(SchemaMismatchError):
            store.claim("p", "c", max_rows=9, lease_s=9, group_column="ids")
        with pytest.raises(SchemaMismatchError):
            store.claim("p", "c", max_rows=9, lease_s=9, group_column="no such column")
        assert taken(store.claim("p", "c", max_rows=9, lease_s=9)) == "01"

    @pytest.mark.parametrize(
        ("max_rows", "lease_s"),
        [(0, 1.0), (-1, 1.0), (1.5, 1.0), (2**31, 1.0), (1, 0.0), (1, -1.0)],
    )
    def test_a_claim_of_no_number_of_rows_is_refused(
        self, store: StagingStore, max_rows: int, lease_s: float
    ) -> None:
        with pytest.raises(ConfigError):
            store.claim("p", "c", max_rows=max_rows, lease_s=lease_s)

    def test_backlog_and_leases_are_counted(self, store: StagingStore, clock: FakeClock) -> None:
        fill(store, ".....")
        fill(store, "..", partition="q")
        store.claim("p", "c", max_rows=3, lease_s=10)
        store.ack("p", "c", ["1"])
        store.claim("q", "c", max_rows=1, lease_s=5)
        store.claim("p", "d", max_rows=1, lease_s=10)
        assert store.stats("p").backlog == {"c": 4, "d": 5}
        assert store.stats("p").leased == {"c": 2, "d": 1}
        assert store.stats().backlog == {"c": 6, "d": 5}
        assert store.stats().leased == {"c": 3, "d": 1}
        clock.advance(6)
        assert store.stats().leased == {"c": 2, "d": 1}
        store.discard("p", ["0", "4"])
        assert store.stats("p").backlog == {"c": 2, "d": 3}
