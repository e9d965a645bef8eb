"""Agents of the three dialects: a conversation, the tool that the model calls, and on."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import httpx

from tests.interop.gym_process import GymModelServer

SYSTEM = "You add numbers with the tool."
_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}


class Agent(ABC):
    """One rollout. ``ask`` and ``finish_tools`` each make one model call."""

    dialect: ClassVar[str]

    def __init__(self, gym: GymModelServer, rollout: str, **sampling: Any) -> None:
        self._gym = gym
        self.rollout = rollout
        self._sampling = sampling
        self.items: list[dict[str, Any]] = []
        self.replies: list[dict[str, Any]] = []
        """Every answer as it came."""

    async def ask(self, text: str) -> dict[str, Any]:
        """A user turn and the model's answer."""
        self.items.append({"role": "user", "content": text})
        return await self.call()

    async def call(self) -> dict[str, Any]:
        """The answer to the conversation as it stands, which is appended to it."""
        reply = await self.send()
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        self.replies.append(answer)
        self._take(answer)
        return answer

    async def send(self) -> httpx.Response:
        """The conversation, sent; nothing is kept of the reply."""
        return await self._gym.ask(self.rollout, self.dialect, self._body() | self._sampling)

    async def finish_tools(self) -> dict[str, Any]:
        """Run every tool that the last answer called, and the next answer."""
        calls = self._calls(self.replies[-1])
        assert calls, self.replies[-1]
        self._give([(ident, str(sum(values.values()))) for ident, values in calls])
        return await self.call()

    @abstractmethod
    def _body(self) -> dict[str, Any]: ...

    @abstractmethod
    def _take(self, answer: dict[str, Any]) -> None: ...

    @abstractmethod
    def _calls(self, answer: dict[str, Any]) -> list[tuple[str, dict[str, float]]]: ...

    @abstractmethod
    def _give(self, results: list[tuple[str, str]]) -> None: ...


class ChatAgent(Agent):
    """``chat/completions``."""

    dialect = "chat/completions"

    def _body(self) -> dict[str, Any]:
        function = {"name": "add", "description": "Add.", "parameters": _PARAMETERS}
        return {
            "messages": [{"role": "system", "content": SYSTEM}, *self.items],
            "tools": [{"type": "function", "function": function}],
        }

    def _take(self, answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        self.items.append({name: value for name, value in message.items() if value is not None})

    def _calls(self, answer: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        return [(call["id"], json.loads(call["function"]["arguments"])) for call in calls]

    def _give(self, results: list[tuple[str, str]]) -> None:
        for ident, text in results:
            self.items.append({"role": "tool", "tool_call_id": ident, "content": text})


class ResponsesAgent(Agent):
    """``responses``, with items and no state at the server."""

    dialect = "responses"

    def _body(self) -> dict[str, Any]:
        tool = {
            "type": "function",
            "name": "add",
            "description": "Add.",
            "parameters": _PARAMETERS,
            "strict": False,
        }
        return {
            "input": [{"role": "system", "content": SYSTEM}, *self.items],
            "tools": [tool],
        }

    def _take(self, answer: dict[str, Any]) -> None:
        self.items += answer["output"]

    def _calls(self, answer: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
        return [
            (item["call_id"], json.loads(item["arguments"]))
            for item in answer["output"]
            if item["type"] == "function_call"
        ]

    def _give(self, results: list[tuple[str, str]]) -> None:
        for ident, text in results:
            self.items.append({"type": "function_call_output", "call_id": ident, "output": text})


class MessagesAgent(Agent):
    """``messages``, Anthropic's dialect."""

    dialect = "messages"

    def _body(self) -> dict[str, Any]:
        tool = {"name": "add", "description": "Add.", "input_schema": _PARAMETERS}
        return {
            "model": "tiny",
            "max_tokens": 256,
            "system": SYSTEM,
            "messages": self.items,
            "tools": [tool],
        }

    def _take(self, answer: dict[str, Any]) -> None:
        self.items.append({"role": "assistant", "content": answer["content"]})

    def _calls(self, answer: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
        blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
        return [(block["id"], block["input"]) for block in blocks]

    def _give(self, results: list[tuple[str, str]]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": ident, "content": text}
            for ident, text in results
        ]
        self.items.append({"role": "user", "content": blocks})


AGENTS: dict[str, type[Agent]] = {
    agent.dialect: agent for agent in (ChatAgent, ResponsesAgent, MessagesAgent)
}

_CALL = '<tool_call>{"name": "add", "arguments": {"a":  1, "b": 2.50}}</tool_call>'
_AGAIN = '<tool_call>{"name": "add", "arguments": {"a": 3.5, "b": 4}}</tool_call>'
ANSWERS = [f"Let me see.\n{_CALL}", _AGAIN, "It is 7.5.", "Bye, and thanks."]


async def run_rollout(agent: Agent) -> None:
    """Four calls: a tool with words, a tool without, the result, and another user turn."""
    await agent.ask("1 + 2.5 + 4?")
    await agent.finish_tools()
    await agent.finish_tools()
    await agent.ask("Thank you.")
