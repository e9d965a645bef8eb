"""``tokenplane gc`` on a file store and on Redis."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.stores.redis_backend import RedisBackend
from tests.stores.redis_server import RedisServer
from tokenplane.schemas.errors import SealedPartitionError
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.staging.contract_suite.backend import FakeClock, plain_row, staged_row
from tokenplane.staging.open_store import open_store
from tokenplane.tools.cli import main
from tokenplane.tools.gc_command import GcReport, collect_garbage, parse_age


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "store").as_uri()
    return f"{redis_server.url}?namespace={RedisBackend(redis_server).namespace}"


def fill(url: str, clock: FakeClock, rollout: str, calls: int) -> None:
    """One staged row per hour."""
    with open_store(url, clock=clock) as store:
        for number in range(calls):
            row = replace(staged_row(rollout, f"c{number}"), created_at=clock())
            store.put(STAGED_PARTITION, row.staging_key, row.to_batch())
            clock.advance(3600)


def run(url: str, clock: FakeClock, age_s: float, **options: Any) -> GcReport:
    with open_store(url, clock=clock) as store:
        return collect_garbage(store, age_s, [STAGED_PARTITION], now=clock, **options)


def test_a_rollout_goes_whole_or_not_at_all(url: str) -> None:
    clock = FakeClock()
    fill(url, clock, "old", 3)
    clock.advance(10 * 3600)
    fill(url, clock, "long", 10)  # its first rows are older than the limit below
    fill(url, clock, "old/nested", 1)
    dry = run(url, clock, 5 * 3600.0, dry_run=True)
    (part,) = dry.partitions
    # `old/` is also how the young rollout's keys begin, so that one waits.
    assert (part.rows, part.rollouts, part.kept_rollouts) == (0, 0, 3)
    clock.advance(6 * 3600)
    dry = run(url, clock, 6 * 3600.0, dry_run=True)
    with open_store(url) as store:
        assert len(store.keys(STAGED_PARTITION)) == 14
    wet = run(url, clock, 6 * 3600.0)
    assert dry.partitions == wet.partitions
    assert dry.remaining_bytes == wet.remaining_bytes
    (part,) = wet.partitions
    assert (part.rows, part.rollouts, part.kept_rollouts) == (14, 3, 0)


def test_old_rows_of_a_running_rollout_stay(url: str) -> None:
    clock = FakeClock()
    fill(url, clock, "done", 2)
    clock.advance(10 * 3600)
    fill(url, clock, "runs", 10)
    report = run(url, clock, 5 * 3600.0)
    (part,) = report.partitions
    assert (part.rows, part.rollouts, part.kept_rollouts) == (2, 1, 1)
    with open_store(url) as store:
        assert len(store.keys(STAGED_PARTITION, "runs/")) == 10


def test_leased_rows_stay(url: str) -> None:
    clock = FakeClock()
    fill(url, clock, "r", 3)
    with open_store(url, clock=clock) as store:
        store.claim(STAGED_PARTITION, "collector", max_rows=1, lease_s=1e6)
    clock.advance(1000)
    report = run(url, clock, 1.0, include_backlog=True)
    (part,) = report.partitions
    assert (part.rows, part.kept_leased) == (2, 1)


def test_the_command(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock(time.time() - 30 * 86400)
    fill(url, clock, "r", 2)
    with open_store(url) as store:
        store.put("other", "k", plain_row())
    assert main(["gc", url, "--dry-run"]) == 0
    assert "staged: would remove 2 rows of 1 rollouts" in capsys.readouterr().out
    assert main(["gc", url, "--json", "--rollout", "r", "--seal", "other"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["partitions"][0]["rows"] == 2
    assert report["sealed"] == ["other"]
    with open_store(url) as store:
        assert store.partitions() == ["other"]
        with pytest.raises(SealedPartitionError):
            store.put("other", "l", plain_row())
    assert main(["gc", url, "--older-than", "0s", "--partition", "other"]) == 0
    assert "other: removed 1 rows" in capsys.readouterr().out
    assert main(["gc", url, "--older-than", "soon"]) == 2
    assert main(["gc", url, "--seal", "nothing"]) == 1


@pytest.mark.parametrize(
    ("text", "age_s"), [("90s", 90), ("1.5m", 90), ("12h", 43200), ("7d", 604800), ("0s", 0)]
)
def test_ages(text: str, age_s: float) -> None:
    assert parse_age(text) == age_s
