"""TokenSink and TokenSource: what goes in as a record comes out as the same, verified tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenplane.schemas.errors import (
    CorruptRowError,
    InvalidKeyError,
    MissingRowError,
    StoreUnavailableError,
)
from tokenplane.schemas.staged_call import StagedCall
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.staging.contract_suite.backend import staged_row
from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.store import StagingStore
from tokenplane.staging.token_sink import TokenSink
from tokenplane.staging.token_source import TokenSource


@pytest.fixture
def store() -> Iterator[StagingStore]:
    with MemoryStore() as store:
        yield store


def same_call(left: StagedCall, right: StagedCall) -> bool:
    for f in dataclasses.fields(StagedCall):
        a, b = getattr(left, f.name), getattr(right, f.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                return False
        elif a != b:
            return False
    return True


def gym_like(call: StagedCall) -> SimpleNamespace:
    """An object of another package that has the contract's field names, and lists."""
    values = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    values["token_ids_delta"] = call.token_ids_delta.tolist()
    values["token_mask_delta"] = [float(x) for x in call.token_mask_delta]
    values["generation_log_probs_delta"] = call.generation_log_probs_delta.tolist()
    return SimpleNamespace(**values)


def test_a_staged_row_keeps_its_key_and_everything_else(store: StagingStore) -> None:
    row = staged_row()
    result = TokenSink(store).stage(row)
    assert (result.ok, result.staging_key, result.error) == (True, "r/c/1", None)
    (found,) = TokenSource(store).fetch_rows(["r/c/1"])
    assert same_call(found.call, row.call)
    assert (found.evidence, found.created_at, found.ledger) == (row.evidence, 1.5, None)


@pytest.mark.parametrize("form", ["call", "wire", "foreign"])
def test_a_bare_record_gets_a_key_of_its_own(store: StagingStore, form: str) -> None:
    call = staged_row().call
    record: Any = {"call": call, "wire": call.to_wire(), "foreign": gym_like(call)}[form]
    sink = TokenSink(store)
    keys = [sink.stage(record).staging_key for _ in range(3)]
    assert len(set(keys)) == 3
    for key in keys:
        assert key is not None
        rollout, model_call, attempt = key.split("/")
        assert (rollout, model_call) == ("r", "c")
        assert len(attempt) >= 12
        (found,) = TokenSource(store).fetch_rows([key])
        assert same_call(found.call, call)
        assert found.evidence.policy_epochs == ((0, call.weight_version),)


def test_a_record_whose_digest_does_not_match_is_not_stored(store: StagingStore) -> None:
    record = gym_like(staged_row().call)
    record.token_ids_delta[0] += 1
    result = TokenSink(store).stage(record)
    assert not result.ok
    assert result.error is not None
    assert result.error.startswith("invalid_record: digest")
    assert store.partitions() == []


def test_what_is_no_record_is_not_stored(store: StagingStore) -> None:
    result = TokenSink(store).stage(SimpleNamespace(rollout_id="r"))
    assert not result.ok
    assert result.error is not None
    assert result.error.startswith("invalid_record:")


def test_a_token_id_beyond_int32_is_refused_by_its_code(store: StagingStore) -> None:
    record = gym_like(staged_row().call)
    record.token_ids_delta[0] = 2**31
    result = TokenSink(store).stage(record)
    assert result.error is not None
    assert result.error.startswith("token_id_out_of_range:")


def test_a_store_error_is_a_failed_result(store: StagingStore) -> None:
    row = staged_row()
    sink = TokenSink(store)
    assert sink.stage(row).ok
    assert sink.stage(row).ok  # the same delivery again is no conflict
    changed = dataclasses.replace(row, created_at=9.0)
    result = sink.stage(changed)
    assert not result.ok
    assert result.staging_key is None
    assert result.error is not None
    assert result.error.startswith("key_conflict:")
    store.close()
    closed = sink.stage(row)
    assert closed.error is not None
    assert closed.error.startswith("store_closed:")


