"""One declaration per Arrow column, from which every physical schema is rendered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any

import numpy as np
import pyarrow as pa

from tokenplane.schemas.errors import SchemaMismatchError, UnsupportedSchemaError
from tokenplane.schemas.row_layout import lay_out_row
from tokenplane.schemas.schema_memo import SCHEMA_FINGERPRINT_KEY as SCHEMA_FINGERPRINT_KEY
from tokenplane.schemas.schema_memo import SchemaMemo

SCHEMA_NAME_KEY = b"tokenplane.schema"
SCHEMA_VERSION_KEY = b"tokenplane.schema_version"


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
    """A one-row batch; numpy arrays become list columns, None becomes null.

    The batch owns its memory, except for arrays of more than 1 MiB: they are not copied and must
    not change.

    Raises:
        SchemaMismatchError: an unknown column, a missing or null value where the schema demands
            one, or a value of another type.
    """
    names, required = _columns_of(schema)
    if not names.issuperset(values):
        raise SchemaMismatchError("unknown columns", got=sorted(values.keys() - names))
    for name in required:
        if values.get(name) is None:
            raise SchemaMismatchError("the column must not be null", key=name)
    try:
        batch = lay_out_row(schema, values)
    except _REFUSED:
        batch = None  # nothing is lost: what cannot be laid out, ``convert_row`` takes or names
    return convert_row(schema, values) if batch is None else batch


def _names_and_required(schema: pa.Schema) -> tuple[frozenset[str], tuple[str, ...]]:
    return frozenset(schema.names), tuple(f.name for f in schema if not f.nullable)


_columns_of = SchemaMemo(_names_and_required)
_REFUSED = (
    *(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError),
    *(TypeError, AttributeError, OverflowError, UnicodeEncodeError),
)
"""How pyarrow says that a value does not fit its column."""


def convert_row(schema: pa.Schema, values: Mapping[str, Any]) -> pa.RecordBatch:
    """``one_row`` by pyarrow alone, column by column: slower, and it names what it refuses.

    Nulls on the top level are not checked.
    """
    arrays = []
    for field in schema:
        value = values.get(field.name)
        try:
            if value is None:
                arrays.append(_one_null(field.type))
            elif isinstance(value, np.ndarray):
                items = pa.array(value, type=field.type.value_type)
                offsets = pa.array([0, len(value)], pa.int32())
                arrays.append(pa.ListArray.from_arrays(offsets, items, type=field.type))
            else:
                arrays.append(pa.array([value], type=field.type))
                if isinstance(value, (list, tuple, dict)):
                    find = _null_finder(field.type)
                    if find is not None and find(value):
                        raise SchemaMismatchError("null inside the column", key=field.name)
        except _REFUSED as exc:
            raise SchemaMismatchError(
                f"column {field.name}", expected=field.type, got=repr(value)[:120]
            ) from exc
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@cache
def _null_finder(kind: pa.DataType) -> Callable[[Any], bool] | None:
    """Tells of a Python value for ``kind`` if an item or member that must not be null is.

    Arrow itself takes such a value. None where there is nothing to look at.
    """
    if pa.types.is_list(kind):
        required = not kind.value_field.nullable
        inner = _null_finder(kind.value_type)

        def in_list(value: Any) -> bool:
            return any(required if x is None else inner is not None and inner(x) for x in value)

        return in_list
    if pa.types.is_struct(kind):
        members = [(field.name, not field.nullable, _null_finder(field.type)) for field in kind]

        def in_struct(value: Any) -> bool:
            return any(
                required if (x := value.get(name)) is None else find is not None and find(x)
                for name, required, find in members
            )

        return in_struct
    return None


@cache
def _one_null(kind: pa.DataType) -> pa.Array:
    return pa.nulls(1, kind)


def list_value(batch: pa.RecordBatch, name: str | int, row: int = 0) -> np.ndarray[Any, Any]:
    """Row ``row`` of a list column as a read-only numpy view of the Arrow buffer.

    Args:
        name: of the column, or its position.
    """
    column = batch.column(name)
    items = column.values
    start, end = _OFFSETS.unpack_from(column.buffers()[1], 4 * (column.offset + row))
    if start or end != len(items):
        items = items.slice(start, end - start)
    array: np.ndarray[Any, Any] = items.to_numpy(zero_copy_only=True)
    return array


_OFFSETS = Struct("<2i")


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """``batch`` (of this or an older version of ``schema``) with every column of ``schema``.

    Columns that came later are null.

    Raises:
        UnsupportedSchemaError: another schema, or a newer version.
        SchemaMismatchError: a column that may not be null is missing or holds a null, or a
            type differs.
    """
    name, version = schema_identity(batch.schema)
    want_name, want_version = schema_identity(schema)
    if name != want_name or version > want_version:
        raise UnsupportedSchemaError(
            "schema", expected=f"{want_name} <= {want_version}", got=f"{name} {version}"
        )
    if batch.schema.equals(schema, check_metadata=False):
        columns = batch.columns
        for at in _required_places(schema):
            if columns[at].null_count:
                raise _null_in(schema.field(at))
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
        elif not field.nullable and batch.column(at).null_count:
            raise _null_in(field)
        else:
            arrays.append(batch.column(at))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _null_in(field: pa.Field) -> SchemaMismatchError:
    return SchemaMismatchError("null in a column that must not be null", key=field.name)


def _find_required(schema: pa.Schema) -> tuple[int, ...]:
    return tuple(at for at, field in enumerate(schema) if not field.nullable)


_required_places = SchemaMemo(_find_required)
