"""The demo's agent: an ordinary ``openai`` client with a calculator, and a refit in mid-answer."""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, OpenAIError

from tokenplane.schemas.errors import EngineError

if TYPE_CHECKING:
    from tokenplane.tools.demo.server import DemoServer

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates one arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
TASKS = (
    ("What is 12 * 7? Show the calculation.", "Now subtract 4 from that.", "Is that even or odd?"),
    ("How much is 15 + 27? Explain.", "Multiply it by 2.", "Say the result in words."),
)
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_EXPRESSION = re.compile(r"\d[\d.]*(?:\s*[-+*/]\s*\d[\d.]*)+")
_REFIT_POLL_S = 0.01
_TEMPERATURE = 0.7
_HEADER = "x-tokenplane-capture"


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it; never raises."""
    try:
        return f"{_value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return f"cannot calculate {expression[:40]!r}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no arithmetic")


def calculate_within(*texts: str) -> str:
    """The tool run on free text: the first calculation in the first text that has one."""
    found = next(filter(None, map(_EXPRESSION.search, texts)), None)
    if found is None:
        return "there is nothing to calculate"
    return f"{found[0]} = {calculate(found[0])}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered call, as the agent knows it."""

    response_id: str
    capture: str
    """What the server said became of the row: ``staged`` where all is well."""


@dataclass(slots=True)
class Agent:
    """One rollout. All it knows of tokenplane is the ``base_url`` of its client."""

    client: AsyncOpenAI
    model: str
    questions: tuple[str, ...]
    max_tokens: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    async def take_turn(self) -> Turn:
        """Ask, run the tool on whatever comes back, and keep both for the next turn.

        Raises:
            EngineError: the server refused the turn or did not answer.
        """
        if not self.messages:
            self.messages.append({"role": "user", "content": self.questions[0]})
        messages: Any = self.messages
        tools: Any = [CALCULATOR]
        try:
            raw = await self.client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=messages,
                tools=tools,
                max_tokens=self.max_tokens,
                temperature=_TEMPERATURE,
            )
        except OpenAIError as error:
            raise EngineError(f"a turn got no answer: {error}") from error
        completion = raw.parse()
        answer = completion.choices[0].message
        self.messages.append(answer.model_dump(include={"role", "content", "tool_calls"}))
        following = self.questions[min(len(self.turns) + 1, len(self.questions) - 1)]
        if answer.tool_calls:
            for call in answer.tool_calls:
                result = _run(call.model_dump())
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        else:
            # A model that calls no tool: the agent runs it on the text and reports as the user.
            del self.messages[-1]["tool_calls"]
            result = calculate_within(answer.content or "", self.questions[0])
            self.messages.append(
                {"role": "user", "content": f"The calculator says: {result}. {following}"}
            )
        self.turns.append(Turn(completion.id, raw.headers.get(_HEADER, "off")))
        return self.turns[-1]


def _run(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    if function.get("name") != "calculator":
        return f"there is no tool {function.get('name')!r}"
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        return "the arguments are no JSON"
    expression = arguments.get("expression") if isinstance(arguments, dict) else None
    return calculate(str(expression))


async def refit_in_flight(server: DemoServer, version: int, scale: float) -> None:
    """Change the weights while some request has sampled a part of its answer and not the rest.

    Whether a request is in that state can only be seen while the engine stands still: it is paused
    between two steps, twice, until a request sampled between the two and lives on. Waits for ever:
    cancel it when nothing will run any more.
    """
    before: dict[str, int] | None = None
    while True:
        if before is None and not (await _stats(server))["live_requests"]:
            await asyncio.sleep(_REFIT_POLL_S)
            continue
        await asyncio.to_thread(server.post, "/admin/pause", {})
        try:
            now = await _stats(server)
            if before is not None and _decoding(before, now):
                body = {"scale": scale, "version": version}
                await asyncio.to_thread(server.post, "/admin/perturb_weights", body)
                return
        finally:
            await asyncio.to_thread(server.post, "/admin/resume", {})
        before = now if now["live_requests"] else None


async def _stats(server: DemoServer) -> dict[str, int]:
    status = await asyncio.to_thread(server.get, "/admin/status")
    stats: dict[str, int] = status["engine_stats"]
    return stats


def _decoding(before: dict[str, int], now: dict[str, int]) -> bool:
    """True if a request that was live before is live now and has sampled in between.

    Nothing may have ended meanwhile: the tokens might have been its last.
    """
    ended = ("finished_requests", "failed_requests", "cancelled_requests")
    return (
        before["live_requests"] >= 1
        and now["live_requests"] >= 1
        and all(before[name] == now[name] for name in ended)
        and now["generated_tokens"] > before["generated_tokens"]
    )
