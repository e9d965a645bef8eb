"""Opening a store only to look at it, and finding what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from tokenplane.schemas.errors import ConfigError, MissingRowError, TokenplaneError
from tokenplane.schemas.failure_row import FAILURE_PARTITION
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.schemas.training_row import TRAINING_PARTITION
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_url import parse_store_url, shown_url

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing in a store that does not verify."""

    partition: str
    key: str
    code: str
    message: str


@dataclass(slots=True)
class RolloutKeys:
    """Where the rows of one rollout are, each list in write order."""

    staged: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    unreadable: list[Problem] = field(default_factory=list)
    """Rows that cannot be read at all; their key says that they are this rollout's."""


def open_for_reading(url: str) -> StagingStore:
    """The store behind ``url``, which must exist; a file store is opened read-only.

    Works while servers write to it.

    Raises:
        ConfigError: a ``memory:`` store, which only its own process can see.
        UnsupportedStoreError: no store is there, or an unknown URL.
        StoreUnavailableError: it cannot be reached.
    """
    parsed = parse_store_url(url)
    if parsed.scheme == "memory":
        raise ConfigError("a memory: store lives in one process only", got=shown_url(url))
    if parsed.scheme == "":
        return open_store(f"{Path(url).absolute().as_uri()}?mode=ro")
    if parsed.scheme == "file" and "mode" not in parsed.query:
        return open_store(f"{url}{'&' if parsed.query else '?'}mode=ro")
    return open_store(url)


def open_existing(url: str) -> StagingStore:
    """The store behind ``url`` for reading and writing; where none is, none is made.

    Raises: as ``open_for_reading``.
    """
    parsed = parse_store_url(url)
    if parsed.scheme in ("", "file", "memory"):
        open_for_reading(url).close()
    return open_store(url if parsed.scheme else Path(url).absolute().as_uri())


def read_rows(
    store: StagingStore, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
) -> Iterator[tuple[str, pa.RecordBatch | Problem]]:
    """(key, row) of each key, or what is wrong with it; one bad row hides no other.

    A row that was removed since its key was listed is left out.
    """
    for start in range(0, len(keys), _AT_ONCE):
        part = keys[start : start + _AT_ONCE]
        try:
            yield from zip(part, store.get(partition, part, columns), strict=True)
        except TokenplaneError:
            for key in part:
                try:
                    yield key, store.get(partition, [key], columns)[0]
                except MissingRowError:
                    continue
                except TokenplaneError as error:
                    yield key, Problem(partition, key, error.code, str(error))


def find_rollouts(store: StagingStore) -> dict[str, RolloutKeys]:
    """Every rollout that has a row of any kind, in the order of its first row."""
    found: dict[str, RolloutKeys] = {}
    for partition, name in (
        (STAGED_PARTITION, "staged"),
        (FAILURE_PARTITION, "failures"),
        (TRAINING_PARTITION, "training"),
    ):
        keys = store.keys(partition)
        for key, row in read_rows(store, partition, keys, ["rollout_id"]):
            if isinstance(row, Problem):
                place = found.setdefault(_rollout_of(partition, key), RolloutKeys())
                place.unreadable.append(row)
            else:
                place = found.setdefault(row.column(0)[0].as_py(), RolloutKeys())
                getattr(place, name).append(key)
    return found


def find_rollout(store: StagingStore, rollout_id: str) -> RolloutKeys:
    """The rows of one rollout.

    Raises:
        MissingRowError: the store has none (code ``unknown_rollout``); the message names some
            rollouts that it has.
    """
    found = RolloutKeys()
    for partition, name in ((STAGED_PARTITION, "staged"), (FAILURE_PARTITION, "failures")):
        for key, row in _rows_named(store, partition, f"{rollout_id}/"):
            if isinstance(row, Problem):
                if _rollout_of(partition, key) == rollout_id:
                    found.unreadable.append(row)
            elif row.column(0)[0].as_py() == rollout_id:
                getattr(found, name).append(key)
    for key, row in _rows_named(store, TRAINING_PARTITION, rollout_id):
        if isinstance(row, Problem):
            if _rollout_of(TRAINING_PARTITION, key) == rollout_id:
                found.unreadable.append(row)
        elif row.column(0)[0].as_py() == rollout_id:
            found.training.append(key)
    if found == RolloutKeys():
        raise MissingRowError(
            "the store has no such rollout",
            code="unknown_rollout",
            key=rollout_id,
            expected=_some(list(find_rollouts(store))),
        )
    return found


def _rows_named(
    store: StagingStore, partition: str, prefix: str
) -> Iterator[tuple[str, pa.RecordBatch | Problem]]:
    return read_rows(store, partition, store.keys(partition, prefix), ["rollout_id"])


def _rollout_of(partition: str, key: str) -> str:
    """The rollout that a key names by convention: all that is left of an unreadable row."""
    if partition == TRAINING_PARTITION:
        return key.removesuffix("~salvaged").partition("#")[0]
    return key.rsplit("/", 2)[0]


def _some(names: list[str]) -> str:
    if not names:
        return "a rollout, but there is none"
    shown = ", ".join(names[:8])
    return f"one of {shown}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
