"""The artifact row: something that rows refer to by fingerprint, kept once per store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pyarrow as pa

from tokenplane.schemas.columns import Column, conform, one_row, render_schema
from tokenplane.schemas.errors import CorruptRowError

ARTIFACT_ROW_VERSION = 1
ARTIFACT_PARTITION = "artifacts"
"""Default partition of artifact rows; keys are ``kind/fingerprint``."""

TOKENIZER_KIND = "tokenizer"
"""``data`` is a ``tokenizer.json``; ``fingerprint`` is what staged rows name as theirs."""

ARTIFACT_COLUMNS: tuple[Column, ...] = (
    Column("kind", pa.string(), "what it is: tokenizer"),
    Column("fingerprint", pa.string(), "hex SHA-256 of data"),
    Column("data", pa.binary(), "the artifact itself; a tokenizer.json for a tokenizer"),
)
ARTIFACT_ROW_SCHEMA = render_schema("artifact-row", ARTIFACT_ROW_VERSION, ARTIFACT_COLUMNS)


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """One artifact as stored. Equal content gives equal rows, so storing it again adds nothing."""

    kind: str
    fingerprint: str
    data: bytes = field(repr=False)

    @property
    def key(self) -> str:
        """Where it is stored."""
        return artifact_key(self.kind, self.fingerprint)

    def to_batch(self) -> pa.RecordBatch:
        """One row under ``ARTIFACT_ROW_SCHEMA``."""
        values = {c.name: getattr(self, c.name) for c in ARTIFACT_COLUMNS}
        return one_row(ARTIFACT_ROW_SCHEMA, values)


def artifact_key(kind: str, fingerprint: str) -> str:
    """The key of an artifact row."""
    return f"{kind}/{fingerprint}"


def to_artifact(kind: str, data: bytes) -> ArtifactRow:
    """The row of ``data``, fingerprinted here."""
    return ArtifactRow(kind, hashlib.sha256(data).hexdigest(), data)


def parse_artifact_row(batch: pa.RecordBatch, *, key: str | None = None) -> ArtifactRow:
    """The row of a one-row batch, its fingerprint recomputed.

    Raises:
        UnsupportedSchemaError: another or a newer schema.
        CorruptRowError: not one row, another key's, or data of another fingerprint.
    """
    if batch.num_rows != 1:
        raise CorruptRowError("an artifact message holds one row", got=batch.num_rows, key=key)
    row = ArtifactRow(**conform(batch, ARTIFACT_ROW_SCHEMA).to_pylist()[0])
    if key is not None and row.key != key:
        raise CorruptRowError("the row is another key's", expected=key, got=row.key, key=key)
    if hashlib.sha256(row.data).hexdigest() != row.fingerprint:
        raise CorruptRowError("the data has another fingerprint", key=row.key)
    return row
