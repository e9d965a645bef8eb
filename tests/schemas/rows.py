"""Hypothesis strategies for whole rows, every optional column present and absent."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.schemas.strategies import EXTRAS, FLOAT32S, HEX, IDS, TOKEN_IDS, VERSIONS
from tokenplane.schemas.digests import extras_digest
from tokenplane.schemas.gym_ledger_row import GymLedgerRow
from tokenplane.schemas.staged_call import StagedCall
from tokenplane.schemas.staged_row import (
    AttachmentRef,
    CallEvidence,
    LedgerEntry,
    Sampling,
    StagedRow,
)
from tokenplane.schemas.tokens import frozen, to_log_probs, to_mask, to_token_ids
from tokenplane.schemas.training_row import CallSpan, TrainingRow

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INT64 = st.one_of(st.sampled_from([0, 2**63 - 1]), st.integers(0, 2**63 - 1))
INT32 = st.one_of(st.sampled_from([0, 2**31 - 1]), st.integers(0, 2**31 - 1))
FLOATS = st.one_of(st.sampled_from([0.0, -0.0, 5e-324]), st.floats(allow_nan=False))
BOUNDARIES = st.lists(st.tuples(INT64, INT64), max_size=3).map(tuple)
SEEDS = st.none() | st.integers(-(2**63), 2**63 - 1)


def maybe[T](strategy: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    return st.none() | strategy


SAMPLINGS = st.builds(
    Sampling,
    temperature=FLOATS,
    top_k=INT32,
    top_p=FLOATS,
    max_tokens=INT32,
    seed=SEEDS,
    stop_token_ids=st.lists(INT32, max_size=3).map(tuple),
    stop_strings=st.lists(TEXT, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
EVIDENCE = st.builds(
    CallEvidence,
    policy_epochs=BOUNDARIES,
    kv_cache_epochs=BOUNDARIES,
    num_evictions=INT32,
    sampling=maybe(SAMPLINGS),
    **{
        name: maybe(TEXT)
        for name in (
            *("logprobs_mode", "finish_reason", "stop_reason", "model", "model_fingerprint"),
            *("tokenizer_fingerprint", "template_fingerprint", "engine", "prefix_source"),
        )
    },
    splice_notes=st.lists(TEXT, max_size=2).map(tuple),
    admitted_at=maybe(FLOATS),
)
LEDGERS = st.builds(
    LedgerEntry,
    response_id=TEXT,
    parent_staging_key=maybe(TEXT),
    context_len=INT32,
    context_digest=maybe(HEX),
    output_fingerprint=maybe(HEX),
    continuation_fingerprint=maybe(HEX),
    idempotency_key=maybe(TEXT),
    request_digest=maybe(HEX),
    response_body=maybe(TEXT),
)
ATTACHMENTS = st.builds(
    AttachmentRef,
    name=TEXT,
    dtype=TEXT,
    shape=st.lists(INT64, max_size=3).map(tuple),
    sha256=st.binary(min_size=32, max_size=32),
    nbytes=INT64,
)


@st.composite
def staged_calls(draw: st.DrawFn) -> StagedCall:
    """Any columns and identities; the digests are made up, since a row stores what it is given."""
    length = draw(st.integers(0, 8))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    extras = draw(EXTRAS)
    root = draw(st.booleans())
    return StagedCall(
        rollout_id=draw(IDS),
        model_call_id=draw(IDS),
        parent_call_id=None if root else draw(IDS),
        mode="text" if root else "token_in",
        prev_len=draw(INT64),
        delta_len=length,
        cum_len=draw(INT64),
        weight_version=draw(VERSIONS),
        token_ids_delta=to_token_ids(column(TOKEN_IDS)),
        token_mask_delta=to_mask(column(st.sampled_from([0, 1]))),
        generation_log_probs_delta=to_log_probs(column(FLOAT32S)),
        extras_digest=extras_digest(extras),
        chain_hash=draw(HEX),
        cumulative_hash=draw(HEX),
        digest=draw(HEX),
        extras=extras,
    )


STAGED_ROWS = st.builds(
    StagedRow,
    staging_key=IDS,
    call=staged_calls(),
    evidence=EVIDENCE,
    created_at=FLOATS,
    ledger=maybe(LEDGERS),
    attachments=st.lists(ATTACHMENTS, max_size=2).map(tuple),
)
SPANS = st.builds(
    CallSpan,
    model_call_id=TEXT,
    staging_key=TEXT,
    start=INT64,
    carry_len=INT64,
    generation_len=INT64,
    weight_version=VERSIONS,
    extras_digest=HEX,
)


LEDGER_ROWS = st.builds(
    GymLedgerRow,
    rollout_id=TEXT,
    model_call_id=TEXT,
    record=maybe(TEXT),
    staging_chain=maybe(st.lists(TEXT, max_size=3).map(tuple)),
    fingerprint=maybe(TEXT),
    context_len=maybe(INT32),
    context_digest=maybe(TEXT),
    fingerprint_version=maybe(INT32),
    reason=maybe(TEXT),
)


@st.composite
def training_rows(draw: st.DrawFn) -> TrainingRow:
    mask = draw(st.lists(st.sampled_from([0, 1]), max_size=8))
    versions = [draw(INT64) if sampled else -1 for sampled in mask]
    return TrainingRow(
        row_id=draw(IDS),
        rollout_id=draw(IDS),
        token_ids=to_token_ids([draw(TOKEN_IDS) for _ in mask]),
        token_mask=to_mask(mask),
        log_probs=to_log_probs([draw(FLOAT32S) for _ in mask]),
        weight_versions=frozen(np.array(versions, np.int64)),
        prompt_len=draw(INT64),
        call_spans=tuple(draw(st.lists(SPANS, max_size=2))),
        created_at=draw(maybe(FLOATS)),
        group_id=draw(maybe(TEXT)),
        segment=draw(INT32),
        reward=draw(maybe(FLOATS)),
        sample_mask=draw(st.sampled_from([0, 1])),
        reason=draw(maybe(TEXT)),
        salvaged=draw(st.booleans()),
        terminal_model_call_id=draw(maybe(TEXT)),
        terminal_selection=draw(maybe(TEXT)),
        logprobs_mode=draw(maybe(TEXT)),
        model_fingerprint=draw(maybe(TEXT)),
        tokenizer_fingerprint=draw(maybe(TEXT)),
        cumulative_hash=draw(maybe(HEX)),
    )


def sorted_extras(row: StagedRow) -> StagedRow:
    """``row`` with the keys of its extras in stored order: ascending UTF-8."""

    def ordered(value: Any) -> Any:
        if isinstance(value, list):
            return [ordered(item) for item in value]
        if isinstance(value, dict):
            return {key: ordered(value[key]) for key in sorted(value, key=str.encode)}
        return value

    call = dataclasses.replace(row.call, extras=ordered(row.call.extras))
    return dataclasses.replace(row, call=call)


def exact(value: Any) -> Any:
    """A form in which every bit counts: arrays and floats by their bytes, types by their name."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, float):
        return ("float", np.float64(value).tobytes())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [exact(item) for item in value])
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    slots = getattr(type(value), "__slots__", None)
    if slots and type(value).__module__.startswith("tokenplane"):
        return (type(value).__name__, {name: exact(getattr(value, name)) for name in slots})
    return (type(value).__name__, value)