def test_attachments_come_back_bit_for_bit(store: StagingStore) -> None:
    arrays: dict[str, Any] = {
        "routes": np.arange(24, dtype=np.int16).reshape(4, 3, 2),
        "floats": np.array([0x7FA00001, 0x80000000], np.uint32).view(np.float32),
        "big-endian": np.array([1, 2], ">i4"),
        "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "scalar": np.array(3.5),
        "empty": np.empty((0, 3), np.float32),
        "half": np.array([1.5], np.float16),
        "bytes": b"abc",
        "buffer": memoryview(b"abc"),
    }
    sink, source = TokenSink(store), TokenSource(store)
    assert sink.stage(staged_row(), attachments=arrays).ok
    (row,) = source.fetch_rows(["r/c/1"])
    found = source.fetch_attachments(row)
    assert list(found) == list(arrays)
    for name, value in arrays.items():
        expected = np.frombuffer(value, np.uint8) if name in ("bytes", "buffer") else value
        assert found[name].shape == expected.shape, name
        assert found[name].tobytes() == expected.astype(found[name].dtype).tobytes(), name
        assert not found[name].flags.writeable
    assert found["big-endian"].tolist() == [1, 2]
    assert store.stats().blobs == len(arrays) - 1  # equal bytes are stored once


@pytest.mark.parametrize("value", [object(), "text", np.array(["a"]), np.array([None]), 5])
def test_an_attachment_that_is_no_buffer_is_a_programming_error(
    store: StagingStore, value: object
) -> None:
    with pytest.raises(TypeError):
        TokenSink(store).stage(staged_row(), attachments={"x": value})
    with pytest.raises(TypeError):
        TokenSink(store).stage(staged_row(), attachments={"": b"x"})
    assert store.partitions() == []


def test_a_row_that_names_attachments_needs_them(store: StagingStore) -> None:
    sink, source = TokenSink(store), TokenSource(store)
    sink.stage(staged_row(), attachments={"x": b"abc"})
    (row,) = source.fetch_rows(["r/c/1"])
    copy = dataclasses.replace(row, staging_key="r/c/2")
    refused = sink.stage(copy)
    assert refused.error is not None
    assert refused.error.startswith("invalid_record:")
    assert sink.stage(copy, attachments={"x": b"abc"}).ok


def test_partitions_are_kept_apart(store: StagingStore) -> None:
    TokenSink(store, "mine").stage(staged_row())
    assert store.partitions() == ["mine"]
    assert TokenSource(store, "mine").fetch(["r/c/1"])
    with pytest.raises(MissingRowError):
        TokenSource(store).fetch(["r/c/1"])


def chain(store: StagingStore) -> list[StagedRow]:
    root = staged_row()
    child = staged_row("r", "d", prompt=[20], generated=[21, 22], parent=root)
    for row in (root, child):
        assert TokenSink(store).stage(row).ok
    return [root, child]


def test_fetch_gives_base_snapshots_in_order(store: StagingStore) -> None:
    rows = chain(store)
    keys = ["r/d/1", "r/c/1"]
    found = TokenSource(store).fetch(keys)
    assert [call.model_call_id for call in found] == ["d", "c"]
    assert all(call.extras is None for call in found)
    assert same_call(found[1], dataclasses.replace(rows[0].call, extras=None))
    found[0].to_wire_snapshot()


def test_fetch_prefix_concatenates_the_deltas(store: StagingStore) -> None:
    chain(store)
    source = TokenSource(store)
    prefix = source.fetch_prefix(["r/c/1", "r/d/1"])
    assert prefix.dtype == np.int32
    assert prefix.tolist() == [5, 6, 7, 8, 9, 20, 21, 22]
    assert not prefix.flags.writeable
    assert source.fetch_prefix([]).tolist() == []


def test_fetch_tokens_gives_what_the_resolver_needs(store: StagingStore) -> None:
    rows = chain(store)
    deltas = TokenSource(store).fetch_tokens(["r/c/1", "r/d/1"])
    for delta, row in zip(deltas, rows, strict=True):
        call = row.call
        assert delta.token_ids_delta.tolist() == call.token_ids_delta.tolist()
        assert (delta.staging_key, delta.rollout_id) == (row.staging_key, "r")
        assert (delta.prev_len, delta.delta_len) == (call.prev_len, call.delta_len)
        assert (delta.cum_len, delta.generation_len) == (call.cum_len, 2)
        assert delta.chain_hash == call.chain_hash


