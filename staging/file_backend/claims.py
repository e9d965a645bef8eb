"""Claims on a file store's rows: leases, acknowledgements, and where each consumer stands."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenplane.schemas.errors import StoreUnavailableError
from tokenplane.staging.claim_order import GroupRule, PendingRow, choose_groups, group_value
from tokenplane.staging.file_backend.database import Database
from tokenplane.staging.file_backend.rows import read_by_seq, to_json
from tokenplane.staging.file_backend.schema import Sql
from tokenplane.staging.file_backend.sealed import SealedFiles
from tokenplane.staging.row_packing import select_columns
from tokenplane.staging.store_types import Claimed

CACHED_GROUPS: Final = 65536
CLAIM_TRIES: Final = 100

# All rows up to a consumer's watermark are acknowledged: claiming never walks over them again.
_PENDING = """
SELECT r.seq, coalesce(d.acked=0 AND d.expires_at>:now, 0), d.seq IS NOT NULL, r.created_at
FROM rows r INDEXED BY rows_order
LEFT JOIN deliveries d ON d.consumer_id=:consumer AND d.seq=r.seq
WHERE r.partition_id=:partition AND r.seq>:watermark AND coalesce(d.acked, 0)=0
ORDER BY r.seq
"""
_FREE = """
SELECT r.seq
FROM rows r INDEXED BY rows_order
LEFT JOIN deliveries d ON d.consumer_id=:consumer AND d.seq=r.seq
WHERE r.partition_id=:partition AND r.seq>:watermark
  AND (d.seq IS NULL OR (d.acked=0 AND d.expires_at<=:now))
