"""The prefix resolver: proven arrays only, few reads, bounded memory, safe under races."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.capture.rollouts import Call, RolloutMaker
from tokenplane.capture.prefix_resolver import PrefixResolver
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.schemas.errors import PrefixError, StoreUnavailableError
from tokenplane.schemas.wire import CaptureAdmission
from tokenplane.staging import StagingStore, TokenSink, TokenSource, open_store


class CountingSource:
    """A real token source that counts its reads and can be held or broken."""

    def __init__(self, store: StagingStore) -> None:
        self.source = TokenSource(store)
        self.reads: list[list[str]] = []
        self.hold: threading.Event | None = None
        self.error: Exception | None = None

    def fetch_tokens(self, keys: Sequence[str]) -> Any:
        self.reads.append(list(keys))
        if self.hold is not None:
            assert self.hold.wait(10)
        if self.error is not None:
            raise self.error
        return self.source.fetch_tokens(keys)


class Rig:
    """A store with a rollout of ``turns`` calls, and a resolver that has seen none of them."""

    def __init__(self, turns: int = 3, max_bytes: int = 2**20) -> None:
        self.store = open_store("memory:")
        self.maker = RolloutMaker(TQMegatronTokenStager(TokenSink(self.store)))
        self.calls: list[Call] = []
        for _ in range(turns):
            self.calls.append(self.maker.stage(self.calls[-1] if self.calls else None)[1])
        self.source = CountingSource(self.store)
        self.resolver = PrefixResolver(self.source, max_bytes)

    def child_of(self, call: Call, **changes: Any) -> CaptureAdmission:
        return self.maker.admission(call).model_copy(update=changes)


def test_a_chain_becomes_one_read_only_array() -> None:
    rig = Rig(4)
    for call in rig.calls:
        found = rig.resolver.resolve(rig.child_of(call))
        assert found.token_ids.dtype == np.int32
        assert found.token_ids.tolist() == call.tokens.tolist()
        assert found.n_sampled == 4
        with pytest.raises(ValueError, match="read-only"):
            found.token_ids[0] = 1
    root = rig.resolver.resolve(
        CaptureAdmission(rollout_id="roll-1", model_call_id="x", mode="text")
    )
    assert (root.source, len(root.token_ids)) == ("root", 0)


def test_each_row_is_read_once_and_hits_read_nothing() -> None:
    rig = Rig(4)
    for call in [*rig.calls, *rig.calls]:
        rig.resolver.resolve(rig.child_of(call))
    assert rig.source.reads == [[call.key] for call in rig.calls]
    assert rig.resolver.stats().hits == 4
    assert rig.resolver.stats().trunks == 1


def test_a_deep_miss_caches_every_call_on_the_way() -> None:
    rig = Rig(4)
    assert rig.resolver.resolve(rig.child_of(rig.calls[3])).source == "store"
    for call in rig.calls:
        found = rig.resolver.resolve(rig.child_of(call))
        assert (found.source, found.token_ids.tolist()) == ("cache", call.tokens.tolist())
    assert len(rig.source.reads) == 1


def test_what_the_stager_made_needs_no_read() -> None:
    store = open_store("memory:")
    source = CountingSource(store)
    resolver = PrefixResolver(source)
    maker = RolloutMaker(TQMegatronTokenStager(TokenSink(store), resolver=resolver))
    call: Call | None = None
    for _ in range(5):
        call = maker.stage(call)[1]
        found = resolver.resolve(maker.admission(call))
        assert (found.source, found.token_ids.tolist()) == ("cache", call.tokens.tolist())
    assert source.reads == []
    assert resolver.stats().trunks == 1


def test_branches_share_their_trunk() -> None:
    rig = Rig(2)
    left = rig.maker.stage(rig.calls[0])[1]
    for call in (rig.calls[1], left, rig.calls[0], left, rig.calls[1]):
        assert rig.resolver.resolve(rig.child_of(call)).token_ids.tolist() == call.tokens.tolist()
    assert rig.resolver.stats().rows_fetched == 3


def test_memory_grows_with_the_rollout_not_with_its_square() -> None:
    rig = Rig(60)
    for call in rig.calls:
        rig.resolver.resolve(rig.child_of(call))
    tokens = len(rig.calls[-1].tokens)
    assert rig.resolver.stats().nbytes <= 4 * tokens + 60 * 512


def test_the_byte_bound_holds_and_the_least_used_goes_first() -> None:
    store = open_store("memory:")
    stager = TQMegatronTokenStager(TokenSink(store))
    source = CountingSource(store)
    calls = [RolloutMaker(stager, f"r{i}").stage(carry=100)[1] for i in range(6)]
    resolver = PrefixResolver(source, max_bytes=3 * (4 * 104 + 512))
    makers = [RolloutMaker(stager, f"r{i}") for i in range(6)]

    def touch(i: int) -> str:
        return resolver.resolve(makers[i].admission(calls[i])).source

    assert [touch(i) for i in (0, 1, 2, 0, 3)] == ["store", "store", "store", "cache", "store"]
    assert [touch(i) for i in (0, 1)] == ["cache", "store"]
    assert resolver.stats().nbytes <= 3 * (4 * 104 + 512)
    assert PrefixResolver(source, max_bytes=10).resolve(makers[0].admission(calls[0])).rows_fetched


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prev_len": 26}, "prefix_length"),
        ({"parent_chain_hash": "0" * 64}, "prefix_chain_hash"),
    ],
)
def test_an_admission_that_the_rows_do_not_prove(changes: Any, code: str, warm: bool) -> None:
    rig = Rig(3)
    good = rig.child_of(rig.calls[-1])
    if warm:
        rig.resolver.resolve(good)
    with pytest.raises(PrefixError) as caught:
        rig.resolver.resolve(good.model_copy(update=changes))
    assert caught.value.code == code
    assert rig.resolver.resolve(good).token_ids.tolist() == rig.calls[-1].tokens.tolist()


def test_chains_that_lie() -> None:
    rig = Rig(3)
    good = rig.child_of(rig.calls[-1])
    a, b, c = good.staging_chain
    foreign = RolloutMaker(rig.maker.stager, "other").stage()[1].key
    for chain, code in (
        ([a, c], "prefix_length"),
        ([b, a, c], "prefix_length"),
        ([a, b, b], "prefix_duplicate_key"),
        ([a, b], "prefix_length"),
        ([a, b, "roll-1/none/1"], "prefix_missing_row"),
        ([foreign, b, c], "prefix_wrong_rollout"),
    ):
        with pytest.raises(PrefixError) as caught:
            rig.resolver.resolve(good.model_copy(update={"staging_chain": chain}))
        assert caught.value.code == code, chain


def test_a_store_failure_has_its_own_code_and_is_not_cached() -> None:
    rig = Rig(2)
    admission = rig.child_of(rig.calls[-1])
    rig.source.error = StoreUnavailableError("down")
    with pytest.raises(PrefixError) as caught:
        rig.resolver.resolve(admission)
    assert caught.value.code == "prefix_store_failure"
    rig.source.error = None
    assert rig.resolver.resolve(admission).source == "store"


def test_concurrent_misses_share_one_read() -> None:
    rig = Rig(3)
    rig.source.hold = threading.Event()
    admission = rig.child_of(rig.calls[-1])
    wrong = admission.model_copy(update={"parent_chain_hash": "0" * 64})
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(rig.resolver.resolve, admission)
        while not rig.source.reads:
            pass
        rest = [pool.submit(rig.resolver.resolve, admission) for _ in range(7)]
        liar = pool.submit(rig.resolver.resolve, wrong)
        while rig.resolver.stats().shared_flights < 8:
            pass
        rig.source.hold.set()
        arrays = [f.result(10).token_ids.tolist() for f in (first, *rest)]
    assert arrays == [rig.calls[-1].tokens.tolist()] * 8
    assert len(rig.source.reads) == 1
    with pytest.raises(PrefixError):
        liar.result()


def test_a_leader_that_fails_does_not_take_good_followers_with_it() -> None:
    rig = Rig(3)
    rig.source.hold = threading.Event()
    good = rig.child_of(rig.calls[-1])
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(
            rig.resolver.resolve, good.model_copy(update={"parent_chain_hash": "0" * 64})
        )
        while not rig.source.reads:
            pass
        follower = pool.submit(rig.resolver.resolve, good)
        while rig.resolver.stats().shared_flights < 1:
            pass
        rig.source.hold.set()
        assert follower.result(10).token_ids.tolist() == rig.calls[-1].tokens.tolist()
        with pytest.raises(PrefixError):
            leader.result(10)


def test_a_read_in_flight_never_enters_the_cache_of_a_new_source() -> None:
    old, new = Rig(2), Rig(2)
    admission = old.child_of(old.calls[-1])
    old.source.hold = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(old.resolver.resolve, admission)
        while not old.source.reads:
            pass
        old.resolver.replace_source(new.source)
        old.source.hold.set()
        assert flight.result(10).token_ids.tolist() == old.calls[-1].tokens.tolist()
    assert old.resolver.stats().trunks == 0
    with pytest.raises(PrefixError) as caught:
        old.resolver.resolve(admission)
    assert caught.value.code == "prefix_missing_row"


def test_inline_prefixes() -> None:
    resolver = Rig(1).resolver
    admission = CaptureAdmission(
        rollout_id="r",
        model_call_id="c",
        mode="token_in",
        parent_call_id="p",
        prev_len=2,
        required_prefix_token_ids=[5, 6],
        parent_chain_hash="0" * 64,
    )
    found = resolver.resolve(admission)
    assert (found.source, found.token_ids.tolist()) == ("inline", [5, 6])
    big = admission.model_copy(update={"required_prefix_token_ids": [5, 2**31]})
    with pytest.raises(PrefixError):
        resolver.resolve(big)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=25))
def test_any_tree_in_any_order_resolves_exactly(steps: list[tuple[int, bool]]) -> None:
    store = open_store("memory:")
    resolver = PrefixResolver(CountingSource(store), max_bytes=6000)
    maker = RolloutMaker(TQMegatronTokenStager(TokenSink(store), resolver=resolver))
    calls = [maker.stage()[1]]
    for pick, grow in steps:
        call = calls[pick % len(calls)]
        if grow:
            calls.append(maker.stage(call, carry=pick % 4, generate=1 + pick % 3)[1])
        found = resolver.resolve(maker.admission(call))
        assert found.token_ids.tolist() == call.tokens.tolist()
        assert resolver.stats().nbytes <= 6000
