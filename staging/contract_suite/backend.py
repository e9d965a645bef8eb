"""What a backend's test file provides to the contract suite, and rows to test with."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from tokenplane.schemas.columns import Column, int_list, one_row, render_schema
from tokenplane.schemas.staged_call import build_staged_call
from tokenplane.schemas.staged_row import CallEvidence, StagedRow
from tokenplane.schemas.tokens import frozen, to_token_ids
from tokenplane.staging.store import StagingStore

FLOATS = frozen(
    np.array(
        [0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7FA00001, 0xFFC00000],
        np.uint32,
    ).view(np.float32)
)
"""−0.0, denormals, the largest values, a signalling and a quiet NaN: only bits tell them apart."""
ODD_KEYS = (
    "a",
    "a%",
    "a_",
    "a_b",
    "aXb",
    "a%b",
    "A",
    "a/b/c",
    "a\\b",
    "a'b\"",
    "a*?[b]",
    "a\u00e9",
    "ae\u0301",
    "\ud7ff",
    "\ue000",
    "\U0001f600",
    "\U0010ffff",
    "\U0010ffff\U0010ffff",
    " a ",
    "\n",
    "-a",
    "k" * 4096,
)
"""Keys that pattern matching, case folding, normalisation or trimming would mix up."""


class FakeClock:
    """Seconds that pass only when told. Thread-safe."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self._now += seconds


class StoreBackend(ABC):
    """Opens stores for one test, and touches their contents behind their backs.

    The raw methods must not use the store's own code, so that a broken write cannot hide behind a
    broken read.
    """

    @abstractmethod
    def open(
        self,
        *,
        clock: Callable[[], float] | None = None,
        max_bytes: int | None = None,
        full_wait_s: float = 0.2,
    ) -> StagingStore:
        """Open the test's store: every call of one test reaches the same rows, if it is durable."""

    @abstractmethod
    def raw_read(self, store: StagingStore, partition: str, key: str) -> bytes:
        """The message as stored."""

    @abstractmethod
    def raw_write(self, store: StagingStore, partition: str, key: str, message: bytes) -> None:
        """Replace the stored message of an existing key."""

    @abstractmethod
    def raw_write_blob(self, store: StagingStore, sha256: bytes, data: bytes) -> None:
        """Replace the stored content of an existing blob."""

    def opener(
        self, *, max_bytes: int | None = None, full_wait_s: float | None = None
    ) -> Callable[[], StagingStore]:
        """Something that pickles and opens the same store in another process (shared stores)."""
        raise TypeError(f"{type(self).__name__} opens no store that processes share")


PLAIN_SCHEMA = pa.schema(
    [
        pa.field("ids", int_list(pa.int32())),
        pa.field("floats", int_list(pa.float32())),
        pa.field("text", pa.string()),
        pa.field("group", pa.string()),
        pa.field("data", pa.binary()),
    ],
    metadata={b"made by": b"a test"},
)


def plain_row(
    number: int = 0, *, group: str | None = None, text: str = "\u00e9\U0001f600", size: int = 0
) -> pa.RecordBatch:
    """A row without an identity column; ``number`` makes it differ from others."""
    return one_row(
        PLAIN_SCHEMA,
        {
            "ids": to_token_ids([number, 2**31 - 1]),
            "floats": FLOATS,
            "text": text,
            "group": group,
            "data": bytes(size),
        },
    )


def staged_row(
    rollout: str = "r",
    call: str = "c",
    attempt: str = "1",
    *,
    prompt: Sequence[int] = (5, 6, 7),
    generated: Sequence[int] = (8, 9),
    parent: StagedRow | None = None,
) -> StagedRow:
    """A staged row; with ``parent`` its prompt continues the parent's sequence."""
    before: list[int] = []
    if parent is not None:
        if parent.call.prev_len:
            raise ValueError("the parent must be a root: its delta is its whole sequence")
        before = parent.call.token_ids_delta.tolist()
    log_probs = frozen(np.resize(np.array([-0.0, -1e-40, -0.5], np.float32), len(generated)))
    record = build_staged_call(
        rollout_id=rollout,
        model_call_id=call,
        parent_call_id=None if parent is None else parent.call.model_call_id,
        mode="text" if parent is None else "token_in",
        prev_len=len(before),
        weight_version=3,
        parent_chain_hash=None if parent is None else parent.call.chain_hash,
        prompt_token_ids=to_token_ids([*before, *prompt]),
        generated_token_ids=to_token_ids(list(generated)),
        generated_log_probs=log_probs,
        extras={"note": "\u00e9", "number": -1},
    )
    return StagedRow(f"{rollout}/{call}/{attempt}", record, CallEvidence(((0, 3),)), 1.5)


def named_row(version: int, *, extra: str | None = None) -> pa.RecordBatch:
    """A row of a schema named ``sample``; version 2 has one column more."""
    columns = [Column("value", pa.int64(), "a number")]
    if version > 1:
        columns.append(Column("extra", pa.string(), "came later", nullable=True))
    values = {"value": version} | ({} if version == 1 else {"extra": extra})
    return one_row(render_schema("sample", version, columns), values)


def same_bits(left: pa.RecordBatch, right: pa.RecordBatch) -> bool:
    """Equal schemas, values and metadata, where NaNs and zeros count by their bits."""
    if not left.schema.equals(right.schema, check_metadata=True) or left.num_rows != right.num_rows:
        return False
    return all(_bits(a).equals(_bits(b)) for a, b in zip(left.columns, right.columns, strict=True))


def _bits(array: pa.Array) -> pa.Array:
    if pa.types.is_list(array.type) and pa.types.is_float32(array.type.value_type):
        flat = array.flatten()
        return pa.array(flat.to_numpy(zero_copy_only=True).view(np.uint32))
    return array
