"""NeMo-Gym's ledger over Redis: every rule that it keeps on a file store, and several clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.capture import test_gym_ledger as rules
from tests.stores.redis_backend import RedisBackend
from tests.stores.redis_server import RedisServer
from tokenplane.capture.gym_ledger import GymLedger
from tokenplane.schemas.errors import KeyConflictError


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    return f"{redis_server.url}?namespace={RedisBackend(redis_server).namespace}"


@pytest.fixture
def ledger(url: str) -> Iterator[GymLedger]:
    ledger = GymLedger(url)
    yield ledger
    asyncio.run(ledger.close())


@pytest.mark.parametrize(
    "rule",
    [
        rules.test_parents,
        rules.test_identical_replies_resolve_if_their_tokens_are_equal,
        rules.test_the_longest_matching_parent_wins,
        rules.test_commits_are_write_once,
        rules.test_the_manifest_lists_commits_and_failures_in_order,
        rules.test_what_cannot_be_fingerprinted_is_kept_and_never_a_parent,
        rules.test_a_failed_call_stays_failed_and_a_repeated_reason_counts_once,
    ],
    ids=lambda rule: rule.__name__.removeprefix("test_"),
)
def test_each_rule(rule: Callable[[GymLedger], None], ledger: GymLedger) -> None:
    rule(ledger)


async def test_model_servers_of_several_hosts_share_one_ledger(url: str) -> None:
    """What one recorded the next resolves at once; two that commit one call cannot differ."""
    one, two = GymLedger(url), GymLedger(url)
    assert one.is_process_shared()
    await one.record(rules.commit("a"))
    found = await two.resolve("0-1", [rules.USER, rules.ANSWER, rules.USER])
    assert found.match is not None
    assert found.match.model_call_id == "a"
    racing = [
        ledger.record(rules.commit("b", weight_version=version))
        for version, ledger in enumerate((one, two))
    ]
    outcomes = await asyncio.gather(*racing, return_exceptions=True)
    (refused,) = [outcome for outcome in outcomes if outcome is not None]
    assert isinstance(refused, KeyConflictError)
    assert await one.manifest("0-1") == await two.manifest("0-1")
    await one.close()
    await two.close()
