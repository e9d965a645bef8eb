"""A request's body and headers as one checked ``ModelCall``."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tokenplane.capture.hook_types import ADMISSION_KEY
from tokenplane.engine_adapter.call_path.call_types import (
    ChatPrompt,
    CompletionPrompt,
    GymCapture,
    ModelCall,
    StandaloneCapture,
)
from tokenplane.engine_adapter.chat.messages import parse_messages, parse_tools
from tokenplane.engine_adapter.server.openai_fields import (
    COMMON_FIELDS,
    Body,
    read_bool,
    read_int,
    read_object,
    read_text,
    refuse_unsupported,
    rejected,
)
from tokenplane.engine_adapter.server.openai_sampling import SamplingDefaults, parse_sampling
from tokenplane.schemas.errors import PrefixError, RequestRejectedError
from tokenplane.schemas.tokens import to_token_ids

OFFLOAD_KEY = "offload_params"
INLINE_PREFIX_KEY = "required_prefix_token_ids"
IDEMPOTENCY_HEADERS = ("idempotency-key", "x-tokenplane-request-id")
PARENT_HEADER = "x-tokenplane-parent"
_MAX_HEADER = 512

_CHAT_FIELDS = COMMON_FIELDS | {
    ADMISSION_KEY,
    "chat_template_kwargs",
    INLINE_PREFIX_KEY,
    "messages",
    OFFLOAD_KEY,
    "tools",
}
_COMPLETION_FIELDS = COMMON_FIELDS | {"prompt"}
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Parameters of transformers' ``apply_chat_template`` itself."""
_WRITABLE_DEPTH = 254
"""As deep as orjson writes; it reads 1024."""
_MARGIN = 22
MAX_DEPTH = _WRITABLE_DEPTH - _MARGIN
"""Most levels of objects and lists in a body, itself included."""
_TRANSPORT_FIELDS = ("stream", "stream_options")
"""They shape how the answer travels, not the answer: a retry may differ in them."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request: the call, and how its answer is to travel."""

    call: ModelCall
    stream: bool
    include_usage: bool


class RequestParser:
    """Parses the requests of one server. Stateless.

    Args:
        model_names: names that a request may use; the first stands for an absent one.
    """

    def __init__(self, model_names: Collection[str], defaults: SamplingDefaults) -> None:
        self._names = tuple(model_names)
        self._defaults = defaults

    def chat(self, raw: bytes, headers: Mapping[str, str], rollout_id: str | None) -> ParsedRequest:
        """``/v1/chat/completions``.

        Raises:
            RequestRejectedError: a field is malformed, out of range or unsupported.
            PrefixError: the inline prefix contradicts the admission's.
        """
        body = _parse_json(raw)
        refuse_unsupported(body, _CHAT_FIELDS)
        prompt = ChatPrompt(
            messages=parse_messages(body.get("messages")),
            tools=parse_tools(body.get("tools")),
            template_kwargs=_template_kwargs(body),
        )
        if read_int(body, "top_logprobs"):
            raise rejected("top_logprobs", "is not supported above 0", got=body["top_logprobs"])
        gym = _gym_capture(body)
        stream = read_bool(body, "stream")
        if gym is not None and rollout_id is not None:
            raise rejected(ADMISSION_KEY, "and a rollout in the URL exclude each other")
        if gym is not None and stream:
            raise rejected("stream", "is not supported with a capture admission")
        call = ModelCall(
            prompt=prompt,
            sampling=parse_sampling(body, self._defaults),
            model=self._model(body),
            capture=gym or _standalone(body, headers, rollout_id),
            parse_tools=prompt.tools is not None and body.get("tool_choice") != "none",
            log_probs=read_bool(body, "logprobs") and gym is None,
        )
        return ParsedRequest(call, stream, _include_usage(body))

    def completion(
        self, raw: bytes, headers: Mapping[str, str], rollout_id: str | None
    ) -> ParsedRequest:
        """``/v1/completions``: one text or one token prompt.

        Raises:
            RequestRejectedError: a field is malformed, out of range or unsupported.
        """
        body = _parse_json(raw)
        refuse_unsupported(body, _COMPLETION_FIELDS)
        if ADMISSION_KEY in body or OFFLOAD_KEY in body:
            raise rejected(ADMISSION_KEY, "is served by chat completions only")
        log_probs = read_int(body, "logprobs")
        if log_probs:
            raise rejected("logprobs", "above 0 are not supported", got=log_probs)
        call = ModelCall(
            prompt=_completion_prompt(body.get("prompt")),
            sampling=parse_sampling(body, self._defaults),
            model=self._model(body),
            capture=_standalone(body, headers, rollout_id),
            log_probs=log_probs is not None,
        )
        return ParsedRequest(call, read_bool(body, "stream"), _include_usage(body))

    def _model(self, body: Body) -> str:
        name = read_text(body, "model")
        if name is None:
            return self._names[0]
        if name not in self._names:
            # Not 404: NeMo-Gym would send it again (CONTRACT section 13).
            raise rejected(
                "model",
                "is not served here",
                expected=" or ".join(self._names),
                got=name,
                code="model_not_found",
            )
        return name


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise RequestRejectedError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestRejectedError("the body must be a JSON object", code="invalid_json")
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
        _check_depth(body)
    return body


