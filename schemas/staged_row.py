"""The staged row: one Arrow row per model call, every column declared once here.

Groups: identity, lengths, tokens, evidence, digests, and (standalone serving only) the ledger
columns that make the row itself the ledger entry (DESIGN rule 3). New columns are appended and
nullable; ``STAGED_ROW_VERSION`` rises with them and ``tests/data`` keeps a row of every version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tokenplane.schemas.columns import (
    Column,
    conform,
    int_list,
    list_value,
    one_row,
    render_schema,
    struct,
)
from tokenplane.schemas.epochs import Boundaries
from tokenplane.schemas.errors import CorruptRowError
from tokenplane.schemas.extras import decode_extra, encode_extra
from tokenplane.schemas.staged_call import StagedCall

STAGED_ROW_VERSION = 1
STAGED_PARTITION = "staged"
"""Default partition of staged rows."""

_HASH = pa.binary(32)
EPOCHS = int_list(struct(token_index=pa.int64(), epoch=pa.int64()))
SAMPLING = pa.struct(
    [
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("seed", pa.int64()),
        pa.field("stop_token_ids", int_list(pa.int32()), nullable=False),
        pa.field("stop_strings", int_list(pa.string()), nullable=False),
        pa.field("ignore_eos", pa.bool_(), nullable=False),
    ]
)
ATTACHMENTS = int_list(
    struct(
        name=pa.string(),
        dtype=pa.string(),
        shape=int_list(pa.int64()),
        sha256=_HASH,
        nbytes=pa.int64(),
    )
)

STAGED_COLUMNS: tuple[Column, ...] = (
    Column("staging_key", pa.string(), "rollout/call/attempt; unique per delivery"),
    Column("rollout_id", pa.string(), "rollout that the call belongs to"),
    Column("model_call_id", pa.string(), "call id as admitted"),
    Column("parent_call_id", pa.string(), "call that this one continues", nullable=True),
    Column("mode", pa.string(), "text (root) or token_in (continuation)"),
    Column("prev_len", pa.int64(), "tokens of the parent's whole sequence"),
    Column("delta_len", pa.int64(), "tokens in this row"),
    Column("cum_len", pa.int64(), "prev_len + delta_len"),
    Column("weight_version", pa.uint64(), "version at admission (first policy boundary)"),
    Column("token_ids_delta", int_list(pa.int32()), "carried, then sampled token ids"),
    Column("token_mask_delta", int_list(pa.uint8()), "0 carried, 1 sampled"),
    Column("generation_log_probs_delta", int_list(pa.float32()), "natural log; 0 where carried"),
    Column("policy_epochs", EPOCHS, "policy boundaries; index over prompt, then generation"),
    Column("kv_cache_epochs", EPOCHS, "KV boundaries; empty = unknown"),
    Column("num_evictions", pa.int32(), "times that the KV cache was dropped and recomputed"),
    Column("sampling", SAMPLING, "effective sampling parameters", nullable=True),
    Column("logprobs_mode", pa.string(), "raw or processed", nullable=True),
    Column("finish_reason", pa.string(), "stop or length", nullable=True),
    Column("stop_reason", pa.string(), "JSON: the stop id or string that ended it", nullable=True),
    Column("model", pa.string(), "model name as served", nullable=True),
    Column("model_fingerprint", pa.string(), "hex digest of the model's identity", nullable=True),
    Column("tokenizer_fingerprint", pa.string(), "hex digest of the tokenizer", nullable=True),
    Column("template_fingerprint", pa.string(), "hex digest of the chat template", nullable=True),
    Column("engine", pa.string(), "engine name and version", nullable=True),
    Column("prefix_source", pa.string(), "root, cache, store or inline", nullable=True),
    Column("splice_notes", int_list(pa.string()), "what the splice had to do", nullable=True),
    Column("admitted_at", pa.float64(), "Unix seconds at admission", nullable=True),
    Column("created_at", pa.float64(), "Unix seconds when the row was made"),
    Column("digest", _HASH, "staging digest"),
    Column("extras_digest", _HASH, "digest of the extras"),
    Column("chain_hash", _HASH, "hash linking this delta to its parent's"),
    Column("cumulative_hash", _HASH, "hash of the whole sequence"),
    Column("extras", pa.binary(), "typed canonical encoding of the extras", nullable=True),
    Column("attachments", ATTACHMENTS, "big buffers by content hash", nullable=True),
    Column("response_id", pa.string(), "id of the served answer", nullable=True),
    Column("parent_staging_key", pa.string(), "the parent row's key", nullable=True),
    Column("context_len", pa.int32(), "messages up to and including the answer", nullable=True),
    Column("context_digest", _HASH, "digest of those messages, tools, arguments", nullable=True),
    Column("output_fingerprint", _HASH, "fingerprint of the answer", nullable=True),
    Column("continuation_fingerprint", _HASH, "fingerprint of history and answer", nullable=True),
    Column("idempotency_key", pa.string(), "client's key for exactly-once retries", nullable=True),
    Column("request_digest", _HASH, "digest of the request body", nullable=True),
    Column("response_body", pa.string(), "the served, token-free JSON answer", nullable=True),
)
STAGED_ROW_SCHEMA = render_schema("staged-row", STAGED_ROW_VERSION, STAGED_COLUMNS)
TOKEN_COLUMNS = (
    "staging_key",
    "rollout_id",
    "prev_len",
    "delta_len",
    "cum_len",
    "token_ids_delta",
    "token_mask_delta",
    "chain_hash",
)
"""Columns that resolving a prefix needs (DESIGN rule 7)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Effective sampling parameters of one call; ``top_k`` 0 and ``top_p`` 1 mean off."""

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class CallEvidence:
    """Everything about how a call was made that its tokens do not show (invariant 6)."""

    policy_epochs: Boundaries
    kv_cache_epochs: Boundaries = ()
    num_evictions: int = 0
    sampling: Sampling | None = None
    logprobs_mode: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    """JSON text, so that a stop id (``2``) and a stop string (``"2"``) differ."""
    model: str | None = None
    model_fingerprint: str | None = None
    tokenizer_fingerprint: str | None = None
    template_fingerprint: str | None = None
    engine: str | None = None
    prefix_source: str | None = None
    splice_notes: tuple[str, ...] = ()
    admitted_at: float | None = None


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The ledger columns of a row served standalone. Digests are lowercase hex."""

    response_id: str
    parent_staging_key: str | None
    context_len: int
    context_digest: str | None
    """None where the conversation is not fingerprintable: the call can be no inferred parent."""
    output_fingerprint: str | None = None
    continuation_fingerprint: str | None = None
    idempotency_key: str | None = None
    request_digest: str | None = None
    response_body: str | None = None


