"""Hypothesis strategies for what the contract allows, its awkward corners included."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tokenplane.schemas.tokens import INT32_MAX

# Not below or above: ends of a range, signs, and characters beyond ASCII and the basic plane.
IDS = st.one_of(
    st.sampled_from(["r", "röll/1", "呼び出し", "🙂", "a\x00b", " ", "é" * 40]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
)
TOKEN_IDS = st.one_of(st.sampled_from([0, 1, INT32_MAX]), st.integers(0, INT32_MAX))
WIRE_TOKEN_IDS = st.one_of(TOKEN_IDS, st.sampled_from([INT32_MAX + 1, 2**32, 2**64 - 1]))
VERSIONS = st.one_of(st.sampled_from([0, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
FLOAT32_MAX = float(np.finfo(np.float32).max)
LOG_PROBS = st.one_of(
    st.sampled_from([0.0, -0.0, -1e-45, 1e-45, 5e-324, -FLOAT32_MAX, -0.1, 1e-46]),
    st.floats(-FLOAT32_MAX, FLOAT32_MAX),
)
FLOAT32S = st.one_of(
    st.sampled_from([0.0, -0.0, -1e-45, -FLOAT32_MAX]).map(lambda x: float(np.float32(x))),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
HEX = st.binary(min_size=32, max_size=32).map(bytes.hex)

_EXTRA_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0.0, -0.0, 1.0, 5e-324, 1.7976931348623157e308]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)


EXTRA_VALUES: st.SearchStrategy[Any] = st.recursive(_EXTRA_LEAVES, _nested, max_leaves=12)
EXTRAS: st.SearchStrategy[dict[str, Any] | None] = st.none() | st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6), EXTRA_VALUES, max_size=4
)
