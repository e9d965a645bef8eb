"""A rollout that is being collected is not removed under its reader, whoever removes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.capture.rollouts import RolloutMaker
from tests.capture.test_collector import record_of
from tests.stores.redis_backend import RedisBackend
from tests.stores.redis_server import RedisServer
from tokenplane.capture.collect.collector import Collector
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.schemas.errors import RowHeldError
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.schemas.staged_row import STAGED_PARTITION, StagedRow
from tokenplane.staging import RetentionPolicy, StagingStore, TokenSink, TokenSource, open_store
from tokenplane.staging.rollout_hold import RolloutHold


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "store").as_uri()
    return f"{redis_server.url}?namespace={RedisBackend(redis_server).namespace}"


class SlowSource(TokenSource):
    """Something happens before each read: a collector reads a rollout in several."""

    def __init__(self, store: StagingStore, meanwhile: Callable[[], object]) -> None:
        super().__init__(store)
        self.meanwhile = meanwhile

    def fetch_rows(self, keys: Sequence[str]) -> list[StagedRow]:
        self.meanwhile()
        return super().fetch_rows(keys)


def stage(store: StagingStore, *rollouts: str) -> dict[str, RolloutManifest]:
    """Two roots each, so that ``segments="all"`` reads in two steps."""
    manifests = {}
    for name in rollouts:
        maker = RolloutMaker(TQMegatronTokenStager(TokenSink(store)), rollout_id=name)
        root = maker.stage()[1]
        calls = (root, maker.stage(root)[1], maker.stage()[1])
        manifests[name] = RolloutManifest(rollout_id=name, records=[record_of(c) for c in calls])
    return manifests


def test_another_process_collects_garbage_meanwhile(url: str) -> None:
    reports: list[dict[str, Any]] = []
    collecting = True

    def gc() -> None:
        if len(reports) == 1 and collecting:
            return
        program = "import sys; from tokenplane.tools.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "gc", url, "--older-than", "0s", "--json"]
        reports.append(json.loads(subprocess.check_output(command, text=True)))

    with open_store(url) as store:
        manifests = stage(store, "r", "s", "nobody-reads")
        collector = Collector(SlowSource(store, gc), manifests, segments="all")
        rows = collector.finalize_group(["r", "s"])
        # All rows were old enough all the time, those of the group's second member too.
        assert [row.sample_mask for row in rows] == [1] * 4
        (part,) = reports[0]["partitions"]
        assert (part["rows"], part["kept_held"], part["kept_rollouts"]) == (3, 6, 2)
        assert len(store.keys(STAGED_PARTITION)) == 6
        collecting = False
        gc()
        assert store.keys(STAGED_PARTITION) == []  # nothing is held any more


def test_every_way_of_removing_waits_for_the_reader(url: str) -> None:
    outcomes: list[object] = []

    def remove() -> None:
        with open_store(url) as other:
            keys = other.keys(STAGED_PARTITION, "r/")
            with pytest.raises(RowHeldError):
                other.discard(STAGED_PARTITION, keys[:1])
            clear = RetentionPolicy(max_age_s=0, partition=STAGED_PARTITION, prefix="r/")
            outcomes.append(other.sweep(clear).kept_held)
            outcomes.append(other.sweep(RetentionPolicy(max_age_s=0)).kept_held)

    with open_store(url) as store:
        manifests = stage(store, "r")
        collector = Collector(SlowSource(store, remove), manifests)
        rows = collector.finalize("r")
        assert [row.sample_mask for row in rows] == [1]
        assert outcomes == [3, 3]
        # Its own clean-up is not kept from removing.
        report = collector.publish(rows, store, clean_partition=STAGED_PARTITION)
        assert (report.cleaned_rows, report.clean_error) == (2, None)


def test_two_collectors_of_one_rollout(url: str) -> None:
    """One publishes and cleans while the other reads: its clean-up waits, and says so."""
    with open_store(url) as store, open_store(url) as other:
        manifests = stage(store, "r")
        first = Collector(TokenSource(other), manifests)
        reports = []

        def publish() -> None:
            rows = first.finalize("r")
            reports.append(first.publish(rows, other, clean_partition=STAGED_PARTITION))

        second = Collector(SlowSource(store, publish), manifests)
        rows = second.finalize("r")
        assert (reports[0].published, reports[0].cleaned_rows) == (1, 0)
        assert str(reports[0].clean_error).startswith("row_held:")
        report = second.publish(rows, store, clean_partition=STAGED_PARTITION)
        assert (report.published, report.already_there, report.cleaned_rows) == (0, 1, 2)


def test_a_slow_reader_renews_its_hold(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads take far longer than a hold lasts."""
    with open_store(url) as store:
        stage(store, "r")
        ticks = iter(range(0, 10_000, 50)).__next__
        extended = []
        original = store.extend_hold

        def spy(hold: Any, *, lease_s: float) -> bool:
            extended.append(original(hold, lease_s=lease_s))
            return extended[-1]

        monkeypatch.setattr(store, "extend_hold", spy)
        with RolloutHold(store, STAGED_PARTITION, ["r", "r"], lease_s=120, clock=ticks) as hold:
            for _ in range(3):
                hold.renew()
            assert extended == [True, True, True]
            (only,) = hold._holds
            store.end_hold(only)  # it ended: the process was stopped for too long
            hold.renew()
            assert extended[-1] is False
            assert store.sweep(RetentionPolicy(max_age_s=0)).kept_held == 3
        assert store.sweep(RetentionPolicy(max_age_s=0)).rows == 3


def test_a_read_only_store_is_read_without_a_hold(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    with open_store(url) as store:
        manifests = stage(store, "r")
    with open_store(f"{url}?mode=ro") as store:
        (row,) = Collector(TokenSource(store), manifests).finalize("r")
    assert row.sample_mask == 1


def test_an_id_that_no_store_takes_is_a_placeholder_as_before() -> None:
    with open_store("memory:") as store:
        (row,) = Collector(TokenSource(store), {}).finalize("a\0b")
    assert (row.sample_mask, row.reason) == (0, "no_records")


def test_the_pages_example_holds_a_rollout(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "retention.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    url = (tmp_path / "store").as_uri()
    with open_store(url) as store:
        stage(store, "rollout-7", "rollout-70")
    names: dict[str, Any] = {"url": url}
    exec(compile(example, "retention.md", "exec"), names)
    assert [row.call.rollout_id for row in names["rows"]] == ["rollout-7"]
    assert names["hold"]._holds == []
