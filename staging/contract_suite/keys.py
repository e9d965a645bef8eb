"""Contract of every store: what keys, partitions and rows may be."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from tokenplane.schemas.columns import SCHEMA_FINGERPRINT_KEY
from tokenplane.schemas.errors import InvalidKeyError, SchemaMismatchError
from tokenplane.staging.contract_suite.backend import (
    ODD_KEYS,
    named_row,
    plain_row,
    same_bits,
    staged_row,
)
from tokenplane.staging.store import StagingStore


class KeyContract:
    """See ``StagingStoreContract``."""

    def test_get_refuses_a_repeated_key(self, store: StagingStore) -> None:
        store.put("p", "k", plain_row())
        with pytest.raises(InvalidKeyError):
            store.get("p", ["k", "k"])

    @pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "k" * 4097, "\u00e9" * 2049, None, 7])
    def test_an_unusable_name_is_refused(self, store: StagingStore, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.put("p", name, plain_row()),
            lambda: store.put(name, "k", plain_row()),
            lambda: store.get("p", [name]),
            lambda: store.get(name, ["k"]),
            lambda: store.discard("p", [name]),
            lambda: store.keys(name),
            lambda: store.scan(name),
            lambda: store.claim("p", name, max_rows=1, lease_s=1),
            lambda: store.ack(name, "c", ["k"]),
            lambda: store.release("p", "c", [name]),
            lambda: store.seal(name),
        ]
        for call in calls:
            with pytest.raises(InvalidKeyError):
                call()

    def test_one_string_is_no_list_of_keys(self, store: StagingStore) -> None:
        for call in (store.get, store.discard):
            with pytest.raises(InvalidKeyError):
                call("p", "abc")

    def test_a_row_is_stored_under_its_own_key_only(self, store: StagingStore) -> None:
        row = staged_row()
        with pytest.raises(InvalidKeyError):
            store.put("staged", "r/c/another", row.to_batch())
        assert store.partitions() == []

    def test_odd_keys_stay_apart(self, store: StagingStore) -> None:
        for number, key in enumerate(ODD_KEYS):
            assert store.put("p", key, plain_row(number))
        assert store.keys("p") == list(ODD_KEYS)
        for number, key in enumerate(ODD_KEYS):
            assert same_bits(store.get("p", [key])[0], plain_row(number))
        for prefix in [*ODD_KEYS, "a%", "%", "_", "a/", "\U0010ffff", "b"]:
            expected = [key for key in ODD_KEYS if key.startswith(prefix)]
            assert store.keys("p", prefix) == expected
            assert [key for key, _ in store.scan("p", prefix)] == expected

    def test_odd_partitions_stay_apart(self, store: StagingStore) -> None:
        for number, name in enumerate(ODD_KEYS):
            store.put(name, "k", plain_row(number))
        assert store.partitions() == sorted(ODD_KEYS)
        for number, name in enumerate(ODD_KEYS):
            assert same_bits(store.get(name, ["k"])[0], plain_row(number))

    @pytest.mark.parametrize("rows", [0, 2])
    def test_a_batch_of_another_length_is_no_row(self, store: StagingStore, rows: int) -> None:
        batch = pa.concat_batches([plain_row(1), plain_row(2)]).slice(0, rows)
        with pytest.raises(SchemaMismatchError):
            store.put("p", "k", batch)
        with pytest.raises(TypeError):
            store.put("p", "k", pa.Table.from_batches([plain_row()]))
        assert store.partitions() == []

    def test_a_partition_holds_one_kind_of_row(self, store: StagingStore) -> None:
        store.put("p", "k", plain_row())
        other = pa.RecordBatch.from_pydict({"x": [1]})
        with pytest.raises(SchemaMismatchError):
            store.put("p", "l", other)
        assert store.keys("p") == ["k"]
        assert store.put("q", "l", other)
        store.discard("p", ["k"])
        assert store.put("p", "l", other)  # an empty partition holds no kind

    def test_versions_of_a_schema_lie_side_by_side(self, store: StagingStore) -> None:
        rows = [named_row(1), named_row(2, extra="x"), named_row(1)]
        for number, row in enumerate(rows):
            assert store.put("p", str(number), row)
        found = store.get("p", ["0", "1", "2"])
        assert all(same_bits(a, b) for a, b in zip(found, rows, strict=True))

    def test_a_row_must_be_what_its_schema_says(self, store: StagingStore) -> None:
        lying = named_row(1).replace_schema_metadata(
            named_row(1).schema.metadata | {SCHEMA_FINGERPRINT_KEY: b"0" * 64}
        )
        with pytest.raises(SchemaMismatchError):
            store.put("p", "k", lying)
        unreadable = pa.RecordBatch.from_pydict({"x": pa.array(["a"]).dictionary_encode()})
        with pytest.raises(SchemaMismatchError):
            store.put("p", "k", unreadable)
        assert store.partitions() == []
