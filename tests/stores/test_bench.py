"""``tokenplane bench`` on small loads: its numbers add up, and a lost row is noticed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.stores.redis_server import RedisServer
from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.open_store import open_store
from tokenplane.tools.bench import soak as bench_soak
from tokenplane.tools.cli import main


@pytest.fixture(params=["memory", "file", "redis"])
def url(request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "store").as_uri()
    return "memory:" if request.param == "memory" else f"{redis_server.url}?namespace=bench"


def test_stores(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "stores", "--json", "--runs", "5", "--store", url]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["work"] for result in results] == [
        "stage 1k",
        "stage 8k",
        "stage 1k + 4 MB",
        "resolve 1",
        "resolve 10",
        "resolve 50",
        "cached resolve 1",
        "cached resolve 10",
        "cached resolve 50",
    ]
    for result in results:
        assert 0 < result["p50_ms"] <= result["p99_ms"]
        assert (result["peer"] is None) == url.startswith("memory")
        if result["peer"]:
            ratio = result["p50_ms"] / result["peer_p50_ms"]
            assert result["ratio"] == pytest.approx(ratio)
    if not url.startswith("memory"):
        with open_store(url) as store:
            assert store.stats().rows == 0
    assert main(["bench", "stores", "--runs", "1", "--store", "memory:"]) == 0
    assert "resolve 50" in capsys.readouterr().out


def test_soak(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "soak", "--json", "--rollouts", "150", "--tokens", "40", "--store", url]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows_staged"] == 450
    assert report["rows_claimed"] == 150
    for name in ("rows_lost", "rows_wrong", "rows_left", "bytes_left"):
        assert report[name] == 0
    assert report["errors"] == []
    assert report["peak_rss_bytes"] > 0
    assert 0 < report["most_bytes"] < 150 * 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["stores", "--runs", "0"],
        ["stores", "--runs", "-3"],
        ["soak", "--store", "memory:", "--rollouts", "0"],
        ["soak", "--store", "memory:", "--calls", "0"],
        ["soak", "--store", "memory:", "--tokens", "few"],
        ["soak", "--store", "memory:", "--writers", "0"],
    ],
)
def test_nothing_to_do_is_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert "expected 1 or more" in capsys.readouterr().err


def test_a_soak_notices_what_a_store_loses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Leaking(MemoryStore):
        """Acknowledges every 20th published row and forgets it."""

        count = 0

        def put(self, partition: str, key: str, row: Any, *, blobs: Sequence[Any] = ()) -> bool:
            Leaking.count += partition.endswith("-rows")
            if partition.endswith("-rows") and Leaking.count % 20 == 0:
                return True
            return super().put(partition, key, row, blobs=blobs)

    monkeypatch.setattr(bench_soak, "open_store", lambda url: Leaking())
    assert main(["bench", "soak", "--json", "--rollouts", "40", "--store", "memory:"]) == 1
    assert json.loads(capsys.readouterr().out)["rows_lost"] == 2
