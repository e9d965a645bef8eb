"""What every test shares: rewritten asserts, hypothesis profiles, one worker for the engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# The contract suites ship with the packages; their asserts should explain themselves like ours.
pytest.register_assert_rewrite(
    *(f"tokenplane.{path.parent.name}.testing" for path in ROOT.glob("*/testing.py")),
    *(f"tokenplane.{path.parent.name}.contract_suite" for path in ROOT.glob("*/contract_suite")),
)

# One machine is shared with other work, so time says nothing about an example: no deadline.
settings.register_profile(
    "local",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# The same examples in every run: a red run means a change, and a green one can be repeated.
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own implementation
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that run a real model on one worker: one torch, one engine at a time."""
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("engine"))
