"""Batches in and out of a generation worker: requests from padded ids, padded ids from answers.

Keys and shapes are those of the trainer's generation interface (``B`` samples, ``S`` longest input,
``T`` longest input with its answer):

=============================  ==========================================================
``input_ids``                  int[B, S], right-padded
``input_lengths``              int[B]
``stop_strings``               optional, per sample a list of strings or None
``output_ids``                 int64[B, T], input and answer, right-padded
``logprobs``                   float32[B, T], of the sampled ids; 0 where nothing was sampled
``generation_lengths``         int64[B], of the answers
``unpadded_sequence_lengths``  int64[B], of input and answer
``truncated``                  bool[B], the answer was cut off by its length
=============================  ==========================================================

The zeros of ``logprobs`` are padding of a dense array: which positions were sampled is what the two
length columns say.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tokenplane.engine_adapter.engine import GenerationRequest, GenerationResult, SamplingParams
from tokenplane.engine_adapter.worker.generation_config import GenerationConfig
from tokenplane.schemas.errors import RequestRejectedError

Batch = dict[str, torch.Tensor]


def merge_stop_strings(
    config: GenerationConfig, batch_stop_strings: Sequence[Sequence[str] | None] | None
) -> tuple[str, ...]:
    """The configuration's stop strings and those of every sample, each once, in order."""
    merged = dict.fromkeys(config.stop_strings)
    for strings in batch_stop_strings or ():
        merged.update(dict.fromkeys(strings or ()))
    return tuple(merged)


def build_sampling_params(
    config: GenerationConfig, *, greedy: bool, stop_strings: Sequence[str] = ()
) -> SamplingParams:
    """The sampling of one sample; ``greedy`` overrides the temperature."""
    return SamplingParams(
        max_tokens=config.max_new_tokens,
        temperature=0.0 if greedy else config.temperature,
        top_k=0 if greedy or config.top_k is None else config.top_k,
        top_p=1.0 if greedy else config.top_p,
        stop_token_ids=config.stop_token_ids or (),
        stop_strings=tuple(stop_strings),
        # With ids of its own the configuration says what ends an answer; else the model's do.
        ignore_eos=config.stop_token_ids is not None,
    )


def to_requests(
    data: Mapping[str, Any], config: GenerationConfig, *, greedy: bool
) -> list[GenerationRequest]:
    """One request per sample, padding removed.

    Raises: RequestRejectedError for a batch whose parts do not fit each other, or padded on the
    left.
    """
    ids = _integers(data, "input_ids")
    lengths = _integers(data, "input_lengths")
    if ids.ndim != 2 or lengths.shape != (ids.shape[0],):
        raise RequestRejectedError(
            "input_ids and input_lengths do not fit each other",
            expected="[B, S] and [B]",
            got=f"{list(ids.shape)} and {list(lengths.shape)}",
        )
    if lengths.size and not (lengths.min() >= 1 and lengths.max() <= ids.shape[1]):
        raise RequestRejectedError(
            "input_lengths is out of range", expected=f"1 to {ids.shape[1]}", got=lengths.tolist()
        )
    _refuse_left_padding(ids, lengths, config.pad_token_id)
    stops = _stop_strings(data, len(ids))
    sampling = build_sampling_params(
        config, greedy=greedy, stop_strings=merge_stop_strings(config, stops)
    )
    batch = uuid.uuid4().hex
    return [
        GenerationRequest(f"{batch}-{index}", row[:length], sampling)
        for index, (row, length) in enumerate(zip(ids, lengths.tolist(), strict=True))
    ]


def to_batch(results: Sequence[GenerationResult], pad_token_id: int) -> Batch:
    """The answers as padded tensors; see the table above."""
    totals = [len(r.prompt_token_ids) + len(r.generated_token_ids) for r in results]
    longest = max(totals, default=0)
    output = torch.full((len(results), longest), pad_token_id, dtype=torch.int64)
    log_probs = torch.zeros((len(results), longest), dtype=torch.float32)
    for row, (result, total) in enumerate(zip(results, totals, strict=True)):
        first = len(result.prompt_token_ids)
        output[row, :first] = torch.tensor(result.prompt_token_ids.tolist())
        output[row, first:total] = torch.tensor(result.generated_token_ids.tolist())
        log_probs[row, first:total] = torch.from_numpy(result.generated_log_probs.copy())
    return {
        "output_ids": output,
        "logprobs": log_probs,
        "generation_lengths": torch.tensor(
            [len(r.generated_token_ids) for r in results], dtype=torch.int64
        ),
        "unpadded_sequence_lengths": torch.tensor(totals, dtype=torch.int64),
        "truncated": torch.tensor([r.finish_reason == "length" for r in results], dtype=torch.bool),
    }


def _integers(data: Mapping[str, Any], key: str) -> np.ndarray:
    """An array of the batch, on whatever device it is. Raises: RequestRejectedError."""
    values = data.get(key)
    if isinstance(values, torch.Tensor) and not values.is_floating_point():
        values = values.cpu().numpy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # ragged, or nothing that is an array
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "iu":
        raise RequestRejectedError(
            "the batch is malformed",
            key=key,
            expected="integers",
            got="nothing" if values is None else getattr(values, "dtype", type(values).__name__),
        )
    return array


def _refuse_left_padding(ids: np.ndarray, lengths: np.ndarray, pad: int | None) -> None:
    padded = np.flatnonzero(lengths < ids.shape[1])
    left = padded[(ids[padded, 0] == pad) & (ids[padded, -1] != pad)]
    if left.size:
        raise RequestRejectedError(
            "input_ids is padded on the left",
            key="input_ids",
            expected="padding behind each sample",
            got=f"sample {left[0]}",
        )


def _stop_strings(data: Mapping[str, Any], count: int) -> Sequence[Sequence[str] | None] | None:
    given = data.get("stop_strings")
    if given is None:
        return None
    if (
        isinstance(given, str)
        or len(given) != count
        or not all(each is None or isinstance(each, list | tuple) for each in given)
    ):
        raise RequestRejectedError(
            "stop_strings does not fit the batch",
            key="stop_strings",
            expected=f"a list of strings, or None, for each of {count} samples",
            got=repr(given)[:80],
        )
    return list(given)
