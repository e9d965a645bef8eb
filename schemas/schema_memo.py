"""What is derived from a schema, computed once: rows of few schemas come in thousands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa

SCHEMA_FINGERPRINT_KEY: Final = b"tokenplane.schema_fingerprint"
MAX_SCHEMAS: Final = 256


class SchemaMemo[T]:
    """``compute(schema)``, remembered. Thread-safe: two threads may both compute, with one result.

    Printing or hashing a schema costs as much as storing a row; comparing it to a known one, which
    is found by the fingerprint in its metadata, does not.
    """

    def __init__(self, compute: Callable[[pa.Schema], T]) -> None:
        self._compute = compute
        self._known: dict[bytes | None, list[tuple[pa.Schema, T]]] = {}
        self._count = 0

    def __call__(self, schema: pa.Schema) -> T:
        """The value for ``schema``, names, types and metadata included."""
        metadata = schema.metadata
        place = None if metadata is None else metadata.get(SCHEMA_FINGERPRINT_KEY)
        for known, value in self._known.get(place, ()):
            if schema.equals(known, check_metadata=True):
                return value
        value = self._compute(schema)
        if self._count >= MAX_SCHEMAS:
            self._known, self._count = {}, 0
        self._known.setdefault(place, []).append((schema, value))
        self._count += 1
        return value
