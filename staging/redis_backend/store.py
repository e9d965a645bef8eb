"""``redis:``, one server that several hosts share: every call is one atomic script or one read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import pyarrow as pa

from tokenplane.schemas.errors import (
    ConfigError,
    InvalidKeyError,
    MissingRowError,
    RowHeldError,
)
from tokenplane.staging.claim_order import check_claim, check_lease
from tokenplane.staging.redis_backend.claims import RedisClaims
from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.redis_backend.durability import check_server
from tokenplane.staging.redis_backend.hold_scripts import HELD
from tokenplane.staging.redis_backend.holds import RedisHolds
from tokenplane.staging.redis_backend.retention import read_stats, sweep_rows
from tokenplane.staging.redis_backend.rows import RedisRows
from tokenplane.staging.redis_backend.scan import RedisScan
from tokenplane.staging.redis_backend.scripts import DISCARD, KEYS, PARTITIONS, SEAL
from tokenplane.staging.redis_backend.writer import RedisWriter
from tokenplane.staging.row_packing import (
    check_blob,
    check_found,
    check_keys,
    check_name,
    check_prefix,
    check_unique_keys,
)
from tokenplane.staging.row_split import covers
from tokenplane.staging.store_types import (
    Blob,
    Claimed,
    Durability,
    Hold,
    RetentionPolicy,
    Sharing,
    StoreStats,
    SweepReport,
)
from tokenplane.staging.store_url import (
    StoreUrl,
    one_of,
    positive_int,
    positive_seconds,
    seconds,
    shown_url,
)

KEYS_PER_CALL: Final = 500
TLS_OPTIONS: Final[tuple[str, ...]] = (
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)
_DATABASE: Final = re.compile(r"|/[0-9]*")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


class RedisStore:
    """A namespace on a Redis (or Valkey) server, or in the cluster that the server belongs to.

    Args:
        url: as redis-py takes it, without options of ours.
        namespace: stores of different namespaces share nothing. A namespace is one hash slot.
        max_bytes: budget over messages and blobs; None is unbounded.
        full_wait_s: how long a put waits for room.
        timeout_s: how long a call goes on while the server does not answer.
        require: refuse a server whose rows survive less than this.
        clock: Unix seconds, for ages and leases; None is the server's clock.

    Raises:
        UnsupportedStoreError: the server is too old, may evict rows, or keeps them less safely
            than ``require`` says.
        StoreUnavailableError: it does not answer.
    """

    shared: Sharing = "network"

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "tokenplane",
        max_bytes: int | None = None,
        full_wait_s: float = 5.0,
        timeout_s: float = 10.0,
        require: Durability = "none",
        clock: Callable[[], float] | None = None,
        tls: dict[str, str] | None = None,
    ) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ConfigError("namespace", expected=_NAMESPACE.pattern, got=repr(namespace))
        self.url = f"{shown_url(url)}?namespace={namespace}"
        self._max_bytes = max_bytes
        self._clock = clock
        self._connection = RedisConnection(url, timeout_s=timeout_s, tls=tls or {})
        try:
            self.durable: Durability = check_server(self._connection, require)
            at = self._connection.command("TIME")
        except BaseException:
            self._connection.close()
            raise
        ahead_s = float(at[0]) + float(at[1]) / 1e6 - time.monotonic()
        self._total = b"{%s}:t" % namespace.encode()
        self._rows = RedisRows(self._connection, self._total)
        self._writer = RedisWriter(
            self._connection,
            self._total,
            max_bytes=max_bytes,
            full_wait_s=full_wait_s,
            # The server's clock, read once: a jump of this host's clock makes no row older.
            created_at=clock or (lambda: ahead_s + time.monotonic()),
        )
        self._holds = RedisHolds(self._connection, self._total, self._now)
        self._claims = RedisClaims(self._connection, self._rows, self._total, self._now)

    def _now(self) -> str:
        """The time as scripts take it."""
        return "" if self._clock is None else repr(self._clock())

    def put(
        self, partition: str, key: str, row: pa.RecordBatch, *, blobs: Sequence[Blob] = ()
    ) -> bool:
        """See ``StagingStore.put``."""
        return self._writer.put(partition, key, row, blobs)

    def get(
        self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None
    ) -> list[pa.RecordBatch]:
        """See ``StagingStore.get``. A set of token columns moves nothing else of the rows."""
        check_name(partition, "partition")
        wanted = check_unique_keys(keys)
        found: dict[str, pa.RecordBatch] = {}
        if columns is not None and covers(columns):
            found = self._rows.read_tokens(partition, wanted, columns)
        rest = [key for key in wanted if key not in found]
        if rest:
            found |= self._rows.read(partition, rest, columns)
        check_found(wanted, set(found), partition)
        return [found[key] for key in wanted]

    def get_blob(self, sha256: bytes) -> pa.Buffer:
        """See ``StagingStore.get_blob``."""
        content = self._connection.command("GET", self._total[:-1] + b"b:" + sha256)
        if content is None:
            raise MissingRowError("no row refers to such a blob", key=sha256.hex())
        return check_blob(content, sha256)

    def discard(self, partition: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.discard``. A lost reply may count too few.

        A hold that comes while more than ``KEYS_PER_CALL`` rows are being removed may find some of
        them gone.
        """
        check_name(partition, "partition")
        wanted = list(dict.fromkeys(check_keys(keys)))
        pages = [wanted[at : at + KEYS_PER_CALL] for at in range(0, len(wanted), KEYS_PER_CALL)]
        removed = 0
        for script in (HELD, DISCARD) if len(pages) > 1 else (DISCARD,):
            for page in pages or [[]]:
                reply = self._connection.script(
                    script, [self._total], self._now(), partition, *page
                )
                if isinstance(reply, bytes):
                    raise RowHeldError("somebody is reading the row", key=reply.decode())
                removed += reply or 0
        return removed

    def scan(
        self, partition: str, prefix: str = "", columns: Sequence[str] | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """See ``StagingStore.scan``. It must not rest longer than ``SCAN_LEASE_S``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        return RedisScan(self._connection, self._total, self._now, partition, prefix, columns)

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        """See ``StagingStore.keys``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        found = self._connection.script(KEYS, [self._total], "", partition, prefix)
        return [key.decode() for key in found]

    def partitions(self) -> list[str]:
        """See ``StagingStore.partitions``."""
        found = self._connection.script(PARTITIONS, [self._total], "")
        return sorted(name.decode() for name in found)

    def claim(
        self,
        partition: str,
        consumer: str,
        *,
        max_rows: int,
        lease_s: float,
        group_column: str | None = None,
        group_size: int | None = None,
        group_wait_s: float | None = None,
    ) -> list[Claimed]:
        """See ``StagingStore.claim``. Rows of a lost reply come again when their lease ends."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        rule = check_claim(max_rows, lease_s, group_column, group_size, group_wait_s)
        if rule is None:
            return self._claims.claim(partition, consumer, max_rows, lease_s)
        return self._claims.claim_groups(partition, consumer, max_rows, lease_s, rule)

    def ack(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.ack``. A lost reply may count too few."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        return self._claims.ack(partition, consumer, check_keys(keys))

    def release(self, partition: str, consumer: str, keys: Sequence[str]) -> int:
        """See ``StagingStore.release``."""
        check_name(partition, "partition")
        check_name(consumer, "consumer")
        return self._claims.release(partition, consumer, check_keys(keys))

    def hold(self, partition: str, prefix: str = "", *, lease_s: float) -> Hold:
        """See ``StagingStore.hold``."""
        check_name(partition, "partition")
        check_prefix(prefix)
        check_lease(lease_s)
        return self._holds.hold(partition, prefix, lease_s)

    def extend_hold(self, hold: Hold, *, lease_s: float) -> bool:
        """See ``StagingStore.extend_hold``."""
        check_lease(lease_s)
        return self._holds.extend(hold, lease_s)

    def end_hold(self, hold: Hold) -> None:
        """See ``StagingStore.end_hold``."""
        self._holds.end(hold)

    def stats(self, partition: str | None = None, prefix: str = "") -> StoreStats:
        """See ``StagingStore.stats``."""
        if partition is not None:
            check_name(partition, "partition")
        elif prefix:
            raise InvalidKeyError("a prefix needs a partition", key=prefix)
        check_prefix(prefix)
        return read_stats(
            self._connection, self._total, self._now(), partition, prefix, self._max_bytes
        )

    def seal(self, partition: str) -> None:
        """See ``StagingStore.seal``. On a server this is a mark: the rows stay as they are."""
        check_name(partition, "partition")
        if not self._connection.script(SEAL, [self._total], "", partition):
            raise MissingRowError("the partition holds no row", key=partition)

    def sweep(self, policy: RetentionPolicy, *, dry_run: bool = False) -> SweepReport:
        """See ``StagingStore.sweep``. A killed writer leaves nothing behind on a server."""
        return sweep_rows(
            self._connection, self._total, self._now, policy, self._max_bytes, dry_run=dry_run
        )

    def close(self) -> None:
        """See ``StagingStore.close``."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_redis_store(url: StoreUrl, *, clock: Callable[[], float]) -> RedisStore:
    """The store of a ``redis://`` or ``rediss://`` URL.

    Options: ``namespace``, ``max_bytes``, ``full_wait_s``, ``timeout_s``, ``require`` (``power``,
    ``process`` or ``none``), and for ``rediss://`` redis-py's ``ssl_*`` (files and checks). With
    the default clock, ages and leases go by the server's, whatever the hosts' clocks do.
    """
    parsers: dict[str, Callable[[str], Any]] = {
        "namespace": str,
        "max_bytes": positive_int,
        "full_wait_s": seconds,
        "timeout_s": positive_seconds,
        "require": one_of("power", "process", "none"),
    }
    if not _DATABASE.fullmatch(urlsplit(url.text).path):
        # redis-py would take database 0. The path is not shown: a password may have got into it.
        raise ConfigError(
            f"the path of {shown_url(url.text)} is a database number",
            expected="/0, or nothing",
        )
    if url.scheme == "rediss":
        parsers |= dict.fromkeys(TLS_OPTIONS, str)
    options = url.options(**parsers)
    tls: dict[str, str] = {name: options.pop(name) for name in TLS_OPTIONS if name in options}
    return RedisStore(
        f"{url.scheme}:{url.rest}",
        clock=None if clock is time.time else clock,
        tls=tls,
        **options,
    )
