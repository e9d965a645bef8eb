"""The exit statuses that every command shares; importing this costs nothing."""

from __future__ import annotations

EXIT_FAILED = 1
"""A check or the work itself failed."""
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
