"""``tokenplane inspect``: ``row``, ``store`` or ``template``."""

from __future__ import annotations

import argparse
from importlib import import_module

SUBJECTS = {
    "row": ("tokenplane.tools.inspecting.row", "every column of one row, with what it means"),
    "store": ("tokenplane.tools.inspecting.store", "partitions, rows, bytes, consumers"),
    "template": (
        "tokenplane.tools.inspecting.template",
        "which conversation shapes a tokenizer's chat template can splice exactly",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """What the subject's own ``main`` gives."""
    listed = "\n".join(f"  {name:<9} {summary}" for name, (_, summary) in SUBJECTS.items())
    parser = argparse.ArgumentParser(
        prog="tokenplane inspect",
        description="Look at one thing closely.",
        epilog=f"subjects:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subject", metavar="SUBJECT", choices=SUBJECTS, help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the subject")
    args = parser.parse_args(argv)
    status: int = import_module(SUBJECTS[args.subject][0]).main(args.arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