@dataclass(frozen=True, slots=True)
class AttachmentRef:
    """A big buffer stored beside the row under its content hash (32 raw bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class StagedRow:
    """One staged row in memory; ``to_batch`` and ``parse_staged_row`` are exact inverses."""

    staging_key: str
    call: StagedCall
    evidence: CallEvidence
    created_at: float
    ledger: LedgerEntry | None = None
    attachments: tuple[AttachmentRef, ...] = field(default=())

    def to_batch(self) -> pa.RecordBatch:
        """One row under ``STAGED_ROW_SCHEMA``; token buffers of over 1 MiB are not copied."""
        call, evidence, ledger = self.call, self.evidence, self.ledger
        values: dict[str, Any] = {name: getattr(call, name) for name in _CALL_COLUMNS}
        values |= {name: getattr(evidence, name) for name in _EVIDENCE_COLUMNS}
        values |= {name: _unhex(getattr(call, name)) for name in _CALL_DIGESTS}
        values["policy_epochs"] = _epoch_dicts(evidence.policy_epochs)
        values["kv_cache_epochs"] = _epoch_dicts(evidence.kv_cache_epochs)
        values["splice_notes"] = list(evidence.splice_notes)
        if evidence.sampling is not None:
            values["sampling"] = {
                name: getattr(evidence.sampling, name) for name in Sampling.__slots__
            }
        values["extras"] = None if call.extras is None else encode_extra(call.extras)
        if ledger is not None:
            values |= {name: getattr(ledger, name) for name in _LEDGER_COLUMNS}
            values |= {name: _unhex(getattr(ledger, name)) for name in _LEDGER_DIGESTS}
        if self.attachments:
            values["attachments"] = [
                {name: getattr(ref, name) for name in AttachmentRef.__slots__}
                for ref in self.attachments
            ]
        values["staging_key"] = self.staging_key
        values["created_at"] = self.created_at
        return one_row(STAGED_ROW_SCHEMA, values)


_CALL_COLUMNS = (
    "rollout_id",
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "token_ids_delta",
    "token_mask_delta",
    "generation_log_probs_delta",
)
_CALL_DIGESTS = ("digest", "extras_digest", "chain_hash", "cumulative_hash")
_EVIDENCE_COLUMNS = (
    "num_evictions",
    "logprobs_mode",
    "finish_reason",
    "stop_reason",
    "model",
    "model_fingerprint",
    "tokenizer_fingerprint",
    "template_fingerprint",
    "engine",
    "prefix_source",
    "admitted_at",
)
_LEDGER_COLUMNS = (
    "response_id",
    "parent_staging_key",
    "context_len",
    "idempotency_key",
    "response_body",
)
_LEDGER_DIGESTS = (
    "context_digest",
    "output_fingerprint",
    "continuation_fingerprint",
    "request_digest",
)
LEDGER_READ_COLUMNS = (
    "staging_key",
    *_CALL_COLUMNS[:8],
    *_CALL_DIGESTS,
    "admitted_at",
    "created_at",
    *_LEDGER_COLUMNS[:4],
    *_LEDGER_DIGESTS,
)
"""Columns from which a manifest and a parent lookup can be made: no tokens, no answer text."""


def _unhex(value: str | None) -> bytes | None:
    return None if value is None else bytes.fromhex(value)


def _epoch_dicts(boundaries: Boundaries) -> list[dict[str, int]]:
    return [{"token_index": index, "epoch": epoch} for index, epoch in boundaries]


def parse_staged_row(batch: pa.RecordBatch, *, key: str | None = None) -> StagedRow:
    """The row of a one-row batch of this or an older schema version.

    Token arrays are read-only views of the batch. The staging digest is not recomputed here (see
    ``StagedCall.check_digest``); identity against ``key`` is.

    Raises:
        UnsupportedSchemaError: another or a newer schema.
        CorruptRowError: not one row, or the row says that it is another key's.
    """
    if batch.num_rows != 1:
        raise CorruptRowError("a staged row message holds one row", got=batch.num_rows, key=key)
    batch = conform(batch, STAGED_ROW_SCHEMA)
    small = [n for n in batch.schema.names if n not in _ARRAY_COLUMNS]
    row = batch.select(small).to_pylist()[0]
    if key is not None and row["staging_key"] != key:
        raise CorruptRowError("the row is another key's", expected=key, got=row["staging_key"])
    for name in (*_CALL_DIGESTS, *_LEDGER_DIGESTS):
        row[name] = None if row[name] is None else row[name].hex()
    call_values = {name: row[name] for name in (*_CALL_COLUMNS[:8], *_CALL_DIGESTS)}
    call_values |= {name: list_value(batch, name) for name in _ARRAY_COLUMNS}
    extras = None if row["extras"] is None else decode_extra(row["extras"])
    sampling = row["sampling"]
    if sampling is not None:
        for name in ("stop_token_ids", "stop_strings"):
            sampling[name] = tuple(sampling[name])
    evidence = CallEvidence(
        policy_epochs=_pairs(row["policy_epochs"]),
        kv_cache_epochs=_pairs(row["kv_cache_epochs"]),
        sampling=None if sampling is None else Sampling(**sampling),
        splice_notes=tuple(row["splice_notes"] or ()),
        **{name: row[name] for name in _EVIDENCE_COLUMNS},
    )
    ledger = None
    if row["response_id"] is not None:
        ledger = LedgerEntry(**{name: row[name] for name in (*_LEDGER_COLUMNS, *_LEDGER_DIGESTS)})
    refs = tuple(
        AttachmentRef(**{**ref, "shape": tuple(ref["shape"])}) for ref in row["attachments"] or ()
    )
    return StagedRow(
        staging_key=row["staging_key"],
        call=StagedCall(**call_values, extras=extras),
        evidence=evidence,
        created_at=row["created_at"],
        ledger=ledger,
        attachments=refs,
    )


_ARRAY_COLUMNS = _CALL_COLUMNS[8:]


def _pairs(rows: list[dict[str, int]] | None) -> Boundaries:
    return tuple((row["token_index"], row["epoch"]) for row in rows or ())
