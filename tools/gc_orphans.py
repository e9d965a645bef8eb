"""Orphans: staged rows that no ledger has acknowledged, because a process died in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenplane.schemas.errors import ConfigError, RowHeldError
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.staging.store import StagingStore

CONTROL_TOKEN_ENV = "NEMO_GYM_TOKEN_CAPTURE_CONTROL_TOKEN"
ManifestOf = Callable[[str], RolloutManifest]


@dataclass(slots=True)
class OrphanReport:
    """What was found, and what went or would go."""

    rows: int = 0
    bytes: int = 0
    held: int = 0
    """Orphans that stay for now, because their rollout is being read."""
    unknown_rollouts: int = 0
    """Rollouts of which the ledger knows no call: whether their rows are orphans is unknown."""


def remove_orphans(
    store: StagingStore,
    age_s: float,
    manifest_of: ManifestOf,
    *,
    now: float,
    rollout: str | None = None,
    dry_run: bool = False,
) -> OrphanReport:
    """Remove staged rows that are ``age_s`` old and that the ledger does not list.

    A row of our own ledger is acknowledged by itself: it carries its response. An unacknowledged
    row is nobody's parent, so that no chain is broken. A rollout of which the ledger knows nothing
    is left alone: that may be the wrong ledger.

    Args:
        manifest_of: gives the acknowledged calls of a rollout.
        now: Unix seconds, by the clock of those that stage.

    Raises:
        StoreError: the store or the ledger cannot be read.
    """
    suspects: dict[str, list[str]] = {}
    prefix = "" if rollout is None else f"{rollout}/"
    columns = ["rollout_id", "created_at", "response_id"]
    for key, row in store.scan(STAGED_PARTITION, prefix, columns):
        name, created_at, response_id = (column[0].as_py() for column in row.columns)
        if response_id is None and now - created_at >= age_s and rollout in (None, name):
            suspects.setdefault(name, []).append(key)
    report = OrphanReport()
    for name, keys in suspects.items():
        known = {record.staging_key for record in manifest_of(name).records}
        if not known:
            report.unknown_rollouts += 1
            continue
        for key in keys:
            if key not in known:
                _remove(store, key, report, dry_run=dry_run)
    return report


def _remove(store: StagingStore, key: str, report: OrphanReport, *, dry_run: bool) -> None:
    size = store.stats(STAGED_PARTITION, key).bytes
    try:
        removed = 1 if dry_run else store.discard(STAGED_PARTITION, [key])
    except RowHeldError:
        report.held += 1
        return
    report.rows += removed
    report.bytes += removed * size


@contextmanager
def open_manifests(ledger: str | None, gym: str | None) -> Iterator[ManifestOf]:
    """The acknowledged calls, from the store of our ledger for Gym or from Gym's model server.

    Raises:
        ConfigError: neither or both are given, or the control secret is not in the environment.
        StoreError: the ledger's store cannot be opened.
    """
    if (ledger is None) == (gym is None):
        raise ConfigError("orphans: the ledger that acknowledges", expected="--ledger or --gym")
    if ledger is not None:
        from tokenplane.capture.gym_ledger import GymLedger
        from tokenplane.tools.store_reading import open_for_reading

        with open_for_reading(ledger) as store:
            yield GymLedger(store).read_manifest
        return
    from tokenplane.capture.collect.gym_rollouts import GymManifests

    token = os.environ.get(CONTROL_TOKEN_ENV)
    if not token:
        raise ConfigError("the environment holds no control secret", key=CONTROL_TOKEN_ENV)
    with GymManifests(str(gym), token) as client:
        yield client.manifest
