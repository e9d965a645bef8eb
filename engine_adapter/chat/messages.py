"""The messages and tools of a chat request, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenplane.engine_adapter.server.openai_fields import rejected
from tokenplane.schemas.errors import RequestRejectedError

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """The conversation as templates and the ledger see it.

    Null members are left out, because templates ask whether a key is there and clients send every
    key; the content of an assistant message that only calls tools stays None.

    Raises:
        RequestRejectedError: no conversation, or ``unsupported_media`` for a part that is no text.
    """
    if not isinstance(value, list) or not value:
        raise rejected("messages", "must be a non-empty list")
    return [_parse_message(message, f"messages[{at}]") for at, message in enumerate(value)]


def _parse_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(where, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise _bad(f"{where}.role", "is unknown", expected=" or ".join(ROLES), got=role)
    parsed = {name: member for name, member in message.items() if member is not None}
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            _check_part(part, f"{where}.content")
    elif content is not None and not isinstance(content, str):
        raise _bad(
            f"{where}.content", "must be text or a list of parts", got=type(content).__name__
        )
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(calls, f"{where}.tool_calls")
    if not calls:
        parsed.pop("tool_calls", None)
    if content is None:
        if role != "assistant":
            raise _bad(f"{where}.content", "is missing")
        parsed["content"] = None if calls else ""
    return parsed


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, Mapping):
        raise _bad(where, "must hold objects", got=type(part).__name__)
    if part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        # Invariant 3: media that cannot be captured is refused before anything is generated.
        raise RequestRejectedError(
            f"{where} holds a part that is no text",
            code="unsupported_media",
            key="messages",
            expected="parts of type text",
            got=repr(part.get("type"))[:80],
        )


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise _bad(where, "must be a list", got=type(calls).__name__)
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _bad(where, "must hold function calls with a name")


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's form, or None where there is none.

    Raises:
        RequestRejectedError: not a list of function tools.
    """
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise rejected("tools", "must be a list", got=value)
    for tool in value:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not named or tool.get("type", "function") != "function":
            raise rejected("tools", "must hold function tools with a name", got=tool)
    return value


def _bad(where: str, problem: str, **context: object) -> RequestRejectedError:
    shown = {name: repr(value)[:120] for name, value in context.items()}
    return RequestRejectedError(f"{where} {problem}", key="messages", **shown)
