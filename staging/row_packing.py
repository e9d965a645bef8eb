"""What every backend checks before it stores a row and after it reads one back."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from tokenplane.schemas.columns import (
    SCHEMA_FINGERPRINT_KEY,
    SCHEMA_NAME_KEY,
    Column,
    render_schema,
    schema_identity,
)
from tokenplane.schemas.errors import (
    CorruptRowError,
    InvalidKeyError,
    MissingRowError,
    SchemaMismatchError,
    TokenplaneError,
)
from tokenplane.schemas.row_message import decode_message, encode_message, message_digest
from tokenplane.schemas.schema_memo import SchemaMemo

MAX_KEY_BYTES: Final = 4096
IDENTITY_COLUMNS: Final = {"staged-row": "staging_key", "training-row": "row_id"}
"""Schema name to the column that must equal the key."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A checked row, ready to be stored."""

    message: bytes
    binding: bytes
    """32 bytes over partition, key and content: equal bindings mean the identical row."""
    label: str
    """Kind of row (see ``schema_label``); all rows of a partition have one."""


def check_name(value: str, what: str) -> str:
    """``value`` itself, a usable partition, key or consumer name.

    Raises:
        InvalidKeyError: not a string, empty, with NUL or lone surrogates, or too long.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidKeyError(f"{what}: expected a non-empty string", got=repr(value)[:80])
    return _check_utf8(value, what)


def check_prefix(value: str) -> str:
    """``value`` itself; a prefix may be empty.

    Raises:
        InvalidKeyError: as for ``check_name``.
    """
    return value if value == "" else check_name(value, "prefix")


def _check_utf8(value: str, what: str) -> str:
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as exc:
        raise InvalidKeyError(f"{what} is not encodable as UTF-8", got=repr(value)[:80]) from exc
    if size > MAX_KEY_BYTES:
        raise InvalidKeyError(f"{what} is too long", expected=f"<= {MAX_KEY_BYTES}", got=size)
    return value


def check_keys(keys: Sequence[str]) -> list[str]:
    """The keys as a list of usable strings.

    Raises:
        InvalidKeyError: one string instead of a sequence, or a malformed key.
    """
    if isinstance(keys, str):
        raise InvalidKeyError("expected a sequence of keys, got one string", key=keys)
    return [check_name(key, "key") for key in keys]


def check_unique_keys(keys: Sequence[str]) -> list[str]:
    """``check_keys`` for a request that may name no key twice.

    Raises:
        InvalidKeyError: also for a repeated key.
    """
    checked = check_keys(keys)
    if len(set(checked)) != len(checked):
        twice = next(key for key in checked if checked.count(key) > 1)
        raise InvalidKeyError("a key is named twice in one request", key=twice)
    return checked


def check_found(keys: Sequence[str], found: set[str], partition: str) -> None:
    """Raises:
    MissingRowError: some of ``keys`` were not found; the message names them.
    """
    missing = [key for key in keys if key not in found]
    if missing:
        raise MissingRowError(
            f"{len(missing)} of {len(keys)} rows are not in partition {partition!r}",
            expected=len(keys),
            got=f"no row for {missing[:8]}",
            key=missing[0],
        )


def pack_row(partition: str, key: str, row: pa.RecordBatch) -> PackedRow:
    """The row as a message, with what is needed to recognise it again.

    Raises:
        TypeError: not a record batch.
        SchemaMismatchError: not one row, or a type that does not read back.
        InvalidKeyError: a malformed name, or the row is another key's.
    """
    check_name(partition, "partition")
    check_name(key, "key")
    if not isinstance(row, pa.RecordBatch):
        raise TypeError(f"a row is a pyarrow.RecordBatch, got {type(row).__name__}")
    if row.num_rows != 1:
        raise SchemaMismatchError("a row is a batch of one row", expected=1, got=row.num_rows)
    label = schema_label(row.schema)
    identity = identity_of(row)
    if identity is not None and identity != key:
        raise InvalidKeyError("the row is another key's", expected=key, got=identity)
    message = encode_message(row)
    return PackedRow(message, row_binding(partition, key, message_digest(message)), label)


def unpack_row(
    message: bytes | memoryview | pa.Buffer,
    partition: str,
    key: str,
    columns: Sequence[str] | None = None,
    *,
    binding: bytes | None = None,
) -> pa.RecordBatch:
    """The verified row of a stored message.

    Raises:
        CorruptRowError: the message fails its checksum, or the row is another key's.
        SchemaMismatchError: the row lacks one of ``columns``.
    """
    batch = decode_message(message, key=key)
    if binding is not None and row_binding(partition, key, message_digest(message)) != binding:
        raise CorruptRowError("the stored row does not belong to this key", key=key)
    identity = identity_of(batch)
    if identity is not None and identity != key:
        raise CorruptRowError("the row is another key's", expected=key, got=identity, key=key)
    return select_columns(batch, columns, key)


def select_columns(
    batch: pa.RecordBatch, columns: Sequence[str] | None, key: str
) -> pa.RecordBatch:
    """``columns`` of the row, in that order; all of them for None.

    Raises:
        SchemaMismatchError: the row lacks a column.
    """
    if columns is None:
        return batch
    places = _places_of(batch.schema)
    wanted = tuple(columns)
    at = places.get(wanted)
    if at is None:
        names = batch.schema.names
        lacking = [name for name in wanted if names.count(name) != 1]
        if lacking:
            raise SchemaMismatchError("the row has no such column", got=lacking, key=key)
        at = [names.index(name) for name in wanted]
        if len(places) < _MAX_SELECTIONS:
            places[wanted] = at
    return batch.select(at)


def _no_places(_schema: pa.Schema) -> dict[tuple[str, ...], list[int]]:
    return {}


_places_of = SchemaMemo(_no_places)
"""By schema: selections of its columns that were asked for, and where those stand."""
_MAX_SELECTIONS: Final = 64


def check_blob(data: bytes, sha256: bytes) -> pa.Buffer:
    """The content of a blob as read back.

    Raises:
        CorruptRowError: it has another hash.
    """
    actual = hashlib.sha256(data).digest()
    if actual != sha256:
        raise CorruptRowError("the blob fails its checksum", got=actual.hex(), key=sha256.hex())
    return pa.py_buffer(data)


def row_binding(partition: str, key: str, digest: bytes) -> bytes:
    """SHA-256 tying a message digest to the place where the message is stored."""
    name = partition.encode()
    return hashlib.sha256(struct.pack("<I", len(name)) + name + digest + key.encode()).digest()


def identity_of(row: pa.RecordBatch) -> str | None:
    """The key that the row itself names; None where its schema has no such column."""
    at = _identity_place(row.schema)
    if at is None:
        return None
    identity: str | None = row.column(at).to_pylist()[0]
    return identity


def _find_identity(schema: pa.Schema) -> int | None:
    name = (schema.metadata or {}).get(SCHEMA_NAME_KEY)
    column = None if name is None else IDENTITY_COLUMNS.get(name.decode())
    at = -1 if column is None else schema.get_field_index(column)
    return None if at < 0 else at


_identity_place = SchemaMemo(_find_identity)


def schema_label(schema: pa.Schema) -> str:
    """The kind of row: the schema's tokenplane name, else a digest of its fields.

    Versions of one tokenplane schema share a label, so old and new rows may lie side by side.

    Raises:
        SchemaMismatchError: the fields are not those of the schema that the metadata claims, or a
            row of this schema would not read back (dictionary columns do not).
    """
    return _label_of(schema)


def _checked_label(schema: pa.Schema) -> str:
    metadata = schema.metadata or {}
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)
    try:
        same = decode_message(encode_message(empty)).schema.equals(schema, check_metadata=True)
    except (TokenplaneError, pa.ArrowException) as exc:
        raise SchemaMismatchError("the schema does not read back", got=schema.names) from exc
    if not same or any(pa.types.is_dictionary(field.type) for field in schema):
        raise SchemaMismatchError("the schema does not read back", got=schema.names)
    if SCHEMA_NAME_KEY not in metadata:
        return hashlib.sha256(schema.to_string().encode()).hexdigest()
    name, version = schema_identity(schema)
    columns = [Column(f.name, f.type, "", nullable=f.nullable) for f in schema]
    declared = render_schema(name, version, columns).metadata[SCHEMA_FINGERPRINT_KEY]
    if metadata.get(SCHEMA_FINGERPRINT_KEY) != declared:
        raise SchemaMismatchError(
            "the columns are not those of the schema that the row claims", got=f"{name} {version}"
        )
    return f"tokenplane:{name}"


_label_of = SchemaMemo(_checked_label)
