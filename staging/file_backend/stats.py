"""Sizes and backlogs of a file store."""

from __future__ import annotations

from tokenplane.staging.file_backend.rows import key_range
from tokenplane.staging.file_backend.schema import STORE_ROW, Sql
from tokenplane.staging.store_types import StoreStats

_READERS = """
SELECT c.name,
    (SELECT count(*) FROM rows r INDEXED BY rows_order
     WHERE r.partition_id=c.partition_id AND r.seq>c.watermark)
    - (SELECT count(*) FROM deliveries d WHERE d.consumer_id=c.id AND d.acked=1),
    (SELECT count(*) FROM deliveries d
     WHERE d.consumer_id=c.id AND d.acked=0 AND d.expires_at>?1)
FROM consumers c JOIN partitions p ON p.id=c.partition_id
WHERE ?2 IS NULL OR p.name=?2
"""


def read_stats(
    db: Sql, partition: str | None, prefix: str, now: float, max_bytes: int | None
) -> StoreStats:
    """See ``StagingStore.stats``. ``db``: inside a read transaction."""
    if partition is None:
        rows, nbytes = db.execute(
            "SELECT coalesce(sum(rows), 0), coalesce(sum(bytes), 0) FROM partitions WHERE id<>?",
            (STORE_ROW,),
        ).fetchone()
        blobs, blob_bytes = db.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM blobs"
        ).fetchone()
    else:
        rows, nbytes, blobs, blob_bytes = _partition_sizes(db, partition, prefix)
    backlog: dict[str, int] = {}
    leased: dict[str, int] = {}
    for name, waiting, live in db.execute(_READERS, (now, partition)):
        backlog[name] = backlog.get(name, 0) + waiting
        leased[name] = leased.get(name, 0) + live
    sealed = db.execute(
        "SELECT name FROM partitions WHERE sealed<>0 AND (?1 IS NULL OR name=?1) ORDER BY name",
        (partition,),
    )
    return StoreStats(
        rows=rows,
        bytes=nbytes,
        blobs=blobs,
        blob_bytes=blob_bytes,
        max_bytes=max_bytes,
        backlog=backlog,
        leased=leased,
        sealed=tuple(name for (name,) in sealed),
    )


def _partition_sizes(db: Sql, partition: str, prefix: str) -> tuple[int, int, int, int]:
    where, bounds = key_range(prefix)
    chosen = f"partition_id=(SELECT id FROM partitions WHERE name=?){where}"
    values = (partition, *bounds)
    if prefix:
        query = f"SELECT count(*), coalesce(sum(bytes), 0) FROM rows WHERE {chosen}"
        sizes = db.execute(query, values).fetchone()
    else:
        query = (
            "SELECT coalesce(sum(rows), 0), coalesce(sum(bytes), 0) FROM partitions WHERE name=?"
        )
        sizes = db.execute(query, (partition,)).fetchone()
    blobs = db.execute(
        "SELECT count(*), coalesce(sum(bytes), 0) FROM blobs WHERE sha256 IN"
        f" (SELECT sha256 FROM blob_refs WHERE seq IN (SELECT seq FROM rows WHERE {chosen}))",
        values,
    ).fetchone()
    return (*sizes, *blobs)
