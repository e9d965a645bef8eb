"""The state of one live request: its tokens, its epochs, its cache, its clock, and its result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch

from tokenplane.engine_adapter.cpu.batch import KVCache
from tokenplane.engine_adapter.engine import (
    EngineInfo,
    EpochBoundaries,
    GenerationRequest,
    GenerationResult,
)
from tokenplane.engine_adapter.sampling import make_generator, resolve_seed, sample_token
from tokenplane.engine_adapter.sampling_stops import Detokenize, Stop, StopMatcher
from tokenplane.schemas.errors import ContextOverflowError, RequestRejectedError


class EpochTrack:
    """The policy and KV-cache epoch boundaries of one request.

    Same meaning as megatron-core 0.19.2's ``DynamicInferenceRequest.policy_epoch`` and
    ``kv_cache_epoch``: boundary ``b`` is an input index, ``(0, e)`` at admission and
    ``(total_tokens - 1, e')`` at each change. Sharper in two places where nothing is lost by it:
    the KV boundary is the first position still to be computed (the same index while decoding, an
    earlier one during prefill), and an epoch is never claimed for tokens made before any was set.
    """

    def __init__(self, version: int | None) -> None:
        self._policy: list[tuple[int, int]] = [] if version is None else [(0, version)]
        self._kv = list(self._policy)

    def change(self, version: int, *, total: int, computed: int, generated: int) -> None:
        """The weights are ``version`` from input index ``total - 1`` on.

        ``computed`` input positions have their keys and values, ``generated`` tokens exist.
        """
        if self._policy:
            self._policy.append((total - 1, version))
        elif not generated and not computed:
            self._policy = [(0, version)]
        if not computed:
            self._kv = [(0, version)] if self._policy else []
        elif self._kv:
            self._kv.append((computed, version))

    def restart_kv(self, version: int | None) -> None:
        """The cache was dropped: every position will be computed anew, by ``version`` so far."""
        self._kv = [(0, version)] if self._policy and version is not None else []

    @property
    def policy(self) -> EpochBoundaries:
        return tuple(self._policy)

    @property
    def kv(self) -> EpochBoundaries:
        return tuple(self._kv)


class LiveRequest:
    """One admitted request. Owned by the engine thread; only ``future`` is seen elsewhere."""

    def __init__(
        self,
        request: GenerationRequest,
        info: EngineInfo,
        detokenize: Detokenize | None,
        future: Future[GenerationResult],
        *,
        version: int | None,
    ) -> None:
        """``request`` must have passed ``check_request``; its arrays are ours from now on."""
        room = info.max_sequence_length - len(request.prompt_token_ids)
        sampling = resolve_seed(request.sampling)
        self.sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        self.request = request
        self.future = future
        self.epochs = EpochTrack(version)
        self.tokens: list[int] = request.prompt_token_ids.tolist()
        """Prompt and generated ids."""
        self.max_cached = len(self.tokens) + self.sampling.max_tokens - 1
        """The most positions it can ever have in its cache (the last token is never an input)."""
        self.cache = KVCache(self.max_cached)
        self.num_evictions = 0
        self._prompt_length = len(self.tokens)
        self._log_probs: list[float] = []
        self._generator = make_generator(self.sampling)
        eos = () if self.sampling.ignore_eos else info.eos_token_ids
        self._matcher = StopMatcher(
            frozenset(self.sampling.stop_token_ids) | frozenset(eos),
            self.sampling.stop_strings,
            detokenize,
        )
        self._routes: list[np.ndarray] | None = []
        self._stop: Stop | None = None
        self._admitted_s = time.monotonic()
        self._started_s = self._first_token_s = self._admitted_s

    @property
    def generated(self) -> int:
        return len(self._log_probs)

    @property
    def pending(self) -> int:
        """Input positions not yet computed; 1 while decoding."""
        return len(self.tokens) - self.cache.length

    @property
    def finished(self) -> bool:
        return self._stop is not None or self.generated >= self.sampling.max_tokens

    def start(self) -> None:
        """Its first step is about to run."""
        self._started_s = time.monotonic()

    def chunk(self, count: int) -> Sequence[int]:
        """The next ``count`` ids to compute."""
        return self.tokens[self.cache.length : self.cache.length + count]

    def computed(self, count: int, routes: np.ndarray | None) -> None:
        """``count`` more positions are in the cache, by ``routes`` int16[count, L, K]."""
        unwanted = max(0, self.request.routes_from - self.cache.length)
        self.cache.commit(count)
        if routes is None:
            self._routes = None
        elif self._routes is not None:
            self._routes.append(routes[unwanted:])

    def sample(self, logits: torch.Tensor) -> None:
        """Take the next token from ``logits`` float[V] of the last position, and release ids."""
        token, log_prob = sample_token(logits, self.sampling, self._generator)
        if not self._log_probs:
            self._first_token_s = time.monotonic()
        self.tokens.append(token)
        self._log_probs.append(log_prob)
        self._stop = self._matcher.push(token)
        if self.finished:
            self._matcher.finish(self._stop)
        released = self._matcher.take_released()
        if released and self.request.on_tokens is not None:
            self.request.on_tokens(_frozen(released, np.int32))

    def change_version(self, version: int) -> None:
        """Open an epoch boundary: from the next computed position on the weights are others."""
        self.epochs.change(
            version,
            total=len(self.tokens),
            computed=self.cache.length,
            generated=self.generated,
        )

    def evict(self, version: int | None) -> bool:
        """Drop the cache (rebuilt by later steps); False if there was nothing in it."""
        if not self.cache.length:
            return False
        self.cache.clear()
        self.epochs.restart_kv(version)
        self._routes = None  # earlier routes came from another pass than the one to come
        self.num_evictions += 1
        return True

    def result(self) -> GenerationResult:
        """The finished answer."""
        now = time.monotonic()
        routes = None
        if self._routes:
            routes = np.ascontiguousarray(np.concatenate(self._routes))
            routes.flags.writeable = False
        return GenerationResult(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            generated_token_ids=_frozen(self.tokens[self._prompt_length :], np.int32),
            generated_log_probs=_frozen(self._log_probs, np.float32),
            finish_reason="length" if self._stop is None else "stop",
            stop_reason=None if self._stop is None else self._stop.reason,
            policy_epochs=self.epochs.policy,
            kv_cache_epochs=self.epochs.kv,
            num_evictions=self.num_evictions,
            routing_indices=routes,
            queue_s=self._started_s - self._admitted_s,
            prefill_s=self._first_token_s - self._started_s,
            decode_s=now - self._first_token_s,
            sampling=self.sampling,
            routing_start=0 if routes is None else self.request.routes_from,
        )


def check_request(
    request: GenerationRequest, info: EngineInfo, *, has_text: bool
) -> GenerationRequest:
    """The request with its own frozen copy of the prompt.

    ``has_text`` says if the engine can decode text (stop strings need it).

    Raises: RequestRejectedError; ContextOverflowError if not one token fits behind the prompt.
    """
    prompt = np.asarray(request.prompt_token_ids)
    if not request.request_id:
        raise RequestRejectedError("request_id is empty")
    if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype.kind not in "iu":
        raise RequestRejectedError(
            "prompt_token_ids is malformed",
            expected="a non-empty one-dimensional integer array",
            got=f"{prompt.dtype}{list(prompt.shape)}",
        )
    if not 0 <= request.routes_from <= prompt.size:
        raise RequestRejectedError(
            "routes_from is out of range", expected=f"0..{prompt.size}", got=request.routes_from
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= info.vocab_size:
        raise RequestRejectedError(
            "prompt_token_ids holds an id outside the vocabulary",
            expected=f"0 <= id < {info.vocab_size}",
            got=low if low < 0 else high,
        )
    if any(token >= info.vocab_size for token in request.sampling.stop_token_ids):
        raise RequestRejectedError(
            "stop_token_ids holds an id outside the vocabulary",
            expected=f"0 <= id < {info.vocab_size}",
            got=max(request.sampling.stop_token_ids),
        )
    if request.sampling.stop_strings and not has_text:
        raise RequestRejectedError("stop_strings needs an engine with a tokenizer")
    if prompt.size + 1 > info.max_sequence_length:
        raise ContextOverflowError(
            f"this model's maximum context length is {info.max_sequence_length} tokens, "
            f"but the prompt has {prompt.size} and at least one must be generated",
            expected=f"<= {info.max_sequence_length - 1}",
            got=prompt.size,
        )
    return replace(request, prompt_token_ids=_frozen(prompt, np.int32))


def _frozen(values: object, dtype: type[np.generic]) -> np.ndarray:
    array = np.array(values, dtype=dtype, order="C")
    array.flags.writeable = False
    return array
