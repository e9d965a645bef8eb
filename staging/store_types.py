"""Values that go into and come out of a staging store."""

from __future__ import annotations

import hashlib
from collections.abc import Buffer, Mapping
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from tokenplane.schemas.errors import ConfigError, InvalidRecordError

type Durability = Literal["power", "process", "none"]
"""What an acknowledged put survives: a power cut, the loss of the process, or nothing."""
type Sharing = Literal["private", "host", "network"]
"""Who sees the rows: this object alone, every process of one host, or several hosts."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A big buffer, named by its content. It must not change until ``put`` has returned."""

    sha256: bytes
    """32 raw bytes; checked against ``data`` when the object is made."""
    data: Buffer = field(repr=False)
    """C-contiguous."""

    def __post_init__(self) -> None:
        actual = hashlib.sha256(self.data).digest()
        if actual != self.sha256:
            raise InvalidRecordError(
                "the blob has another hash", expected=self.sha256.hex(), got=actual.hex()
            )

    @property
    def nbytes(self) -> int:
        """Length of ``data`` in bytes."""
        return memoryview(self.data).nbytes


def to_blob(data: Buffer) -> Blob:
    """The blob of a C-contiguous buffer, hashed once."""
    blob = object.__new__(Blob)
    object.__setattr__(blob, "sha256", hashlib.sha256(data).digest())
    object.__setattr__(blob, "data", data)
    return blob


@dataclass(frozen=True, slots=True)
class Claimed:
    """A row handed to one consumer until ``expires_at_s``."""

    key: str
    row: pa.RecordBatch
    lease_id: str
    """Equal for all rows of one ``claim`` call."""
    attempt: int
    """1 for the first time that this consumer was given the row."""
    expires_at_s: float
    """Unix seconds by the store's clock; the row can be claimed again from then on."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keeps the rows of a partition whose keys start with ``prefix`` from being removed."""

    partition: str
    prefix: str
    hold_id: str
    """32 hexadecimal digits."""
    expires_at_s: float
    """Unix seconds by the store's clock; a reader that died holds nothing up from then on."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Sizes of a store, of one partition, or of one key prefix in it."""

    rows: int
    bytes: int
    """Of the row messages, without blobs."""
    blobs: int
    """Distinct blobs that the counted rows refer to."""
    blob_bytes: int
    max_bytes: int | None = None
    """The store's byte budget, over messages and blobs."""
    backlog: Mapping[str, int] = field(default_factory=dict)
    """Rows not yet acknowledged, leased ones included, by consumer."""
    leased: Mapping[str, int] = field(default_factory=dict)
    """Rows under a live lease, by consumer."""
    sealed: tuple[str, ...] = ()
    """The counted partitions that are sealed, sorted."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which rows ``sweep`` may remove. A row under a live lease or hold is never among them."""

    max_age_s: float | None = None
    """Rows that are at least this old go; 0 clears, None removes no row."""
    partition: str | None = None
    """Only rows of this partition."""
    prefix: str = ""
    """Only rows whose key starts so."""
    include_backlog: bool = False
    """Also rows that a known consumer of the partition has not acknowledged."""
    whole: bool = False
    """Nothing goes from a partition unless every row with the prefix may go: of a rollout, whose
    keys have one prefix, all or none. Decided and done in one step."""
    orphan_age_s: float | None = 3600.0
    """Files that no row refers to (left by a killed writer) go from this age on; None leaves them,
    and does not give freed room back to the file system: for one of many sweeps in a row."""

    def __post_init__(self) -> None:
        if self.max_age_s is not None and not self.max_age_s >= 0:
            raise ConfigError("max_age_s", expected=">= 0", got=self.max_age_s)
        if self.orphan_age_s is not None and not self.orphan_age_s >= 0:
            raise ConfigError("orphan_age_s", expected=">= 0", got=self.orphan_age_s)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one ``sweep`` removed (or would remove, if ``dry_run``) and what it left."""

    rows: int
    bytes: int
    """Of the removed rows' messages."""
    blobs: int
    """Blobs that lost their last row, and orphaned files."""
    blob_bytes: int
    kept_leased: int
    """Rows old enough, but under a live lease."""
    kept_backlog: int
    """Rows old enough, but not acknowledged by a known consumer."""
    remaining_bytes: int
    """Messages and blobs that are left."""
    max_bytes: int | None
    dry_run: bool
    kept_held: int = 0
    """Rows old enough and not leased, but under a live hold: somebody is reading them."""
