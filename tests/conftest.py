"""What every test shares: rewritten asserts of the shipped contract suite, hypothesis profiles."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tokenplane.staging.testing")

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
