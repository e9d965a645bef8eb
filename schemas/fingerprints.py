"""Conversation fingerprints: how a history is matched to staged calls (CONTRACT section 11)."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from tokenplane.schemas.errors import InvalidRecordError

FINGERPRINT_VERSION = 2
ASSISTANT_TAG = b"nemo-gym-lineage"
CONTEXT_TAG = b"nemo-gym-lineage-context"
ENVELOPE_ROLE = "_ng_request_envelope"

Item = Mapping[str, Any]
_TEXT_TYPES = ("", "text", "input_text", "output_text")
_SKIPPED_TYPES = ("tool_use", "tool_result")


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, UTF-8 unescaped, orjson's float text.

    Raises:
        InvalidRecordError: not representable as JSON.
    """
    try:
        data: bytes = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        return data.decode("utf-8")
    except (TypeError, ValueError) as exc:
        raise InvalidRecordError("not representable as canonical JSON") from exc


def canonical_arguments(value: Any) -> str:
    """Tool-call arguments so that equal calls compare equal: JSON with sorted keys.

    A string that is not JSON is only stripped.

    Raises:
        InvalidRecordError: JSON that has no canonical form (an integer beyond 64 bits, say).
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return canonical_json(value)
    try:
        parsed = json.loads(value)
    except ValueError:
        return value.strip()
    except RecursionError as exc:
        raise InvalidRecordError("tool arguments are nested too deeply") from exc
    return canonical_json(parsed)


def content_parts(item: Item) -> list[tuple[str, str]]:
    """(type, payload) of each content block that is neither empty text nor a tool block.

    Raises:
        InvalidRecordError: a block without a type, or content of another kind.
    """
    content = item.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [("text", content)] if content else []
    if not isinstance(content, (list, tuple)):
        raise InvalidRecordError("content must be null, text or blocks", got=type(content).__name__)
    parts = []
    for block in content:
        if isinstance(block, str):
            if block:
                parts.append(("text", block))
            continue
        if not isinstance(block, Mapping):
            raise InvalidRecordError("a content block must be an object", got=type(block).__name__)
        kind = str(block.get("type") or "")
        if kind in _SKIPPED_TYPES:
            continue
        if kind in _TEXT_TYPES and isinstance(block.get("text"), str):
            if block["text"]:
                parts.append(("text", block["text"]))
        elif kind:
            parts.append((kind, canonical_json(dict(block))))
        else:
            raise InvalidRecordError("a content block must have a type")
    return parts


def _blocks(item: Item, kind: str) -> Iterable[Item]:
    content = item.get("content")
    if isinstance(content, (list, tuple)):
        for block in content:
            if isinstance(block, Mapping) and block.get("type") == kind:
                yield block


def tool_calls(item: Item) -> list[tuple[str, str, str]]:
    """(id, name, canonical arguments) of every tool call of one item, whatever its dialect.

    A null name counts as the text ``None``: that is how the other side of the contract hashes it.

    Raises:
        InvalidRecordError: ``chat.tool_calls`` is no list of objects, or arguments are no JSON.
    """
    calls = []
    if item.get("type") == "function_call":
        name = str(item.get("name", ""))
        if item.get("namespace"):
            name = f"{item['namespace']}__{name}"
        ident = item.get("call_id") or item.get("id") or ""
        calls.append((str(ident), name, canonical_arguments(item.get("arguments"))))
    calls.extend(
        (
            str(block.get("id") or ""),
            str(block.get("name", "")),
            canonical_arguments(block.get("input")),
        )
        for block in _blocks(item, "tool_use")
    )
    listed = item.get("tool_calls") or ()
    if not isinstance(listed, (list, tuple)):
        raise InvalidRecordError("tool_calls must be a list", got=type(listed).__name__)
    for entry in listed:
        call = _object(entry, "a tool call")
        function = _object(call.get("function"), "a tool call's function")
        calls.append(
            (
                str(call.get("id") or ""),
                str(function.get("name", "")),
                canonical_arguments(function.get("arguments")),
            )
        )
    return calls


def _object(value: object, name: str) -> Item:
    """``value`` as an object; anything falsy counts as an empty one."""
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRecordError(f"{name} must be an object", got=type(value).__name__)
    return value


def tool_results(item: Item) -> list[tuple[str, str]]:
    """(call id, output text) of every tool result of one item, whatever its dialect."""
    results = []
    if item.get("type") == "function_call_output":
        ident = item.get("call_id") or item.get("id") or ""
        results.append((str(ident), _result_text(item.get("output"))))
    elif item.get("role") == "tool":
        results.append((str(item.get("tool_call_id") or ""), _result_text(item.get("content"))))
    for block in _blocks(item, "tool_result"):
        ident = block.get("tool_use_id") or block.get("id") or ""
        results.append((str(ident), _result_text(block.get("content"))))
    return results


def _result_text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


class _Hasher:
    def __init__(self, tag: bytes) -> None:
        self._state = hashlib.sha256(tag)

    def add(self, tag: int, value: str) -> None:
        try:
            data = value.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise InvalidRecordError("text is not encodable as UTF-8") from exc
        self._state.update(bytes([tag]) + struct.pack(">Q", len(data)) + data)

    def add_all(self, first_tag: int, rows: Iterable[Sequence[str]]) -> None:
        for row in rows:
            for offset, value in enumerate(row):
                self.add(first_tag + offset, value)

    def hexdigest(self) -> str:
        return self._state.hexdigest()


def _check_item(item: object) -> None:
    if not isinstance(item, Mapping):
        raise InvalidRecordError("a message must be an object", got=type(item).__name__)


def is_assistant(item: Item) -> bool:
    """True for what a model wrote: role ``assistant`` or a Responses ``function_call``."""
    return item.get("role") == "assistant" or item.get("type") == "function_call"


def assistant_fingerprint(items: Iterable[Item]) -> str:
    """Hash of the model-authored turns only; ``""`` when there is none. Reasoning never counts."""
    state, seen = _Hasher(ASSISTANT_TAG), False
    for item in items:
        _check_item(item)
        if is_assistant(item):
            seen = True
            state.add_all(0, content_parts(item))
            state.add_all(2, tool_calls(item))
    return state.hexdigest() if seen else ""


def conversation_digest(items: Iterable[Item]) -> str:
    """Hash of every turn: role, parts, tool calls and tool results."""
    state = _Hasher(CONTEXT_TAG)
    for item in items:
        _check_item(item)
        _add_turn(state, item)
    return state.hexdigest()


def _add_turn(state: _Hasher, item: Item) -> None:
    state.add(0, str(item.get("role") or item.get("type") or ""))
    state.add_all(1, content_parts(item))
    state.add_all(3, tool_calls(item))
    state.add_all(6, tool_results(item))


def request_envelope(**settings: Any) -> list[Item]:
    """The pseudo item that stands before the messages for settings that shape the prompt.

    Nothing is added when all are falsy; otherwise every setting is written, falsy ones too, as Gym
    does for ``instructions`` and ``tools`` (CONTRACT section 10).
    """
    if not any(settings.values()):
        return []
    return [{"role": ENVELOPE_ROLE, "content": json.dumps(settings, sort_keys=True)}]
