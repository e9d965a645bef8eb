"""``tokenplane inspect template``: which conversation shapes a tokenizer's template can splice."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tokenplane.capture.splice import (
    EXPLANATIONS,
    Outcome,
    ShapeReport,
    SpliceCode,
    conformance_report,
)
from tokenplane.schemas.errors import ConfigError

if TYPE_CHECKING:
    from tokenplane.engine_adapter.chat.renderer import TokenizerChatRenderer

_WORDS: dict[Outcome, str] = {
    "exact": "[green]exact[/]",
    "template_equal": "[green]equal[/]",
    "refused": "[yellow]refused[/]",
    "raises": "[blue]template raises[/]",
    "wrong": "[bold red]WRONG[/]",
}


def main(argv: list[str] | None = None) -> int:
    """0: no shape is spliced wrongly; 1: one is; 2: no such tokenizer, or wrong usage."""
    options = _parser().parse_args(argv)
    from tokenplane.engine_adapter.chat.renderer import open_renderer

    try:
        renderer = open_renderer(options.tokenizer, options.terminator)
    except ConfigError as error:
        print(f"inspect template: {error}", file=sys.stderr)
        return 2
    report = conformance_report(renderer, renderer.terminator_ids)
    if options.json:
        print(json.dumps(_as_json(renderer, report), indent=2, ensure_ascii=False))
    else:
        _print_table(renderer, report)
    return 1 if any(row.outcome == "wrong" for row in report) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tokenplane inspect template",
        description="Splice every known conversation shape with this chat template and compare "
        "with its full render.",
    )
    parser.add_argument("tokenizer", help="folder with tokenizer.json and a chat template")
    parser.add_argument(
        "--terminator",
        action="append",
        default=[],
        metavar="TOKEN",
        help="one more token on which the model stops (repeatable); the tokenizer's own and those "
        "of generation_config.json are known",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _as_json(renderer: TokenizerChatRenderer, report: Sequence[ShapeReport]) -> dict[str, object]:
    return {
        "template_fingerprint": renderer.template_fingerprint,
        "tokenizer_fingerprint": renderer.tokenizer_fingerprint,
        "terminators": _terminators(renderer),
        "needs": asdict(renderer.needs),
        "totals": dict(Counter(row.outcome for row in report)),
        "shapes": [asdict(row) for row in report],
    }


def _terminators(renderer: TokenizerChatRenderer) -> dict[str, int]:
    return {renderer.token_text(i): i for i in sorted(renderer.terminator_ids)}


def _print_table(renderer: TokenizerChatRenderer, report: Sequence[ShapeReport]) -> None:
    console = Console()
    table = Table("conversation", "splice", "notes", title="Splice conformance")
    for row in report:
        table.add_row(row.shape, _WORDS[row.outcome], row.code or ", ".join(row.notes))
    console.print(table)
    console.print(f"terminators: {_terminators(renderer)}", markup=False)
    for code in sorted({row.code for row in report if row.outcome == "refused"}):
        console.print(f"{code}: {EXPLANATIONS[SpliceCode(code)]}", markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
