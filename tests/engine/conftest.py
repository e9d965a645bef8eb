"""What the engine tests share: rewritten asserts of the shipped contract, one thread for torch."""

from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite(
    "tokenplane.engine_adapter.testing",
    "tokenplane.engine_adapter.contract_suite",
)

# The reference forwards of tests run on the first thread; with more threads than free cores they
# would be many times slower.
torch.set_num_threads(1)