"""
_LEASE = """
INSERT INTO deliveries VALUES (?, ?, ?, 1, ?, 0)
ON CONFLICT DO UPDATE
SET lease_id=excluded.lease_id, attempt=attempt+1, expires_at=excluded.expires_at
RETURNING attempt
"""
_FIRST_PENDING = """
SELECT min(r.seq) FROM rows r INDEXED BY rows_order
LEFT JOIN deliveries d ON d.consumer_id=? AND d.seq=r.seq
WHERE r.partition_id=? AND r.seq>? AND coalesce(d.acked, 0)=0
"""


@dataclass(frozen=True, slots=True)
class _Reader:
    consumer: int
    partition: int
    watermark: int


@dataclass(frozen=True, slots=True)
class _Lease:
    seq: int
    lease_id: str
    attempt: int
    expires_at_s: float


class Claims:
    """See ``StagingStore.claim``, ``ack`` and ``release``; arguments are checked already."""

    def __init__(self, database: Database, sealed: SealedFiles, clock: Callable[[], float]) -> None:
        self._database = database
        self._sealed = sealed
        self._clock = clock
        self._groups: dict[tuple[str, int], Hashable] = {}

    def claim(
        self, partition: str, consumer: str, max_rows: int, lease_s: float, rule: GroupRule | None
    ) -> list[Claimed]:
        """Lease rows and read them."""
        self._introduce(partition, consumer)
        for _ in range(CLAIM_TRIES):
            groups = self._choose(partition, consumer, max_rows, rule)
            leased = self._lease(partition, consumer, groups, lease_s) if groups else []
            if leased or not groups:
                return self._read(partition, leased)
            # Other claims took them all since: choose again.
        raise StoreUnavailableError("other claims were always quicker", key=partition)

    def _read(self, partition: str, leased: list[_Lease]) -> list[Claimed]:
        claimed = []
        try:
            with self._database.read() as db:
                for lease in leased:
                    found = read_by_seq(db, self._sealed, partition, lease.seq)
                    if found is not None:
                        claimed.append(
                            Claimed(*found, lease.lease_id, lease.attempt, lease.expires_at_s)
                        )
        except BaseException:
            if leased:
                self._give_back(leased[0].lease_id)
            raise
        return claimed

    def _introduce(self, partition: str, consumer: str) -> None:
        with self._database.read() as db:
            known = _reader(db, partition, consumer) is not None
        if not known:
            with self._database.write() as db:
                _register(db, partition, consumer)

    def _lease(
        self, partition: str, consumer: str, groups: list[tuple[int, ...]], lease_s: float
    ) -> list[_Lease]:
        """Take those of the groups that are still free."""
        lease_id = uuid.uuid4().hex
        with self._database.write() as db:
            reader = _register(db, partition, consumer)
            now = self._clock()
            expires = now + lease_s
            return [
                _Lease(seq, lease_id, attempt, expires)
                for seq in _still_whole(db, reader, now, groups)
                for (attempt,) in db.execute(_LEASE, (reader.consumer, seq, lease_id, expires))
            ]

    def _choose(
        self, partition: str, consumer: str, max_rows: int, rule: GroupRule | None
    ) -> list[tuple[int, ...]]:
        """Groups to take, chosen outside the write transaction: it may read many rows."""
        with self._database.read() as db:
            db.execute("BEGIN")
            reader = _reader(db, partition, consumer)
            if reader is None:
                return []
            now = self._clock()
            if rule is None:
                tail = " ORDER BY r.seq LIMIT :limit"
                return [(seq,) for seq in _free(db, reader, now, tail, limit=max_rows)]
            found = db.execute(_PENDING, _values(reader, now)).fetchall()
            rows = (
                PendingRow(seq, self._group(db, partition, seq, rule.column), leased, given, at)
                for seq, leased, given, at in found
            )
            return choose_groups(rows, max_rows, rule, now)

    def _group(self, db: Sql, partition: str, seq: int, column: str) -> Hashable:
        """The row's group; remembered, for a row number names one row for ever."""
        place = (column, seq)
        if place not in self._groups:
            found = read_by_seq(db, self._sealed, partition, seq)
            if len(self._groups) >= CACHED_GROUPS:
                self._groups.clear()
            value = None
            if found is not None:
                value = group_value(select_columns(found[1], [column], found[0]))
            self._groups[place] = value
        return self._groups[place]

    def _give_back(self, lease_id: str) -> None:
        with self._database.write() as db:
            db.execute(
                "UPDATE deliveries SET expires_at=? WHERE lease_id=? AND acked=0",
                (self._clock(), lease_id),
            )

    def ack(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """Mark rows as done and move the watermark over them."""
        with self._database.write() as db:
            reader = _register(db, partition, consumer)
            fresh = [
                seq
                for seq, acked in _deliveries(db, reader, keys)
                if seq > reader.watermark and not acked
            ]
            for seq in fresh:
                db.execute(
                    "INSERT INTO deliveries VALUES (?, ?, '', 0, 0, 1)"
                    " ON CONFLICT DO UPDATE SET acked=1",
                    (reader.consumer, seq),
                )
            if fresh:
                _move_watermark(db, reader)
            return len(fresh)

    def release(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """End live leases."""
        now = self._clock()
        with self._database.write() as db:
            reader = _register(db, partition, consumer)
            seqs = [seq for seq, _ in _deliveries(db, reader, keys)]
            ended = db.execute(
                "UPDATE deliveries SET expires_at=? WHERE consumer_id=? AND acked=0"
                " AND expires_at>? AND seq IN (SELECT value FROM json_each(?)) RETURNING seq",
                (now, reader.consumer, now, to_json(seqs)),
            )
            return len(ended.fetchall())


def _reader(db: Sql, partition: str, consumer: str) -> _Reader | None:
    found = db.execute(
        "SELECT c.id, c.partition_id, c.watermark FROM consumers c"
        " JOIN partitions p ON p.id=c.partition_id WHERE p.name=? AND c.name=?",
        (partition, consumer),
    ).fetchone()
    return None if found is None else _Reader(*found)


def _register(db: Sql, partition: str, consumer: str) -> _Reader:
    """The consumer, which is known from its first call on: its backlog counts from then."""
    known = _reader(db, partition, consumer)
    if known is not None:
        return known
    db.execute("INSERT INTO partitions(name) VALUES (?) ON CONFLICT DO NOTHING", (partition,))
    made = db.execute(
        "INSERT INTO consumers(partition_id, name) SELECT id, ? FROM partitions WHERE name=?"
        " RETURNING id, partition_id, watermark",
        (consumer, partition),
    )
    return _Reader(*made.fetchall()[0])


def _values(reader: _Reader, now: float, **more: int | str) -> dict[str, int | float | str]:
    return {
        "consumer": reader.consumer,
        "partition": reader.partition,
        "watermark": reader.watermark,
        "now": now,
        **more,
    }


def _free(db: Sql, reader: _Reader, now: float, tail: str, **more: int | str) -> list[int]:
    return [seq for (seq,) in db.execute(_FREE + tail, _values(reader, now, **more))]


def _still_whole(db: Sql, reader: _Reader, now: float, groups: list[tuple[int, ...]]) -> list[int]:
    """Rows of the groups that nobody has taken a row of since they were chosen."""
    wanted = [seq for group in groups for seq in group]
    tail = " AND r.seq IN (SELECT value FROM json_each(:wanted))"
    free = set(_free(db, reader, now, tail, wanted=to_json(wanted)))
    return sorted(seq for group in groups if free.issuperset(group) for seq in group)


def _deliveries(db: Sql, reader: _Reader, keys: Sequence[str]) -> list[tuple[int, bool]]:
    """(row number, acknowledged) of the keys that are there."""
    rows = db.execute(
        "SELECT r.seq, coalesce(d.acked, 0) FROM json_each(?) j"
        " CROSS JOIN rows r INDEXED BY rows_key"
        " LEFT JOIN deliveries d ON d.consumer_id=? AND d.seq=r.seq"
        " WHERE r.partition_id=? AND r.key=j.value",
        (to_json(list(dict.fromkeys(keys))), reader.consumer, reader.partition),
    )
    return [(seq, bool(acked)) for seq, acked in rows]


def _move_watermark(db: Sql, reader: _Reader) -> None:
    (first,) = db.execute(
        _FIRST_PENDING, (reader.consumer, reader.partition, reader.watermark)
    ).fetchone()
    if first is None:
        query = "SELECT coalesce(max(seq), ?) FROM rows INDEXED BY rows_order WHERE partition_id=?"
        (last,) = db.execute(query, (reader.watermark, reader.partition)).fetchone()
    else:
        last = first - 1
    if last > reader.watermark:
        db.execute("UPDATE consumers SET watermark=? WHERE id=?", (last, reader.consumer))
        db.execute("DELETE FROM deliveries WHERE consumer_id=? AND seq<=?", (reader.consumer, last))
