"""Epoch arithmetic: which weights made which token (DESIGN rule 2), stated here once.

An epoch boundary ``(b, e)`` is what Megatron's ``DynamicInferenceEngine`` records: ``(0, e)`` at
admission and ``(total_tokens - 1, e')`` at each change while the request lives. ``b`` is an *input*
index. The token at index ``i`` (over prompt, then generation) is sampled from the output at input
index ``i - 1``; so it was made by the last policy boundary with ``b <= i - 1``. The KV entry of
input ``j`` was written under the last KV boundary with ``b <= j``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenplane.schemas.errors import InvalidRecordError

INT64_MAX = 2**63 - 1
"""Both members of a boundary are int64 columns."""

type Boundaries = tuple[tuple[int, int], ...]


def to_boundaries(
    pairs: Sequence[Sequence[int]] | None, *, name: str = "policy_epochs"
) -> Boundaries:
    """``((token_index, epoch), ...)``, checked: starts at 0, indices never fall, epochs >= 0.

    ``None`` (Megatron's value for a request admitted before any epoch was set) gives ``()``.

    Raises:
        InvalidRecordError: anything else.
    """
    result = []
    for pair in _iterable(pairs, name):
        values = [_index(x) for x in pair] if isinstance(pair, (list, tuple)) else []
        if len(values) != 2 or not 0 <= min(values) <= max(values) <= INT64_MAX:
            raise InvalidRecordError(
                f"{name}: (token_index, epoch), integers >= 0", got=repr(pair)[:80]
            )
        result.append((values[0], values[1]))
    if result and result[0][0] != 0:
        raise InvalidRecordError(f"{name}: the first boundary must be at 0", got=result[0])
    if any(a[0] > b[0] for a, b in itertools.pairwise(result)):
        raise InvalidRecordError(f"{name}: token indices must not fall", got=repr(result))
    return tuple(result)


def _iterable(pairs: object, name: str) -> Sequence[object]:
    if pairs is None:
        return ()
    if not isinstance(pairs, (list, tuple)):
        raise InvalidRecordError(f"{name} must be a list of pairs", got=type(pairs).__name__)
    return pairs


def _index(value: object) -> int:
    """``value`` as an int, −1 for what is none (a boolean, a float, a string)."""
    if isinstance(value, (bool, np.bool_)):
        return -1
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def generation_versions(policy: Boundaries, prompt_len: int, total_len: int) -> NDArray[np.int64]:
    """int64[G]: the weight version that sampled each generated token.

    Raises:
        InvalidRecordError: no boundary at all (code ``no_policy_epoch``), or no prompt.
    """
    if not policy:
        raise InvalidRecordError("the request carries no policy epoch", code="no_policy_epoch")
    if prompt_len < 1 or total_len < prompt_len:
        raise InvalidRecordError("a prompt of at least one token", got=(prompt_len, total_len))
    return _epoch_at(policy, np.arange(prompt_len - 1, total_len - 1))


def kv_versions(kv: Boundaries, input_len: int) -> NDArray[np.int64]:
    """int64[input_len]: the version under which each input position's KV entry was written.

    −1 everywhere where nothing is known.
    """
    if not kv:
        return np.full(input_len, -1, np.int64)
    return _epoch_at(kv, np.arange(input_len))


def _epoch_at(boundaries: Boundaries, index: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.array([b for b, _ in boundaries], np.int64)
    epochs = np.array([e for _, e in boundaries], np.int64)
    return epochs[np.searchsorted(starts, index, side="right") - 1]


def admission_version(policy: Boundaries) -> int:
    """The version of the first boundary.

    Raises:
        InvalidRecordError: there is none (code ``no_policy_epoch``).
    """
    if not policy:
        raise InvalidRecordError("the request carries no policy epoch", code="no_policy_epoch")
    return policy[0][1]


def spans_epochs(policy: Boundaries) -> bool:
    """True if the request lived under more than one distinct version."""
    return len({epoch for _, epoch in policy}) > 1


def staleness(versions: NDArray[np.int64], trainer_version: int) -> NDArray[np.int64]:
    """int64[...]: how many versions behind the trainer each token is; −1 where unknown."""
    return np.where(versions < 0, -1, trainer_version - versions)
