"""``tokenplane inspect row``: every column of one row, with its value and what it means."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tokenplane.tools.command_frame import coded_errors, command_parser

if TYPE_CHECKING:
    import pyarrow as pa

    from tokenplane.staging.store import StagingStore

_ITEMS = 8
"""Elements of a list that are shown of its beginning and end."""
_CHARACTERS = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which row, and how much of it."""
    parser.add_argument("store", help="store URL or folder")
    parser.add_argument(
        "key",
        help="the row's key, or the beginning of one of its parts (rollout, call, attempt) if that "
        "names one row only",
    )
    parser.add_argument("--partition", default="staged", help="default: staged")
    parser.add_argument("--full", action="store_true", help="shorten nothing")
    parser.add_argument("--json", action="store_true", help="print JSON, never shortened")


@coded_errors("inspect row")
def main(argv: list[str] | None = None) -> int:
    """0: shown; 1: no such row, several, or a corrupt one."""
    parser = command_parser("inspect row", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    from tokenplane.tools.store_reading import open_for_reading

    with open_for_reading(args.store) as store:
        key = find_key(store, args.partition, args.key)
        [row] = store.get(args.partition, [key])
    if args.json:
        print(json.dumps(_values(row), indent=2, ensure_ascii=False))
    else:
        _show(args.partition, key, row, full=args.full)
    sys.stdout.flush()
    return 0


def find_key(store: StagingStore, partition: str, wanted: str) -> str:
    """The one key that ``wanted`` names.

    Raises:
        MissingRowError: it names none (``missing_row``) or several (``ambiguous_key``).
    """
    from tokenplane.schemas.errors import MissingRowError

    keys = store.keys(partition)
    if wanted in keys:
        return wanted
    found = [
        key
        for key in keys
        if key.startswith(wanted) or any(part.startswith(wanted) for part in key.split("/"))
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise MissingRowError(f"no row of partition {partition!r} has this key", key=wanted)
    raise MissingRowError(
        f"{len(found)} rows of partition {partition!r} fit",
        code="ambiguous_key",
        key=wanted,
        expected="one of " + ", ".join(found[:8]) + (", …" if len(found) > 8 else ""),
    )


def _values(row: pa.RecordBatch) -> dict[str, Any]:
    return {name: to_plain(value) for name, value in row.to_pylist()[0].items()}


def to_plain(value: Any) -> Any:
    """JSON values: bytes become hex, at any depth."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    return value


def _show(partition: str, key: str, row: pa.RecordBatch, *, full: bool) -> None:
    from rich import box
    from rich.table import Table

    from tokenplane.schemas.columns import schema_identity
    from tokenplane.tools.replay_screen import printable
    from tokenplane.tools.wide_console import open_console

    name, version = schema_identity(row.schema)
    docs = _docs(name)
    console = open_console()
    console.print(f"{partition}/{key}: {name}, version {version}", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, ratio in (("column", None), ("value", 3), ("meaning", 2)):
        table.add_column(title, ratio=ratio, overflow="fold")
    for column, value in _values(row).items():
        table.add_row(column, printable(shown(value, full=full)), docs.get(column, ""))
    console.print(table)


def shown(value: Any, *, full: bool) -> str:
    """A value for people: long lists and texts shortened unless ``full``."""
    if value is None:
        return "-"
    if isinstance(value, list) and len(value) > 2 * _ITEMS and not full:
        kept = [*value[:_ITEMS], "…", *value[-_ITEMS:]]
        return f"{', '.join(map(_brief, kept))} ({len(value)} in all)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > _CHARACTERS and not full:
        return f"{text[:_CHARACTERS]}… ({len(text)} characters)"
    return text


def _brief(item: Any) -> str:
    if isinstance(item, float):
        return f"{item:.4g}"
    return item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)


def _docs(schema_name: str) -> dict[str, str]:
    from tokenplane.schemas.artifact_row import ARTIFACT_COLUMNS
    from tokenplane.schemas.failure_row import FAILURE_COLUMNS
    from tokenplane.schemas.staged_row import STAGED_COLUMNS
    from tokenplane.schemas.training_row import TRAINING_COLUMNS

    columns = {
        "staged-row": STAGED_COLUMNS,
        "training-row": TRAINING_COLUMNS,
        "failure-row": FAILURE_COLUMNS,
        "artifact-row": ARTIFACT_COLUMNS,
    }
    return {column.name: column.doc for column in columns.get(schema_name, ())}


if __name__ == "__main__":
    raise SystemExit(main())