def _check_depth(body: dict[str, Any]) -> None:
    """Refuse what reads but cannot be written again: digests and templates nest it even deeper."""
    value = body
    for _ in range(_MARGIN):
        value = {"": value}
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise RequestRejectedError(
            "the body is nested too deeply", code="invalid_json", expected=f"<= {MAX_DEPTH} levels"
        ) from error


def _template_kwargs(body: Body) -> dict[str, Any]:
    """Variables for the template; nothing that would replace the template or skip it."""
    given = read_object(body, "chat_template_kwargs") or {}
    reserved = sorted(_RESERVED_KWARGS & given.keys())
    if reserved:
        raise rejected("chat_template_kwargs", "holds names that are no variables", got=reserved)
    return given


def _gym_capture(body: Body) -> GymCapture | None:
    """The admission, from ``offload_params`` (megatron_worker) or the top level (vllm_worker)."""
    offload = read_object(body, OFFLOAD_KEY) or {}
    private = sorted(name for name in offload if name.startswith("_"))
    if private:
        raise rejected(OFFLOAD_KEY, "must not hold keys that start with _", got=private)
    inline = body.get(INLINE_PREFIX_KEY)
    if ADMISSION_KEY in offload:
        if ADMISSION_KEY in body or inline:
            raise rejected(ADMISSION_KEY, f"stands at the top level and in {OFFLOAD_KEY}")
        rest = {name: value for name, value in offload.items() if name != ADMISSION_KEY}
        return GymCapture(offload[ADMISSION_KEY], rest)
    if ADMISSION_KEY not in body:
        if inline:
            raise rejected(INLINE_PREFIX_KEY, f"needs {ADMISSION_KEY}")
        return None
    admission = body[ADMISSION_KEY]
    if inline and isinstance(admission, dict):
        admission = _with_inline_prefix(admission, inline)
    return GymCapture(admission, offload)


def _with_inline_prefix(admission: dict[str, Any], inline: Any) -> dict[str, Any]:
    own = admission.get(INLINE_PREFIX_KEY)
    if own and own != inline:
        raise PrefixError(
            "the request's inline prefix is another than the admission's",
            code="prefix_inline_mismatch",
        )
    return {**admission, INLINE_PREFIX_KEY: inline}


def _standalone(
    body: Body, headers: Mapping[str, str], rollout_id: str | None
) -> StandaloneCapture | None:
    if rollout_id is None:
        return None
    keys = [value for name in IDEMPOTENCY_HEADERS if (value := headers.get(name))]
    parent = headers.get(PARENT_HEADER) or None
    for value in [*keys, *([parent] if parent else [])]:
        if len(value) > _MAX_HEADER:
            raise RequestRejectedError(f"a header is longer than {_MAX_HEADER} characters")
    if len(set(keys)) > 1:
        raise RequestRejectedError(
            "two different idempotency keys", expected=" or ".join(IDEMPOTENCY_HEADERS)
        )
    return StandaloneCapture(
        rollout_id=rollout_id,
        idempotency_key=keys[0] if keys else None,
        request_digest=_digest(body),
        parent_response_id=parent,
    )


def _digest(body: Body) -> str:
    kept = {name: value for name, value in body.items() if name not in _TRANSPORT_FIELDS}
    return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _completion_prompt(value: Any) -> CompletionPrompt:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]  # a batch of one
    if isinstance(value, str) and value:
        return CompletionPrompt(text=value)
    if isinstance(value, list) and value and set(map(type, value)) <= {int}:
        try:
            return CompletionPrompt(token_ids=to_token_ids(value, name="prompt"))
        except ValueError as error:
            raise RequestRejectedError(str(error), key="prompt") from error
    raise rejected("prompt", "is malformed", expected="one text, or one list of token ids")


def _include_usage(body: Body) -> bool:
    return read_bool(read_object(body, "stream_options") or {}, "include_usage")
