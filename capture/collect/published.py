"""What is published of a rollout already: the rows that a later collection must leave standing."""

from __future__ import annotations

from tokenplane.schemas.errors import KeyConflictError
from tokenplane.schemas.training_row import TRAINING_PARTITION, TrainingRow, parse_training_row
from tokenplane.staging.store import StagingStore


def published_rows(
    store: StagingStore, rollout_id: str, *, partition: str = TRAINING_PARTITION
) -> list[TrainingRow]:
    """Every published row of the rollout, by segment; a salvaged one last.

    Raises:
        StoreError: the store cannot be read.
    """
    keys = [
        key
        for key in store.keys(partition, rollout_id)
        if key in (rollout_id, f"{rollout_id}~salvaged") or key.startswith(f"{rollout_id}#")
    ]
    rows = [
        parse_training_row(batch, key=key)
        for key, batch in zip(keys, store.get(partition, keys), strict=True)
    ]
    # An id may hold a `#` itself, so the key alone does not say whose row it is.
    mine = [row for row in rows if row.rollout_id == rollout_id]
    return sorted(mine, key=lambda row: (row.salvaged, row.segment))


def standing_rows(
    row: TrainingRow, store: StagingStore, *, partition: str = TRAINING_PARTITION
) -> list[TrainingRow]:
    """The published rows that ``row`` gives way to, because they say as much or more.

    A rollout that is collected again after its staged rows were removed gives a placeholder, or
    less of a salvaged chain. A salvaged row gives way to verified and salvaged ones, a placeholder
    to any. A verified row gives way to none.

    Raises:
        KeyConflictError: those rows have another reward or group.
        StoreError: the store cannot be read.
    """
    if row.sample_mask and not row.salvaged:
        return []
    there = published_rows(store, row.rollout_id, partition=partition)
    verified = [other for other in there if other.sample_mask and not other.salvaged]
    salvaged = [other for other in there if other.salvaged]
    stands = verified or salvaged or ([] if row.salvaged else there)
    for other in stands:
        if (other.reward, other.group_id) != (row.reward, row.group_id):
            raise KeyConflictError(
                "the rollout is published with another reward or group",
                expected=(other.reward, other.group_id),
                got=(row.reward, row.group_id),
                key=other.row_id,
            )
    return stands
