"""The physical schemas are frozen: a change here must be meant, with a new version and old file.

On purpose? Raise the version, append a nullable column, write the new file of tests/data, and then
add the new pin below. Never edit the pin of a version that rows were written under.
"""

from __future__ import annotations

import importlib
import pkgutil

import pyarrow as pa
import pytest

import tokenplane.schemas
from tokenplane.schemas.columns import (
    SCHEMA_FINGERPRINT_KEY,
    SCHEMA_VERSION_KEY,
    Column,
    int_list,
    render_schema,
    schema_identity,
)
from tokenplane.schemas.errors import UnsupportedSchemaError
from tokenplane.schemas.row_message import HEADER_BYTES, MAGIC

PINNED = {
    ("artifact-row", 1): "47f09e0cf6ea892c83d7477c0099d3cf307c06195b0759b983a0dc1fb9e48149",
    ("staged-row", 1): "91e86a6c58f63abaa42bcf515e04c73a655ece843c4eff396b560bdfe29c9f94",
    ("training-row", 1): "4b2f3a68db8dc58c60a03d8b6bafc0e0250243afeeb951a37d7aec56af9dc7d2",
    ("failure-row", 1): "4fc42e86ef143da88485e1e9e11ee652982d12669d792b2cfa98b8585ec005cb",
    ("gym-ledger-row", 1): "a04487a7cbf1552d4dd1a1e39470be32c57478ee9c163328549b36704bf5f831",
}


def schemas_of_the_package() -> dict[tuple[str, int], pa.Schema]:
    found = {}
    for module in pkgutil.iter_modules(tokenplane.schemas.__path__):
        content = vars(importlib.import_module(f"tokenplane.schemas.{module.name}"))
        for value in content.values():
            if isinstance(value, pa.Schema):
                found[schema_identity(value)] = value
    return found


def fingerprint(schema: pa.Schema) -> str:
    value: bytes = schema.metadata[SCHEMA_FINGERPRINT_KEY]
    return value.decode()


def test_no_schema_changed_by_accident() -> None:
    found = schemas_of_the_package()
    assert {identity: fingerprint(schema) for identity, schema in found.items()} == PINNED


def test_the_message_format_is_pinned_too() -> None:
    assert (MAGIC, HEADER_BYTES) == (b"TKPLROW1", 64)


COLUMNS = (Column("a", pa.int64(), "first"), Column("b", int_list(pa.int32()), "second"))


@pytest.mark.parametrize(
    ("name", "version", "columns"),
    [
        ("y", 1, COLUMNS),
        ("x", 2, COLUMNS),
        ("x", 1, COLUMNS[::-1]),
        ("x", 1, COLUMNS[:1]),
        ("x", 1, (COLUMNS[0], Column("b", int_list(pa.int64()), "second"))),
        ("x", 1, (COLUMNS[0], Column("b", pa.list_(pa.int32()), "second"))),
        ("x", 1, (COLUMNS[0], Column("b", int_list(pa.int32()), "second", nullable=True))),
        ("x", 1, (COLUMNS[0], Column("c", int_list(pa.int32()), "second"))),
    ],
)
def test_whatever_is_physical_changes_the_fingerprint(
    name: str, version: int, columns: tuple[Column, ...]
) -> None:
    base = render_schema("x", 1, COLUMNS)
    assert schema_identity(base) == ("x", 1)
    assert fingerprint(render_schema(name, version, columns)) != fingerprint(base)
    reworded = (COLUMNS[0], Column("b", int_list(pa.int32()), "other words"))
    assert fingerprint(render_schema("x", 1, reworded)) == fingerprint(base)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {b"tokenplane.schema": b"x"},
        {b"tokenplane.schema": b"\xff", SCHEMA_VERSION_KEY: b"1"},
        {b"tokenplane.schema": b"x", SCHEMA_VERSION_KEY: b"one"},
    ],
    ids=repr,
)
def test_a_schema_that_is_not_ours(metadata: dict[bytes, bytes] | None) -> None:
    with pytest.raises(UnsupportedSchemaError):
        schema_identity(pa.schema([], metadata=metadata))
