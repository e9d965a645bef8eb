"""Test names that are the same in every worker of a parallel run."""

from __future__ import annotations

import re


def stable_repr(value: object) -> str:
    """``repr`` without memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
