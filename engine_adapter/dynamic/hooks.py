"""The two capture hooks of an engine: the prompt preparer before admission, the stager at the end.

Megatron-LM after 0.19.2 has the attributes ``prompt_preparer`` and ``payload_stager`` and calls
them itself; ``install_hooks`` uses those where the engine has them. In 0.19.2 ``HookedEngine``
calls ``CaptureHooks`` from the two methods that it overrides. Both ways see requests that carry
``offload_params``, and in both nothing that a hook raises reaches the engine's loop.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from typing import Any

from tokenplane.capture.hook_types import (
    CONTEXT_KEY,
    FinishedRequestRecord,
    OffloadedRequestPayload,
    RequestPayloadStageResult,
    RequestPromptPreparationResult,
)
from tokenplane.engine_adapter.dynamic.row_evidence import call_context
from tokenplane.engine_adapter.engine import EngineInfo
from tokenplane.engine_adapter.models.megatron_process import quiet_imports
from tokenplane.schemas.errors import ConfigError

with quiet_imports():
    import msgpack  # type: ignore[import-untyped]

_log = logging.getLogger("tokenplane.engine")

OFFLOAD = "offload_params"
"""Attribute of the sampling parameters with what the client wants captured."""
RESPONSE = "response_metadata"
"""Attribute of the reply's sampling parameters with what the stager adds to the response."""
PREPARATION_ERROR = "_request_prompt_preparation_error"
"""Megatron's key of a preparation that failed."""
_NUMBER = "tokenplane_offload"
_NATIVE = ("prompt_preparer", "payload_stager")
_TYPES_MODULE = "megatron.core.inference.inference_request"


class CaptureHooks:
    """The hooks that 0.19.2's engine lacks; without any installed, both calls cost nothing."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self.preparer: Any = None
        self.stager: Any = None
        self._offload: dict[int, dict[str, Any]] = {}
        """What the preparer left for the stager, by a number that the sampling parameters carry:
        it need not be serializable, so it cannot travel in them."""
        self._numbers = itertools.count()

    def prepare(self, prompt: Any, params: Any) -> tuple[Any, Exception | None]:
        """The prompt to admit, or why the request must be refused."""
        offload = getattr(params, OFFLOAD, None)
        if self.preparer is None or not offload:
            return prompt, None
        try:
            result = self.preparer.prepare_prompt(prompt, offload_params=dict(offload))
            prepared, left = result.prompt, result.offload_params or {}
        except Exception as error:  # noqa: BLE001 - it fails this request alone, never the loop
            params.add_attributes({OFFLOAD: {**offload, PREPARATION_ERROR: str(error)}})
            return prompt, error
        number = next(self._numbers)
        params.add_attributes({_NUMBER: number})
        self._offload[number] = left
        return prepared, None

    def forget(self, record: Any) -> dict[str, Any] | None:
        """What the preparer left for a request, for the last time."""
        number = getattr(record.requests[0].sampling_params, _NUMBER, -1)
        return self._offload.pop(number, None)

    def stage(self, request: Any, record: Any) -> dict[str, Any]:
        """Attributes for the reply of a completed request; empty for ordinary traffic."""
        params = record.requests[0].sampling_params
        offload = getattr(params, OFFLOAD, None)
        kept = self.forget(record)
        if self.stager is None or not offload:
            return {}
        tokens = [token for inner in record.requests for token in inner.generated_tokens]
        log_probs = [value for inner in record.requests for value in inner.generated_log_probs]
        payload = OffloadedRequestPayload(
            prompt_token_ids=request.prompt,
            generated_token_ids=tokens,
            generated_log_probs=log_probs,
            routing_indices=None if request.num_evictions else record.requests[0].routing_indices,
        )
        metadata = FinishedRequestRecord(
            policy_epoch=request.epochs.policy,
            kv_cache_epoch=request.epochs.kv,
            num_evictions=request.num_evictions,
        )
        told = {CONTEXT_KEY: call_context(request, self._info)} | (kept or offload)
        result = guarded_stage(self.stager, request.key, payload, metadata, told)
        return {} if result is None else {RESPONSE: result.response_metadata}


class NativePreparer:
    """Our preparer with the types that Megatron's own hook returns."""

    def __init__(self, preparer: Any, result_type: Any) -> None:
        self._preparer = preparer
        self._result_type = result_type

    def prepare_prompt(self, prompt: Any, *, offload_params: dict[str, Any] | None = None) -> Any:
        """What it raises is Megatron's to handle: it fails the request alone."""
        result = self._preparer.prepare_prompt(prompt, offload_params=offload_params)
        ids = result.prompt.tolist() if hasattr(result.prompt, "tolist") else result.prompt
        return self._result_type(prompt=ids, offload_params=result.offload_params)


class NativeStager:
    """Our stager with Megatron's result type; never raises, since nothing guards its call there."""

    def __init__(self, stager: Any, result_type: Any) -> None:
        self._stager = stager
        self._result_type = result_type

    def stage(
        self,
        uid: str,
        payload: Any,
        *,
        finished_metadata: Any,
        offload_params: dict[str, Any] | None = None,
    ) -> Any:
        """None for ordinary traffic, whose payload then stays on the reply."""
        result = guarded_stage(self._stager, uid, payload, finished_metadata, offload_params)
        if result is None:
            return None
        return self._result_type(response_metadata=result.response_metadata)


def install_hooks(engine: Any, *, preparer: Any, stager: Any) -> str:
    """Install both hooks; says how: "native" (Megatron calls them) or "override" (we do).

    Raises: ConfigError for an engine that offers neither, or if hooks are installed already.
    """
    if all(hasattr(engine, name) for name in _NATIVE):
        if engine.prompt_preparer is not None or engine.payload_stager is not None:
            raise ConfigError("the engine has capture hooks already")
        types = _native_types()
        engine.prompt_preparer = NativePreparer(preparer, types[0])
        engine.payload_stager = NativeStager(stager, types[1])
        return "native"
    hooks = getattr(engine, "hooks", None)
    if not isinstance(hooks, CaptureHooks):
        raise ConfigError("this engine offers no capture hooks", got=type(engine).__name__)
    if hooks.preparer is not None or hooks.stager is not None:
        raise ConfigError("the engine has capture hooks already")
    hooks.preparer, hooks.stager = preparer, stager
    return "override"


def guarded_stage(
    stager: Any, uid: str, payload: Any, metadata: Any, offload: dict[str, Any] | None
) -> RequestPayloadStageResult | None:
    """The stager's result; a request whose stager raised, or gave what no reply can carry, is
    answered, uncaptured, with the reason in the log and in its response."""
    try:
        result = stager.stage(uid, payload, finished_metadata=metadata, offload_params=offload)
        if result is None:
            return None
        msgpack.packb(result.response_metadata)  # the reply's own form; it would fail in the loop
        return RequestPayloadStageResult(dict(result.response_metadata))
    except Exception as error:  # noqa: BLE001 - capture never fails a completion (invariant 3)
        _log.exception("the payload stager raised for %s", uid)
        return RequestPayloadStageResult({"ng_capture_error": f"{type(error).__name__}: {error}"})


def _native_types() -> tuple[Any, Any]:
    """Megatron's own result types, or ours where it leaves them to the caller."""
    module = importlib.import_module(_TYPES_MODULE)
    return (
        getattr(module, "RequestPromptPreparationResult", RequestPromptPreparationResult),
        getattr(module, "RequestPayloadStageResult", RequestPayloadStageResult),
    )
