"""Claims on a Redis store's rows."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from tokenplane.staging.claim_order import GroupRule, PendingRow, choose_groups, group_value
from tokenplane.staging.redis_backend.claim_scripts import (
    ACK,
    CLAIM,
    CLAIM_GROUPS,
    PENDING,
    RELEASE,
)
from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.redis_backend.rows import RedisRows, unpack_stored
from tokenplane.staging.store_types import Claimed

KEYS_PER_CALL: Final = 2000
CACHED_GROUPS: Final = 65536
_TIME: Final = struct.Struct("<d")


class RedisClaims:
    """See ``StagingStore.claim``, ``ack`` and ``release``; arguments are checked already."""

    def __init__(
        self,
        connection: RedisConnection,
        rows: RedisRows,
        total: bytes,
        now: Callable[[], str],
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._total = total
        self._now = now
        self._groups: dict[tuple[str, int], Hashable] = {}

    def claim(self, partition: str, consumer: str, max_rows: int, lease_s: float) -> list[Claimed]:
        """Lease the oldest free rows."""
        reply = self._connection.script(
            CLAIM, [self._total], self._now(), partition, consumer, max_rows, repr(lease_s)
        )
        return self._claimed(partition, consumer, reply)

    def claim_groups(
        self, partition: str, consumer: str, max_rows: int, lease_s: float, rule: GroupRule
    ) -> list[Claimed]:
        """Lease whole groups: chosen here, where rows can be read, and taken in one step."""
        while True:
            groups = self._choose(partition, consumer, max_rows, rule)
            if not groups:
                return []
            wanted: list[bytes | int] = []
            for group in groups:
                wanted += [len(group), *(part for member in group for part in member)]
            reply = self._connection.script(
                CLAIM_GROUPS,
                [self._total],
                self._now(),
                partition,
                consumer,
                repr(lease_s),
                *wanted,
            )
            claimed = self._claimed(partition, consumer, reply)
            if claimed:  # otherwise other claims took them all: choose again
                return claimed

    def _choose(
        self, partition: str, consumer: str, max_rows: int, rule: GroupRule
    ) -> list[tuple[tuple[bytes, bytes], ...]]:
        now, *reply = self._connection.script(
            PENDING, [self._total], self._now(), partition, consumer
        )
        pending = list(zip(*(reply[at::5] for at in range(5)), strict=True))
        names = {int(seq): (key, seq) for key, seq, *_ in pending}
        self._learn_groups(partition, rule.column, [(key, seq) for seq, (key, _) in names.items()])
        chosen = choose_groups(
            (
                PendingRow(
                    int(seq),
                    self._groups[rule.column, int(seq)],
                    bool(leased),
                    bool(delivered),
                    _TIME.unpack(head)[0],
                )
                for _, seq, leased, delivered, head in pending
                if (rule.column, int(seq)) in self._groups
            ),
            max_rows,
            rule,
            float(now),
        )
        return [tuple(names[seq] for seq in group) for group in chosen]

    def _learn_groups(
        self, partition: str, column: str, pending: Sequence[tuple[bytes, int]]
    ) -> None:
        """A row number names one row for ever, so its group is read once."""
        if len(self._groups) + len(pending) > CACHED_GROUPS:
            self._groups.clear()
        new = {key.decode(): seq for key, seq in pending if (column, seq) not in self._groups}
        rows = self._rows.read(partition, list(new), [column])
        for key, row in rows.items():
            self._groups[column, new[key]] = group_value(row)

    def _claimed(self, partition: str, consumer: str, reply: list[Any]) -> list[Claimed]:
        expiry, entries = float(reply[0]), reply[1:]
        lease_id = uuid.uuid4().hex
        keys = [key.decode() for key in entries[::3]]
        claimed = []
        try:
            for key, attempt, content in zip(keys, entries[1::3], entries[2::3], strict=True):
                row = unpack_stored(content, partition, key, None)
                claimed.append(Claimed(key, row, lease_id, attempt, expiry))
        except BaseException:
            self.release(partition, consumer, keys)
            raise
        return claimed

    def ack(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """Mark rows as done."""
        return self._on_keys(ACK, partition, consumer, keys)

    def release(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """End live leases."""
        return self._on_keys(RELEASE, partition, consumer, keys)

    def _on_keys(self, script: Any, partition: str, consumer: str, keys: Sequence[str]) -> int:
        total = 0
        for at in range(0, max(len(keys), 1), KEYS_PER_CALL):
            page = keys[at : at + KEYS_PER_CALL]
            total += self._connection.script(
                script, [self._total], self._now(), partition, consumer, *page
            )
        return total
