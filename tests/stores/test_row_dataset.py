"""Published rows as torch batches and as Arrow."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tokenplane.schemas.errors import ConfigError, SchemaMismatchError, UnsupportedSchemaError
from tokenplane.schemas.tokens import frozen
from tokenplane.schemas.training_row import TRAINING_PARTITION, TrainingRow
from tokenplane.staging.contract_suite.backend import FakeClock, named_row, plain_row
from tokenplane.staging.memory_backend.store import MemoryStore
from tokenplane.staging.open_store import open_store
from tokenplane.staging.row_dataset import acknowledge, jagged, row_dataset, to_tensors
from tokenplane.staging.row_dataset_arrow import open_arrow_reader
from tokenplane.staging.row_dataset_batches import RowReader
from tokenplane.staging.store import StagingStore


def training_row(number: int, group: str | None, *, reward: float | None = 0.5) -> TrainingRow:
    """``number`` carried tokens, then two sampled ones by version ``number``."""
    length = number + 2
    mask = np.array([0] * number + [1, 1], np.uint8)
    return TrainingRow(
        row_id=f"row-{number}",
        rollout_id=f"row-{number}",
        token_ids=frozen(np.arange(length, dtype=np.int32) + 100 * number),
        token_mask=frozen(mask),
        log_probs=frozen(np.where(mask == 1, -0.25 * (number + 1), 0).astype(np.float32)),
        weight_versions=frozen(np.where(mask == 1, number, -1).astype(np.int64)),
        prompt_len=number,
        call_spans=(),
        created_at=1.0,
        group_id=group,
        reward=reward,
    )


def publish(store: StagingStore, groups: str, *, first: int = 0) -> None:
    """A row per letter; a dot is no group, and its reward is unknown."""
    for number, letter in enumerate(groups, first):
        known = letter != "."
        row = training_row(number, letter if known else None, reward=0.5 if known else None)
        store.put(TRAINING_PARTITION, row.row_id, row.to_batch())


def test_a_batch_is_jagged_and_grouped() -> None:
    with MemoryStore() as store:
        publish(store, "ab.a")
        (batch,) = list(RowReader(store, "t", max_rows=9, lease_s=60))
        assert batch.row_ids == ("row-0", "row-1", "row-2", "row-3")
        assert batch.group_ids == ("a", "b", None, "a")
        assert batch.groups.tolist() == [0, 1, 2, 0]
        assert batch.offsets.tolist() == [0, 2, 5, 9, 14]
        assert batch.token_ids[2:5].tolist() == [100, 101, 102]
        assert batch.token_mask.tolist() == [1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1]
        assert batch.weight_versions[9:].tolist() == [-1, -1, -1, 3, 3]
        assert batch.log_probs[3:5].tolist() == [-0.5, -0.5]
        assert batch.prompt_lens.tolist() == [0, 1, 2, 3]
        np.testing.assert_array_equal(batch.rewards, [0.5, 0.5, np.nan, 0.5])
        arrays = (batch.token_ids, batch.token_mask, batch.log_probs)
        assert [array.dtype.name for array in arrays] == ["int32", "uint8", "float32"]
        assert batch.token_ids.flags.writeable
        assert len(batch) == 4


def test_rows_come_until_they_are_acknowledged() -> None:
    clock = FakeClock()
    with MemoryStore(clock=clock) as store:
        publish(store, "aab")
        reader = RowReader(store, "t", max_rows=2, lease_s=60)
        first, second = list(reader)
        assert (first.row_ids, second.row_ids) == (("row-0", "row-1"), ("row-2",))
        assert reader.ack(first) == 2
        assert list(reader) == []
        clock.advance(61)
        (again,) = list(reader)
        assert again.row_ids == ("row-2",)
        assert again.attempts.tolist() == [2]
        assert len(list(RowReader(store, "other", max_rows=9, lease_s=60))) == 1


def test_a_reader_waits_for_rows_that_come_later() -> None:
    pauses: list[float] = []
    with MemoryStore() as store:

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                publish(store, "a", first=7)

        reader = RowReader(store, "t", max_rows=9, lease_s=60, idle_s=1.0, poll_s=0.25, sleep=sleep)
        (batch,) = list(reader)
        assert batch.row_ids == ("row-7",)
        assert len(pauses) == 3 + 4
        with pytest.raises(ConfigError):
            RowReader(store, "t", max_rows=1, lease_s=1, idle_s=-1)


def test_an_unreadable_row_is_released_for_others() -> None:
    with MemoryStore() as store:
        store.put(TRAINING_PARTITION, "k", named_row(1))
        reader = RowReader(store, "t", max_rows=9, lease_s=60, group_column=None)
        for _ in range(2):
            with pytest.raises(UnsupportedSchemaError):
                reader.claim()
        assert store.stats(TRAINING_PARTITION).leased == {"t": 0}


def test_the_torch_dataset(tmp_path: Path) -> None:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    url = (tmp_path / "store").as_uri()
    with open_store(url) as store:
        publish(store, "aabbcc")
        dataset = row_dataset(url, "t", max_rows=2, lease_s=600.0)
        assert isinstance(dataset, IterableDataset)
        assert isinstance(pickle.loads(pickle.dumps(dataset)), IterableDataset)
        loader: Any = DataLoader(dataset, batch_size=None)
        seen = []
        for batch in loader:
            assert batch["token_ids"].dtype == torch.int32
            nested = jagged(batch, "log_probs")
            assert nested.is_nested
            lengths = [len(row) for row in nested.unbind(0)]
            assert lengths == torch.diff(batch["offsets"]).tolist()
            seen += batch["row_ids"]
            assert acknowledge(store, "t", batch) == 2
        assert seen == [f"row-{number}" for number in range(6)]
        assert store.stats(TRAINING_PARTITION).backlog == {"t": 0}


@pytest.mark.parametrize("options", [{"max_rows": 4}, {"max_rows": 4, "lease_s": 1, "rows": 2}])
def test_wrong_options_are_refused_before_the_first_batch(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lease_s|rows") as refused:
        row_dataset("memory:", "trainer", **options)
    assert "max_rows" in str(refused.value)


def test_an_empty_claim_makes_no_batch() -> None:
    with MemoryStore() as store:
        assert RowReader(store, "t", max_rows=1, lease_s=1).claim() is None


def test_tensors_share_the_batchs_memory() -> None:
    with MemoryStore() as store:
        publish(store, "a")
        (batch,) = list(RowReader(store, "t", max_rows=1, lease_s=60))
        tensors = to_tensors(batch)
        tensors["token_ids"][0] = 77
        assert batch.token_ids[0] == 77


def test_an_arrow_reader_over_a_partition() -> None:
    with MemoryStore() as store:
        publish(store, "ab" * 50)
        reader = open_arrow_reader(store, TRAINING_PARTITION, rows_per_batch=30)
        sizes = []
        tables = []
        for batch in reader:
            sizes.append(batch.num_rows)
            tables.append(batch)
        assert sizes == [30, 30, 30, 10]
        table = pa.Table.from_batches(tables)
        assert table.column("row_id").to_pylist() == [f"row-{number}" for number in range(100)]
        assert table.column("token_ids")[3].as_py() == [300, 301, 302, 303, 304]
        few = open_arrow_reader(store, TRAINING_PARTITION, prefix="row-1", columns=["reward"])
        assert few.schema.names == ["reward"]
        assert few.read_all().num_rows == 11
        with pytest.raises(SchemaMismatchError):
            open_arrow_reader(store, TRAINING_PARTITION, columns=["no such column"])
        with pytest.raises(SchemaMismatchError):
            open_arrow_reader(store, "nothing")


def test_an_arrow_reader_refuses_unlike_rows() -> None:
    with MemoryStore() as store:
        store.put("p", "1", named_row(1))
        store.put("p", "2", named_row(2))
        with pytest.raises(SchemaMismatchError):
            open_arrow_reader(store, "p").read_all()
        store.put("q", "1", plain_row(1))
        assert open_arrow_reader(store, "q").read_all().num_rows == 1
