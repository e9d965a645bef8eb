"""The console that tables are printed on: as wide as the terminal, and wide where there is none."""

from __future__ import annotations

import shutil

from rich.console import Console

_WIDTH = 140
"""Of a pipe or a file, whose reader scrolls; COLUMNS and a wider terminal win."""


def open_console() -> Console:
    """Stdout, without rich's own ideas about numbers, brackets and colons in the text."""
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    width = max(_WIDTH, shutil.get_terminal_size().columns)
    return Console(highlight=False, markup=False, emoji=False, width=width)
