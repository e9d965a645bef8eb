"""One declaration per Arrow column, from which every physical schema is rendered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from tokenplane.schemas.errors import SchemaMismatchError, UnsupportedSchemaError

SCHEMA_NAME_KEY = b"tokenplane.schema"
SCHEMA_VERSION_KEY = b"tokenplane.schema_version"
SCHEMA_FINGERPRINT_KEY = b"tokenplane.schema_fingerprint"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: name, Arrow type, nullability, and what it holds."""

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = False


def int_list(item: pa.DataType) -> pa.DataType:
    """``list<item not null>``."""
    return pa.list_(pa.field("item", item, nullable=False))


def struct(**fields: pa.DataType) -> pa.DataType:
    """A struct of non-null fields."""
    return pa.struct([pa.field(name, kind, nullable=False) for name, kind in fields.items()])


def render_schema(name: str, version: int, columns: Sequence[Column]) -> pa.Schema:
    """The Arrow schema, with name, version and fingerprint (SHA-256 hex) in its metadata."""
    fields = [pa.field(c.name, c.type, nullable=c.nullable) for c in columns]
    bare = pa.schema(fields)
    digest = hashlib.sha256(f"{name}:{version}\n{bare.to_string()}".encode()).hexdigest()
    return bare.with_metadata(
        {
            SCHEMA_NAME_KEY: name.encode(),
            SCHEMA_VERSION_KEY: str(version).encode(),
            SCHEMA_FINGERPRINT_KEY: digest.encode(),
        }
    )


def schema_identity(schema: pa.Schema) -> tuple[str, int]:
    """(name, version) from a schema's metadata.

    Raises:
        UnsupportedSchemaError: the metadata is not ours.
    """
    metadata = schema.metadata or {}
    try:
        return metadata[SCHEMA_NAME_KEY].decode(), int(metadata[SCHEMA_VERSION_KEY])
    except (KeyError, ValueError) as exc:
        raise UnsupportedSchemaError("the schema carries no tokenplane name and version") from exc


def one_row(schema: pa.Schema, values: Mapping[str, Any]) -> pa.RecordBatch:
    """A one-row batch; numpy arrays become list columns without copying, None becomes null.

    Raises:
        SchemaMismatchError: an unknown column, a missing or null value where the schema demands
            one, or a value of another type.
    """
    unknown = values.keys() - set(schema.names)
    if unknown:
        raise SchemaMismatchError("unknown columns", got=sorted(unknown))
    arrays = []
    for field in schema:
        value = values.get(field.name)
        if value is None and not field.nullable:
            raise SchemaMismatchError("the column must not be null", key=field.name)
        try:
            if value is None:
                arrays.append(_one_null(field.type))
            elif isinstance(value, np.ndarray):
                items = pa.array(value, type=field.type.value_type)
                offsets = pa.array([0, len(value)], pa.int32())
                arrays.append(pa.ListArray.from_arrays(offsets, items, type=field.type))
            else:
                arrays.append(pa.array([value], type=field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, AttributeError) as exc:
            raise SchemaMismatchError(
                f"column {field.name}", expected=field.type, got=repr(value)[:120]
            ) from exc
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@cache
def _one_null(kind: pa.DataType) -> pa.Array:
    return pa.nulls(1, kind)


def list_value(batch: pa.RecordBatch, name: str, row: int = 0) -> np.ndarray[Any, Any]:
    """Row ``row`` of a list column as a read-only numpy view of the Arrow buffer."""
    column = batch.column(name)
    start, end = column.offsets[row].as_py(), column.offsets[row + 1].as_py()
    array: np.ndarray[Any, Any] = column.values.slice(start, end - start).to_numpy(
        zero_copy_only=True
    )
    return array


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """``batch`` (of this or an older version of ``schema``) with every column of ``schema``.

    Columns that came later are null.

    Raises:
        UnsupportedSchemaError: another schema, or a newer version.
        SchemaMismatchError: a column that may not be null is missing, or a type differs.
    """
    name, version = schema_identity(batch.schema)
    want_name, want_version = schema_identity(schema)
    if name != want_name or version > want_version:
        raise UnsupportedSchemaError(
            "schema", expected=f"{want_name} <= {want_version}", got=f"{name} {version}"
        )
    if batch.schema.equals(schema, check_metadata=False):
        return batch.replace_schema_metadata(schema.metadata)
    arrays = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            if not field.nullable:
                raise SchemaMismatchError("missing column", key=field.name)
            arrays.append(pa.nulls(batch.num_rows, field.type))
        elif batch.schema.field(at).type != field.type:
            raise SchemaMismatchError(
                f"column {field.name}", expected=field.type, got=batch.schema.field(at).type
            )
        else:
            arrays.append(batch.column(at))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
