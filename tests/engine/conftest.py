"""Asserts of the shipped engine contract show their values, as those of a test do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tokenplane.engine_adapter.testing",
    "tokenplane.engine_adapter.testing_features",
    "tokenplane.engine_adapter.testing_lifecycle",
    "tokenplane.engine_adapter.testing_suite",
)
