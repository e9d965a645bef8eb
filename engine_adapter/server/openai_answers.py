"""The OpenAI objects that are served: completions, their chunks, and no token field in any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenplane.engine_adapter.call_path.call_types import ChatPrompt, ModelCall
from tokenplane.engine_adapter.chat.text import AnswerText
from tokenplane.engine_adapter.chat.tool_calls import (
    ParsedMessage,
    ToolCallParser,
    mint_call_id,
    split_reasoning,
)
from tokenplane.engine_adapter.engine import GenerationResult

Json = dict[str, Any]


class AnswerBuilder:
    """Builds the served object of one model's answers. Thread-safe.

    Args:
        split_thoughts: serve what stands in ``<think>`` as ``reasoning_content``. NeMo-Gym
            expects it in the content unless it is told otherwise (CONTRACT section 17).
    """

    def __init__(self, text: AnswerText, parser: ToolCallParser, *, split_thoughts: bool) -> None:
        self.text = text
        self._parser = parser
        self.split_thoughts = split_thoughts

    def build(self, call: ModelCall, result: GenerationResult) -> Json:
        """The ``chat.completion`` or ``text_completion`` object."""
        keep = self._parser.markers if call.parse_tools else frozenset[str]()
        stop = result.stop_reason if isinstance(result.stop_reason, str) else None
        text = self.text.decode(result.generated_token_ids.tolist(), keep=keep, stop=stop)
        prompt_tokens = len(result.prompt_token_ids)
        generated = len(result.generated_token_ids)
        chat = isinstance(call.prompt, ChatPrompt)
        return {
            "id": call.answer_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": call.created,
            "model": call.model,
            "choices": [self._chat(call, result, text) if chat else self._bare(call, result, text)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": prompt_tokens + generated,
            },
        }

    def _chat(self, call: ModelCall, result: GenerationResult, text: str) -> Json:
        parsed = self._parse(call, text)
        message: Json = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {
                    "id": mint_call_id(call.response_id, index, self._parser.id_length),
                    "type": "function",
                    "function": {"name": made.name, "arguments": made.arguments},
                }
                for index, made in enumerate(parsed.tool_calls)
            ]
        # A call that is cut off is no call, so what has calls and stopped, stopped to call.
        calls = parsed.tool_calls and result.finish_reason == "stop"
        log_probs = {"content": self._chat_log_probs(result)} if call.log_probs else None
        return {
            "index": 0,
            "message": message,
            "logprobs": log_probs,
            "finish_reason": "tool_calls" if calls else result.finish_reason,
        }

    def _parse(self, call: ModelCall, text: str) -> ParsedMessage:
        reasoning, rest = split_reasoning(text) if self.split_thoughts else (None, text)
        if not call.parse_tools:
            return ParsedMessage(rest, reasoning=reasoning)
        parsed = self._parser.parse(rest)
        return ParsedMessage(parsed.content, parsed.tool_calls, reasoning)

    def _bare(self, call: ModelCall, result: GenerationResult, text: str) -> Json:
        log_probs: Json | None = None
        if call.log_probs:
            log_probs = {
                "tokens": [self.text.token_text(i) for i in result.generated_token_ids.tolist()],
                "token_logprobs": result.generated_log_probs.tolist(),
                "top_logprobs": None,
            }
        return {
            "index": 0,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": result.finish_reason,
        }

    def _chat_log_probs(self, result: GenerationResult) -> list[Json]:
        """One entry per sampled token, the terminator included; texts, never ids."""
        pairs = zip(
            result.generated_token_ids.tolist(), result.generated_log_probs.tolist(), strict=True
        )
        return [
            {
                "token": self.text.token_text(token),
                "logprob": value,
                "bytes": None,
                "top_logprobs": [],
            }
            for token, value in pairs
        ]


def chat_chunk(answer_id: str, created: int, model: str, delta: Json) -> Json:
    """One ``chat.completion.chunk`` that adds ``delta``."""
    return {
        "id": answer_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
    }


def text_chunk(answer_id: str, created: int, model: str, text: str) -> Json:
    """One ``text_completion`` chunk that adds ``text``."""
    return {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}],
    }


def closing_chunks(body: Json, rest: str, *, include_usage: bool) -> Iterator[Json]:
    """The chunks that follow the streamed text: its rest, the calls, the finish, the usage.

    Args:
        body: the whole served object.
        rest: content that no chunk has brought yet.
    """
    choice = body["choices"][0]
    names = (body["id"], body["created"], body["model"])
    if body["object"] == "chat.completion":
        message = choice["message"]
        deltas: list[Json] = []
        if "reasoning_content" in message:
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if rest:
            deltas.append({"content": rest})
        if "tool_calls" in message:
            deltas.append({"tool_calls": _indexed(message["tool_calls"])})
        yield from (chat_chunk(*names, delta) for delta in deltas)
        last = chat_chunk(*names, {})
    else:
        last = text_chunk(*names, rest)
    last["choices"][0] |= {"finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
    yield last
    if include_usage:
        yield {**last, "choices": [], "usage": body["usage"]}


def _indexed(calls: Sequence[Json]) -> list[Json]:
    return [{"index": index, **made} for index, made in enumerate(calls)]


def content_of(body: Json) -> str:
    """The text that a whole served object carries."""
    choice = body["choices"][0]
    content = choice["message"]["content"] if "message" in choice else choice["text"]
    return str(content or "")
