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
from tokenplane.schemas.failure_row import FAILURE_PARTITION, FailureRow
from tokenplane.schemas.gym_ledger_row import GYM_LEDGER_PARTITION, GymLedgerRow
from tokenplane.schemas.manifest import CallRecord
from tokenplane.schemas.staged_row import STAGED_PARTITION, LedgerEntry
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
        return collect_garbage(store, age_s, [STAGED_PARTITION], **options)


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


def test_a_rollout_with_a_leased_row_stays(url: str) -> None:
    clock = FakeClock()
    fill(url, clock, "r", 3)
    with open_store(url, clock=clock) as store:
        store.claim(STAGED_PARTITION, "collector", max_rows=1, lease_s=1e6)
    clock.advance(1000)
    report = run(url, clock, 1.0, include_backlog=True)
    (part,) = report.partitions
    assert (part.rows, part.kept_leased, part.kept_rollouts) == (0, 1, 1)


def test_a_rollout_that_is_being_read_stays(url: str) -> None:
    clock = FakeClock()
    for name in ("read", "other"):
        fill(url, clock, name, 3)
    clock.advance(1000)
    with open_store(url, clock=clock) as store:
        hold = store.hold(STAGED_PARTITION, "read/", lease_s=60)
        (part,) = run(url, clock, 1.0).partitions
        assert (part.rows, part.kept_held, part.kept_rollouts) == (3, 3, 1)
        store.end_hold(hold)
    assert run(url, clock, 1.0).partitions[0].rows == 3


def test_failures_and_ledger_stay_as_long_as_the_rollout_is_staged(url: str) -> None:
    """Without its failures a rollout would look whole, without its ledger empty."""
    clock = FakeClock()
    everything = [STAGED_PARTITION, FAILURE_PARTITION, GYM_LEDGER_PARTITION]

    def collect(partitions: list[str]) -> list[int]:
        with open_store(url, clock=clock) as store:
            report = collect_garbage(store, 5 * 3600.0, partitions)
            return [part.rows for part in report.partitions]

    with open_store(url, clock=clock) as store:
        failure = FailureRow("r", "lost", "stage_failed", "why", clock())
        store.put(FAILURE_PARTITION, "r/lost/1", failure.to_batch())
        commit = GymLedgerRow("r", "c0", record="{}")
        store.put(GYM_LEDGER_PARTITION, "r/c0", commit.to_batch())
    clock.advance(10 * 3600)
    fill(url, clock, "r", 2)
    assert collect(everything) == [0, 0, 0]  # the rollout runs; its failure is old
    clock.advance(10 * 3600)
    assert collect([FAILURE_PARTITION]) == [0]  # its staged rows stay
    assert collect(everything) == [2, 1, 1]


def test_orphans_go_and_acknowledged_rows_stay(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock(time.time() - 2 * 3600)
    ledger_url = (tmp_path / "ledger").as_uri()
    rows = {
        name: replace(staged_row("r", name), created_at=clock())
        for name in ("known", "orphan", "held")
    }
    young = replace(staged_row("r", "young"), created_at=time.time())
    foreign = replace(staged_row("unknown", "c"), created_at=clock())
    ours = LedgerEntry(
        response_id="resp",
        parent_staging_key=None,
        context_len=0,
        context_digest=None,
        output_fingerprint=None,
        continuation_fingerprint=None,
        idempotency_key=None,
        request_digest=None,
        response_body=None,
    )
    answered = replace(staged_row("r", "answered"), created_at=clock(), ledger=ours)
    with open_store(url) as store, open_store(ledger_url) as ledger:
        for row in (*rows.values(), young, foreign, answered):
            store.put(STAGED_PARTITION, row.staging_key, row.to_batch())
        record = CallRecord(
            **{
                name: getattr(rows["known"].call, name)
                for name in CallRecord.model_fields
                if hasattr(rows["known"].call, name)
            },
            staging_key=rows["known"].staging_key,
            response_id="x",
        )
        commit = GymLedgerRow("r", "known", record=record.model_dump_json())
        ledger.put(GYM_LEDGER_PARTITION, "r/known", commit.to_batch())
        hold = store.hold(STAGED_PARTITION, "r/held/", lease_s=600)
    command = ["gc", url, "--orphans", "1h", "--ledger", ledger_url, "--json"]
    assert main([*command, "--dry-run"]) == 0
    dry = json.loads(capsys.readouterr().out)["orphan_rows"]
    assert (dry["rows"], dry["unknown_rollouts"]) == (2, 1)
    assert main(command) == 0
    wet = json.loads(capsys.readouterr().out)["orphan_rows"]
    assert (wet["rows"], wet["held"], wet["unknown_rollouts"]) == (1, 1, 1)
    with open_store(url) as store:
        left = {key.split("/")[1] for key in store.keys(STAGED_PARTITION)}
        assert left == {"known", "held", "young", "c", "answered"}
        store.end_hold(hold)
    assert main([*command[:-1]]) == 0
    assert "removed 1 orphaned rows" in capsys.readouterr().out
    assert main(["gc", url, "--orphans", "1h"]) == 2  # who acknowledges?


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


def test_what_cannot_be_done_is_said_before_anything_is_removed(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock(time.time() - 30 * 86400)
    fill(url, clock, "r", 2)
    ledger = str(tmp_path / "ledger")
    for status, said, *more in (
        (1, "nothing", "--seal", "nothing"),
        (2, "--orphans;", "--orphans", "soon", "--ledger", ledger),
        (2, "--orphans AGE", "--ledger", ledger),
        (2, "--older-than", "--older-than", "9" * 400 + "d"),
        (2, "ROLLOUT/", "--rollout", "r", "--partition", "rows"),
    ):
        assert main(["gc", url, *more]) == status
        shown = capsys.readouterr()
        assert said in shown.err
        assert shown.out == ""
    with open_store(url) as store:
        assert len(store.keys(STAGED_PARTITION)) == 2
        store.put("other", "k", plain_row())
    assert main(["gc", url, "--dry-run", "--seal", "other"]) == 0
    assert "would seal other" in capsys.readouterr().out
    # What has lost its last row is not there to be sealed; what was removed is said all the same.
    assert main(["gc", url, "--seal", STAGED_PARTITION, "--seal", "other"]) == 0
    said = capsys.readouterr().out
    assert "staged: removed 2 rows" in said
    assert "sealed other" in said
    assert "sealed staged" not in said
    with open_store(url) as store:
        assert store.partitions() == ["other"]
        assert store.stats().sealed == ("other",)


@pytest.mark.parametrize(
    ("text", "age_s"), [("90s", 90), ("1.5m", 90), ("12h", 43200), ("7d", 604800), ("0s", 0)]
)
def test_ages(text: str, age_s: float) -> None:
    assert parse_age(text) == age_s
