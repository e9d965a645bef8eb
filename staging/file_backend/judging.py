"""Which rows of a file store a retention policy lets go, and why the others stay."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenplane.staging.file_backend.holds import IS_HELD
from tokenplane.staging.file_backend.rows import key_range
from tokenplane.staging.file_backend.schema import STORE_ROW, Sql
from tokenplane.staging.store_types import RetentionPolicy

_JUDGED = f"""
SELECT r.seq, r.bytes, r.young, r.leased, r.held, r.pending FROM (
    SELECT o.seq, o.bytes,
        o.created_at>:limit AS young,
        EXISTS(
            SELECT 1 FROM consumers c JOIN deliveries d ON d.consumer_id=c.id AND d.seq=o.seq
            WHERE c.partition_id=o.partition_id AND d.acked=0 AND d.expires_at>:now
        ) AS leased,
        {IS_HELD.format(key="o.key")} AS held,
        EXISTS(
            SELECT 1 FROM consumers c LEFT JOIN deliveries d ON d.consumer_id=c.id AND d.seq=o.seq
            WHERE c.partition_id=o.partition_id AND o.seq>c.watermark AND coalesce(d.acked, 0)=0
        ) AS pending
    FROM rows o
    WHERE o.partition_id=:partition {{where}}
) AS r
"""
_REMOVABLE = """
 WHERE NOT leased AND NOT held AND (NOT pending OR :include_backlog) LIMIT :batch
"""


def partitions_of(db: Sql, policy: RetentionPolicy) -> list[tuple[int, str]]:
    if policy.max_age_s is None:
        return []
    rows = db.execute(
        "SELECT id, name FROM partitions WHERE id<>? AND rows>0 AND (?2 IS NULL OR name=?2)",
        (STORE_ROW, policy.partition),
    )
    return list(rows)


def _judging(
    partition_id: int, name: str, policy: RetentionPolicy, now: float, started: float
) -> tuple[str, dict[str, float | str]]:
    """The query for rows that may be old enough; of a whole prefix, for young ones too.

    Args:
        now: for leases and holds, which may have come since the sweep ``started``.
        started: for ages.
    """
    where, bounds = key_range(policy.prefix)
    names = [":low", ":high"][: len(bounds)]
    for bound in names:
        where = where.replace("?", bound, 1)
    if not policy.whole:
        where += " AND o.created_at<=:limit"
    values: dict[str, float | str] = {
        "partition": partition_id,
        "name": name,
        "now": now,
        "limit": started - (policy.max_age_s or 0.0),
    }
    values |= {n[1:]: bound for n, bound in zip(names, bounds, strict=True)}
    return _JUDGED.format(where=where), values


@dataclass(slots=True)
class Judged:
    seqs: list[int] = field(default_factory=list)
    """Rows that may go."""
    sizes: int = 0
    kept: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("young", "leased", "held", "backlog"), 0)
    )
    """Rows that may not, by the reason."""


def judge(db: Sql, partition_id: int, name: str, policy: RetentionPolicy, now: float) -> Judged:
    judged = Judged()
    query, values = _judging(partition_id, name, policy, now, now)
    for seq, size, young, leased, held, pending in db.execute(query, values).fetchall():
        reasons = {
            "young": young,
            "leased": leased,
            "held": held,
            "backlog": pending and not policy.include_backlog,
        }
        why = next((reason for reason, applies in reasons.items() if applies), None)
        if why is not None:
            judged.kept[why] += 1
        else:
            judged.seqs.append(seq)
            judged.sizes += size
    return judged


def removable(
    db: Sql,
    partition_id: int,
    name: str,
    policy: RetentionPolicy,
    *,
    now: float,
    started: float,
    batch: int,
) -> list[int]:
    """At most ``batch`` rows that may go; of a whole prefix all rows, or none. In the transaction
    that removes them.
    """
    if policy.whole:
        judged = judge(db, partition_id, name, policy, started)
        return [] if any(judged.kept.values()) else judged.seqs
    query, values = _judging(partition_id, name, policy, now, started)
    values |= {"include_backlog": policy.include_backlog, "batch": batch}
    return [row[0] for row in db.execute(query + _REMOVABLE, values)]
