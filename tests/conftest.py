"""What every test shares: rewritten asserts, hypothesis profiles, the order of the tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.scheduling import TogetherScheduling, slow_first

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherScheduling:
    """Several workers: hand out what belongs together, in the order of the collection."""
    config.option.loadscopereorder = False
    return TogetherScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The same order in one process and in several."""
    slow_first(items)