def test_keys_of_a_fetch_are_unique_and_present(store: StagingStore) -> None:
    chain(store)
    source = TokenSource(store)
    for fetch in (source.fetch, source.fetch_rows, source.fetch_tokens, source.fetch_prefix):
        with pytest.raises(InvalidKeyError):
            fetch(["r/c/1", "r/c/1"])
        with pytest.raises(MissingRowError) as caught:
            fetch(["r/c/1", "r/x/1"])
        assert caught.value.key == "r/x/1"


def changed_row(row: StagedRow, **changes: Any) -> pa.RecordBatch:
    """The row's batch with other values in its call, whose digest says otherwise."""
    return dataclasses.replace(row, call=dataclasses.replace(row.call, **changes)).to_batch()


def test_a_row_that_contradicts_its_digest_is_noticed(store: StagingStore) -> None:
    row = staged_row()
    ids = row.call.token_ids_delta.copy()
    ids[0] += 1
    store.put("staged", "r/c/1", changed_row(row, token_ids_delta=ids))
    source = TokenSource(store)
    for fetch in (source.fetch, source.fetch_rows):
        with pytest.raises(CorruptRowError):
            fetch(["r/c/1"])


def test_extras_that_contradict_their_digest_are_noticed(store: StagingStore) -> None:
    store.put("staged", "r/c/1", changed_row(staged_row(), extras={"other": 1}))
    source = TokenSource(store)
    assert len(source.fetch(["r/c/1"])) == 1  # a base snapshot has no extras
    with pytest.raises(CorruptRowError):
        source.fetch_rows(["r/c/1"])


@pytest.mark.parametrize("field", ["prev_len", "delta_len", "cum_len"])
def test_lengths_that_contradict_each_other_are_noticed(store: StagingStore, field: str) -> None:
    row = staged_row()
    store.put("staged", "r/c/1", changed_row(row, **{field: getattr(row.call, field) + 1}))
    with pytest.raises(CorruptRowError):
        TokenSource(store).fetch_tokens(["r/c/1"])


def test_an_attachment_of_another_length_is_noticed(store: StagingStore) -> None:
    sink, source = TokenSink(store), TokenSource(store)
    sink.stage(staged_row(), attachments={"x": np.arange(4)})
    (row,) = source.fetch_rows(["r/c/1"])
    (ref,) = row.attachments
    wrong = dataclasses.replace(row, attachments=(dataclasses.replace(ref, shape=(5,)),))
    with pytest.raises(CorruptRowError):
        source.fetch_attachments(wrong)
    store.discard("staged", ["r/c/1"])
    with pytest.raises(MissingRowError):
        source.fetch_attachments(row)


class FailingStore(MemoryStore):
    """A store whose server is away."""

    def put(self, *args: Any, **keywords: Any) -> bool:
        raise StoreUnavailableError("no answer")


def test_the_result_names_the_code_of_the_failure() -> None:
    result = TokenSink(FailingStore()).stage(staged_row())
    assert result.error == "store_unavailable: no answer"


ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30)


@settings(max_examples=40)
@given(prompt=ids, generated=ids, rollout=st.text(min_size=1, max_size=8), data=st.binary())
def test_any_record_comes_back_exactly(
    prompt: list[int], generated: list[int], rollout: str, data: bytes
) -> None:
    if "\0" in rollout:
        rollout = rollout.replace("\0", "0")
    call = staged_row(rollout, prompt=prompt, generated=generated).call
    with MemoryStore() as store:
        result = TokenSink(store).stage(call, attachments={"data": data})
        assert result.staging_key is not None
        source = TokenSource(store)
        (row,) = source.fetch_rows([result.staging_key])
        assert same_call(row.call, call)
        assert source.fetch_prefix([result.staging_key]).tolist() == prompt + generated
        assert source.fetch_attachments(row)["data"].tobytes() == data
