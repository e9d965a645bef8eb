"""The row message: any tear and any flipped byte is found, and nothing else comes out."""

from __future__ import annotations

import hashlib
import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.schemas.errors import CorruptRowError
from tokenplane.schemas.failure_row import FailureRow
from tokenplane.schemas.row_message import (
    HEADER_BYTES,
    MAGIC,
    decode_message,
    encode_message,
    message_digest,
)

BATCH = FailureRow("r", "c", "build_failed", "größer", 1.5).to_batch()
MESSAGE = encode_message(BATCH)


def sealed(payload: bytes) -> bytes:
    """A message whose header fits whatever payload it is given."""
    head = struct.pack("<8sQ32s16x", MAGIC, len(payload), hashlib.sha256(payload).digest())
    return head + payload


def stream(*batches: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BATCH.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def test_the_layout_is_as_documented() -> None:
    assert sealed(stream(BATCH)) == MESSAGE
    assert message_digest(MESSAGE) == hashlib.sha256(MESSAGE[HEADER_BYTES:]).digest()


def test_a_message_comes_back_from_any_kind_of_buffer() -> None:
    for form in (MESSAGE, memoryview(MESSAGE), pa.py_buffer(MESSAGE), bytearray(MESSAGE)):
        batch = decode_message(form)
        assert batch.equals(BATCH, check_metadata=True)
        assert encode_message(batch) == MESSAGE


def test_columns_are_selected_in_the_order_asked_for() -> None:
    batch = decode_message(MESSAGE, ["code", "rollout_id"])
    assert batch.to_pylist() == [{"code": "build_failed", "rollout_id": "r"}]
    assert batch.schema.metadata == BATCH.schema.metadata
    assert decode_message(MESSAGE, []).num_columns == 0
    with pytest.raises(CorruptRowError) as caught:
        decode_message(MESSAGE, ["nothing"], key="k")
    assert caught.value.key == "k"


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_at_every_position(mask: int) -> None:
    for at in range(len(MESSAGE)):
        flipped = bytearray(MESSAGE)
        flipped[at] ^= mask
        with pytest.raises(CorruptRowError):
            decode_message(bytes(flipped), key=str(at))


def test_a_tear_at_every_position() -> None:
    for end in range(len(MESSAGE)):
        with pytest.raises(CorruptRowError):
            decode_message(MESSAGE[:end])
        with pytest.raises(CorruptRowError):
            decode_message(MESSAGE[end + 1 :])


@given(st.binary(min_size=1, max_size=80))
def test_trailing_bytes(more: bytes) -> None:
    with pytest.raises(CorruptRowError, match="torn"):
        decode_message(MESSAGE + more)


@given(st.integers(0, len(MESSAGE) - 1), st.integers(1, 200), st.binary(max_size=8))
def test_a_lost_or_replaced_stretch(start: int, size: int, instead: bytes) -> None:
    changed = MESSAGE[:start] + instead + MESSAGE[start + size :]
    if changed != MESSAGE:
        with pytest.raises(CorruptRowError):
            decode_message(changed)


@given(st.binary(max_size=300))
def test_a_right_checksum_over_something_else(payload: bytes) -> None:
    with pytest.raises(CorruptRowError, match="not one readable batch"):
        decode_message(sealed(payload))


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_message_holds_exactly_one_batch(count: int) -> None:
    with pytest.raises(CorruptRowError, match="not one readable batch"):
        decode_message(sealed(stream(*[BATCH] * count)))


def test_a_cut_stream_under_a_right_checksum() -> None:
    whole = stream(BATCH)
    readable = 0
    for end in range(len(whole)):
        try:
            batch = decode_message(sealed(whole[:end]))
        except CorruptRowError:
            continue
        # Only the end-of-stream mark may be missing.
        assert batch.equals(BATCH, check_metadata=True)
        readable += 1
    assert readable <= 8


def test_the_digest_of_something_shorter_than_a_header() -> None:
    for end in (0, HEADER_BYTES - 1):
        with pytest.raises(CorruptRowError):
            message_digest(MESSAGE[:end])
