"""``tokenplane inspect store``: what a store holds, by partition."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tokenplane.tools.command_frame import coded_errors, command_parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which store."""
    parser.add_argument("store", help="store URL or folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


@coded_errors("inspect store")
def main(argv: list[str] | None = None) -> int:
    """0: shown; 1: there is no such store."""
    parser = command_parser("inspect store", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    from tokenplane.tools.store_reading import open_for_reading

    with open_for_reading(args.store) as store:
        whole = store.stats()
        partitions = {name: store.stats(name) for name in store.partitions()}
    found: dict[str, Any] = {
        "url": args.store,
        "durable": store.durable,
        "shared": store.shared,
        "rows": whole.rows,
        "bytes": whole.bytes,
        "blobs": whole.blobs,
        "blob_bytes": whole.blob_bytes,
        "max_bytes": whole.max_bytes,
        "partitions": {
            name: {
                "rows": stats.rows,
                "bytes": stats.bytes,
                "blobs": stats.blobs,
                "blob_bytes": stats.blob_bytes,
                "sealed": name in stats.sealed,
                "backlog": dict(stats.backlog),
                "leased": dict(stats.leased),
            }
            for name, stats in partitions.items()
        },
    }
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    return 0


def _show(found: dict[str, Any]) -> None:
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    from tokenplane.tools.wide_console import open_console

    console = open_console()
    console.print(
        f"{found['url']}: an acknowledged row survives {_SURVIVES[found['durable']]}; "
        f"seen by {_SEEN[found['shared']]}",
        soft_wrap=True,
    )
    if found["max_bytes"] is not None:
        used = found["bytes"] + found["blob_bytes"]
        console.print(f"budget {decimal(found['max_bytes'])}, used {decimal(used)}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("partition", "rows", "bytes", "big buffers", "sealed", "not yet acknowledged"):
        table.add_column(name, justify="right" if name in ("rows", "bytes") else "left")
    for name, part in found["partitions"].items():
        blobs = f"{part['blobs']} ({decimal(part['blob_bytes'])})" if part["blobs"] else "-"
        backlog = ", ".join(f"{who}: {count}" for who, count in part["backlog"].items())
        table.add_row(
            name,
            str(part["rows"]),
            decimal(part["bytes"]),
            blobs,
            "yes" if part["sealed"] else "no",
            backlog or "-",
        )
    console.print(table)


_SURVIVES = {
    "power": "a power cut",
    "process": "the loss of the process",
    "none": "nothing",
}
_SEEN = {
    "private": "its own process",
    "host": "every process of this host",
    "network": "several hosts",
}


if __name__ == "__main__":
    raise SystemExit(main())
