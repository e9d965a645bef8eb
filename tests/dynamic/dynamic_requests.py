"""Requests and weight changes of these tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenplane.engine_adapter.engine import GenerationRequest, SamplingParams

_names = itertools.count()


def ask(prompt: Sequence[int], **sampling: Any) -> GenerationRequest:
    """A greedy request of 12 tokens that ignores end ids, unless said otherwise."""
    settings = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | sampling
    ids = np.array(prompt, dtype=np.int32)
    return GenerationRequest(f"r{next(_names)}", ids, SamplingParams(**settings))


def change_weights(model: Any) -> None:
    """Another policy, in place."""
    for index, parameter in enumerate(model.parameters()):
        parameter.mul_(1.05 if index % 2 else 0.95)
