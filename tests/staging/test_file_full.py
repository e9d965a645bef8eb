"""A full disk refuses a put with our error, harms nothing, and is got over."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("full_disk.py")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """(folder, file size limit): a tmpfs of 8 MB; where mounting is not allowed, a limit."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield folder, 0 if mounted else 1_000_000
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run(root: Path, filler: Path, limit: int) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), root.as_uri(), str(filler), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check(report: dict[str, Any], root: Path) -> None:
    assert report["rows"] > 3
    assert "no room" in report["error"]
    assert report["blob refused"]
    assert report["intact"]
    assert report["goes on"]
    assert report["reopened"]
    assert not list(root.rglob(".tmp-*"))
    assert len(list(root.glob("blobs/*/*"))) == 1


def test_a_small_disk(small_disk: tuple[Path, int]) -> None:
    folder, limit = small_disk
    filler = folder / "filler"
    filler.write_bytes(bytes(5_500_000))
    report = run(folder / "store", filler, limit)
    check(report, folder / "store")


def test_a_file_size_limit(tmp_path: Path) -> None:
    filler = tmp_path / "filler"
    filler.touch()
    report = run(tmp_path / "store", filler, 600_000)
    check(report, tmp_path / "store")
