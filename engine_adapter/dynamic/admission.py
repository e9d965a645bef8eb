"""What becomes of a prompt and its sampling parameters as they enter Megatron's engine.

Requests come from our own facade, checked already, or from any other client of the coordinator,
such as Megatron's own frontends. Nothing that one of those sends, and nothing that the prompt
preparer gives or raises, may reach the engine's loop: it makes a request that has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tokenplane.engine_adapter.cpu.request import check_request
from tokenplane.engine_adapter.dynamic.hooks import CaptureHooks
from tokenplane.engine_adapter.dynamic.records import WIRE
from tokenplane.engine_adapter.dynamic.request import DynamicRequest, OnTokens, parse_wire
from tokenplane.engine_adapter.engine import EngineInfo, GenerationRequest, SamplingParams
from tokenplane.engine_adapter.sampling import resolve_seed
from tokenplane.engine_adapter.sampling_stops import Detokenize

_NOTHING = np.zeros(1, dtype=np.int32)
_NOTHING.flags.writeable = False
_UNUSED = SamplingParams(max_tokens=1, temperature=0.0)


class Admission:
    """Makes our request of what Megatron's ``add_request`` is given. Used on the engine thread."""

    def __init__(
        self, info: EngineInfo, detokenize: Detokenize | None, tokenize: Callable[[str], Any]
    ) -> None:
        """``tokenize`` gives the ids of a text prompt, or raises."""
        self.hooks = CaptureHooks(info)
        self.callbacks: dict[str, OnTokens] = {}
        """``on_tokens`` by key, for requests that are on their way here."""
        self._info = info
        self._detokenize = detokenize
        self._tokenize = tokenize

    def request(
        self, request_id: int, prompt: Any, params: Any, version: int | None
    ) -> DynamicRequest:
        """Ours for Megatron's ``request_id``. One that is refused has its ``error`` set, and the
        prompt ``[0]`` where its own is unusable. Never raises."""
        wire = getattr(params, WIRE, None)
        key = str(wire["key"]) if wire and "key" in wire else f"engine-{request_id}"
        on_tokens = self.callbacks.pop(key, None)
        prompt, refusal = self.hooks.prepare(prompt, params)
        ids, sampling = _NOTHING, _UNUSED
        try:
            ids = self._ids(prompt)
            sampling = parse_wire(wire)[1] if wire else self._translate(len(ids), params)
            checked = GenerationRequest(key, ids, sampling)
            ids = check_request(
                checked, self._info, has_text=self._detokenize is not None
            ).prompt_token_ids
        except Exception as error:  # noqa: BLE001 - it fails this request alone, never the loop
            refusal = refusal or error
            ids, sampling = _NOTHING, _UNUSED
        request = DynamicRequest(
            key, ids, sampling, self._info, self._detokenize, on_tokens, version
        )
        request.error = refusal
        return request

    def _ids(self, prompt: Any) -> np.ndarray:
        values = self._tokenize(prompt) if isinstance(prompt, str) else prompt
        return np.asarray(values.cpu() if hasattr(values, "cpu") else values)

    def _translate(self, prompt_length: int, given: Any) -> SamplingParams:
        """Megatron's parameters in our spelling: its top-k 1 is greedy, top-p 0 off, -1 no end."""
        room = self._info.max_sequence_length - prompt_length
        wanted = given.num_tokens_to_generate
        if given.num_tokens_total is not None:
            wanted = given.num_tokens_total - prompt_length
        ending = given.termination_id
        return resolve_seed(
            SamplingParams(
                max_tokens=max(1, room if wanted is None else min(wanted, room)),
                temperature=0.0 if given.top_k == 1 else float(given.temperature),
                top_k=0 if given.top_k == 1 else int(given.top_k),
                top_p=float(given.top_p) or 1.0,
                stop_token_ids=() if ending is None or ending < 0 else (int(ending),),
                stop_strings=tuple(given.stop_words or ()),
                ignore_eos=ending is not None,
            )
        )
