"""The page's example of a backend of one's own runs as it stands, and wrong stores fail it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.staging.locked_store import LockedStore
from tokenplane.staging.contract_suite.backend import plain_row
from tokenplane.staging.open_store import BACKENDS, open_store
from tokenplane.staging.store_url import StoreUrl
from tokenplane.staging.testing import SharedStoreContract, StagingStoreContract

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "stores.md"

RAW_ACCESS = """
import pickle
from dataclasses import replace

def _load(path):
    return pickle.loads(path.read_bytes())

def read_message(path, partition, key):
    return _load(path).partitions[partition].rows[key].packed.message

def write_message(path, partition, key, message):
    state = _load(path)
    rows = state.partitions[partition].rows
    rows[key] = replace(rows[key], packed=replace(rows[key].packed, message=message))
    path.write_bytes(pickle.dumps(state))

def write_blob(path, sha256, data):
    state = _load(path)
    state.blobs[sha256].data = data
    path.write_bytes(pickle.dumps(state))
"""

WRONG = """
import time
import pytest
from tests.staging.test_memory_store import MemoryBackend
from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.testing import StagingStoreContract

class Overwriting(MemoryStore):
    def put(self, partition, key, row, *, blobs=()):
        self.discard(partition, [key])
        return super().put(partition, key, row, blobs=blobs)

class DroppingMissing(MemoryStore):
    def get(self, partition, keys, columns=None):
        return super().get(partition, [k for k in keys if k in self.keys(partition)], columns)

class Unholding(MemoryStore):
    def hold(self, partition, prefix="", *, lease_s):
        held = super().hold(partition, prefix, lease_s=lease_s)
        self.end_hold(held)
        return held

class SplittingGroups(MemoryStore):
    def claim(self, partition, consumer, *, max_rows, lease_s, group_column=None,
              group_size=None, group_wait_s=None):
        return super().claim(partition, consumer, max_rows=max_rows, lease_s=lease_s)

class Impatient(MemoryStore):
    def claim(self, *args, group_size=None, group_wait_s=None, **options):
        return super().claim(*args, **options)

class Unbounded(MemoryStore):
    def __init__(self, *, max_bytes=None, **options):
        super().__init__(**options)

class SweepingLeased(MemoryStore):
    def sweep(self, policy, *, dry_run=False):
        for held in self._state().partitions.values():
            held.consumers.clear()
        return super().sweep(policy, dry_run=dry_run)

class LiveScan(MemoryStore):
    def scan(self, partition, prefix="", columns=None):
        for key in self.keys(partition, prefix):
            yield key, self.get(partition, [key], columns)[0]

def _suite(kind):
    class Backend(MemoryBackend):
        def open(self, *, clock=None, max_bytes=None, full_wait_s=0.2):
            return kind(max_bytes=max_bytes, full_wait_s=full_wait_s, clock=clock or time.time)

    class Suite(StagingStoreContract):
        DURABLE, SHARED = "none", "private"

        @pytest.fixture
        def backend(self):
            return Backend()

    return Suite

for _kind in (Overwriting, DroppingMissing, Unholding, SplittingGroups, Impatient, Unbounded,
              SweepingLeased, LiveScan):
    globals()["Test" + _kind.__name__] = _suite(_kind)
"""
CAUGHT_BY = {
    "Overwriting": "test_another_row_under_a_key_is_refused",
    "DroppingMissing": "test_get_names_every_missing_key",
    "Unholding": "test_held_rows_are_not_removed_by_anybody",
    "SplittingGroups": "test_groups_are_claimed_whole",
    "Impatient": "test_a_group_waits_for_its_members",
    "Unbounded": "test_a_full_store_refuses_after_a_bounded_wait",
    "SweepingLeased": "test_a_leased_row_is_never_removed",
    "LiveScan": "test_scan_is_a_snapshot",
}


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return subprocess.run(
        [*command, "--rootdir", str(folder), *arguments, str(folder)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


def count_tests(suite: type) -> int:
    return sum(name.startswith("test_") for name in dir(suite))


@pytest.mark.slow
def test_the_pages_example_passes_as_it_stands(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"```python\n(import time\nfrom functools.*?)```", PAGE.read_text(), re.S
    )
    store = (ROOT / "tests" / "staging" / "locked_store.py").read_text()
    (tmp_path / "my_store.py").write_text(store + "\n\nMyStore = LockedStore\n")
    (tmp_path / "my_raw_access.py").write_text(RAW_ACCESS)
    (tmp_path / "test_my_store.py").write_text(example)
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > count_tests(SharedStoreContract)  # some have several cases
    assert "skipped" not in done.stdout


def test_a_store_that_is_wrong_in_one_way_fails(tmp_path: Path) -> None:
    assert all(hasattr(StagingStoreContract, name) for name in CAUGHT_BY.values())
    (tmp_path / "test_wrong.py").write_text(WRONG)
    done = run_pytest(tmp_path, "-k", " or ".join(CAUGHT_BY.values()), "--tb=no", "-rf")
    failed = set(re.findall(r"::Test(\w+)::(test_\w+)", done.stdout))
    assert set(CAUGHT_BY.items()) <= failed, done.stdout[-4000:]
    # Each is wrong in its own way only, so that most of the others pass.
    assert len(failed) < 2 * len(CAUGHT_BY), done.stdout[-4000:]


def open_locked_store(url: StoreUrl, *, clock: object) -> LockedStore:
    return LockedStore(Path(url.rest))


def test_a_scheme_of_ones_own_is_opened_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{__name__}:open_locked_store"
    monkeypatch.setitem(BACKENDS, "locked", place)
    with open_store(f"locked:{tmp_path}/s") as store:
        assert store.put("p", "k", plain_row(1))
    with open_store(f"locked:{tmp_path}/s") as store:
        assert store.keys("p") == ["k"]
