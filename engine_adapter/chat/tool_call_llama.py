"""Tool calls as Llama 3 writes them: bare JSON with ``parameters``, or a list of Python calls."""

from __future__ import annotations

import ast
import json
from typing import Any

from tokenplane.engine_adapter.chat.tool_call_parts import (
    ParsedMessage,
    ToolCall,
    plain,
    read_call,
    skip_space,
    with_calls,
)

_TAG = "<|python_tag|>"


class LlamaJsonParser:
    """JSON objects, divided by ``;`` or white space, that are the whole answer (or what follows
    ``<|python_tag|>``)."""

    name = "llama3_json"
    markers = frozenset({_TAG})
    id_length: int | None = None

    def parse(self, text: str) -> ParsedMessage:
        """See ``ToolCallParser``."""
        before, tag, after = text.partition(_TAG)
        source = after if tag else text
        calls, at = [], skip_space(source, 0)
        try:
            while at < len(source):
                call, at = read_call(source, at, "parameters", "arguments")
                calls.append(call)
                at = skip_space(source, at)
                if source.startswith(";", at):
                    at = skip_space(source, at + 1)
        except ValueError:
            return plain(text.replace(_TAG, ""))
        return with_calls([before] if tag else [], calls, text.replace(_TAG, ""))


class PythonicParser:
    """``[name(key=value, ...), ...]`` with literal values, as the whole answer."""

    name = "pythonic"
    markers = frozenset({_TAG})
    id_length: int | None = None

    def parse(self, text: str) -> ParsedMessage:
        """See ``ToolCallParser``."""
        source = text.replace(_TAG, "")
        try:
            calls = _python_calls(source.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return plain(source)
        return with_calls([], calls, source)


def _python_calls(source: str) -> list[ToolCall]:
    if not source.startswith("["):
        raise ValueError("no list")
    tree = ast.parse(source, mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    return [_python_call(node) for node in tree.elts]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("no plain named argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError("an argument is no JSON") from error
    return ToolCall(_dotted(node.func), text)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("no name")
