"""The timing table covers what it says and leaves the store as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.store_timing import main, time_store


def test_every_operation_is_timed_and_nothing_stays(tmp_path: Path) -> None:
    with MemoryStore() as store:
        timings = time_store(store, tmp_path, rows=60, tokens=64)
        assert store.partitions() == []
    assert [timing.count for timing in timings[:2]] == [60, 60]
    assert len(timings) == 5
    assert all(0 < timing.p50_s <= timing.p99_s for timing in timings)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["nosuch:x"]) == 1
    assert capsys.readouterr().err.startswith("store_timing: unsupported_store: ")
    for few in (["--rows", "50"], ["--tokens", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(["memory:", *few])
        assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["memory:", "--rows", "60", "--tokens", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" p50 ")[0].strip() for line in lines][1] == "put of 64 tokens"
    assert list(tmp_path.iterdir()) == []
