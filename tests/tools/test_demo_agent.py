"""The demo's agent and its calculator; and what counts as a request in mid-answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tokenplane.schemas.errors import ConfigError, EngineDeadError, EngineError
from tokenplane.tools.demo.agent import (
    Agent,
    _decoding,
    calculate,
    calculate_within,
    refit_in_flight,
)
from tokenplane.tools.demo.command import main, prepare_folder
from tokenplane.tools.demo.report import DemoSummary
from tokenplane.tools.demo.server import DemoServer


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 * 7", "84"), ("1+2*3", "7"), (" (1 + 2) * 3 ", "9"), ("7/2", "3.5"), ("2 - 5", "-3")],
)
def test_it_calculates(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1/0", "x + 1", "__import__('os')", "2 ** 9", "1e999 - 1e999 * j", "'a' + 'b'", "(" * 999],
)
def test_nonsense_is_an_answer_too(expression: str) -> None:
    assert calculate(expression).startswith("cannot calculate ")


def test_the_first_calculation_in_a_text() -> None:
    assert calculate_within("Well, 12 * 7 is 84, and 1+1?") == "12 * 7 = 84"
    assert calculate_within("no idea", "what is 8 / 2?") == "8 / 2 = 4"
    assert calculate_within("no idea", "none either") == "there is nothing to calculate"


def an_agent(replies: list[dict[str, Any] | int], seen: list[Any]) -> Agent:
    """An agent whose server says ``replies``: messages, or the status of a refusal."""

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        reply = replies[len(seen) - 1]
        if isinstance(reply, int):
            return httpx.Response(reply, json={"error": {"message": "no", "code": "nope"}})
        body = {
            "id": f"chatcmpl-{len(seen)}",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": reply}],
        }
        return httpx.Response(200, json=body, headers={"x-tokenplane-capture": "staged"})

    http: Any = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = AsyncOpenAI(base_url="http://x/v1", api_key="k", http_client=http, max_retries=0)
    return Agent(client, "m", ("first?", "second?", "third?"), 8)


async def test_text_is_answered_by_the_tool_run_on_it() -> None:
    seen: list[Any] = []
    agent = an_agent([{"role": "assistant", "content": "it is 2*3"}] * 2, seen)
    turn = await agent.take_turn()
    assert (turn.response_id, turn.capture) == ("chatcmpl-1", "staged")
    await agent.take_turn()
    await agent.client.close()
    assert seen[0]["messages"] == [{"role": "user", "content": "first?"}]
    assert seen[0]["tools"][0]["function"]["name"] == "calculator"
    assert seen[1]["messages"][1:] == [
        {"role": "assistant", "content": "it is 2*3"},
        {"role": "user", "content": "The calculator says: 2*3 = 6. second?"},
    ]


async def test_tool_calls_are_answered_by_tool_messages() -> None:
    seen: list[Any] = []
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(
            [
                ("calculator", '{"expression": "4 - 1"}'),
                ("calculator", "{broken"),
                ("calculator", "[]"),
                ("weather", "{}"),
            ]
        )
    ]
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    agent = an_agent([reply, {"role": "assistant", "content": "so"}], seen)
    await agent.take_turn()
    await agent.take_turn()
    await agent.client.close()
    sent = seen[1]["messages"]
    assert sent[1] == reply
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in sent[2:]] == [
        ("tool", "call_0", "3"),
        ("tool", "call_1", "the arguments are no JSON"),
        ("tool", "call_2", "cannot calculate 'None'"),
        ("tool", "call_3", "there is no tool 'weather'"),
    ]


async def test_a_refused_turn_is_an_error_of_ours() -> None:
    agent = an_agent([409], [])
    with pytest.raises(EngineError, match=r"a turn got no answer: .*409"):
        await agent.take_turn()
    await agent.client.close()


STATS = {
    "live_requests": 1,
    "generated_tokens": 5,
    "finished_requests": 2,
    "failed_requests": 0,
    "cancelled_requests": 0,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"generated_tokens": 6}, True),
        ({}, False),
        ({"generated_tokens": 6, "finished_requests": 3}, False),
        ({"generated_tokens": 6, "cancelled_requests": 1}, False),
        ({"generated_tokens": 6, "live_requests": 0}, False),
    ],
)
def test_only_a_request_that_lives_and_samples_is_in_mid_answer(
    change: dict[str, int], expected: bool
) -> None:
    assert _decoding(STATS, STATS | change) is expected


class ScriptedServer:
    """Stands for a server's control routes: gives ``stats`` one by one, keeps what is posted."""

    def __init__(self, stats: list[dict[str, int]]) -> None:
        self.stats = stats
        self.calls: list[str] = []

    def get(self, path: str) -> Any:
        self.calls.append("stats")
        return {"engine_stats": self.stats.pop(0)}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.calls.append(path.rpartition("/")[2])
        if path.endswith("perturb_weights"):
            assert body == {"scale": 1.5, "version": 7}
        return {}


async def test_the_weights_change_while_the_engine_stands_still_in_mid_answer() -> None:
    idle = STATS | {"live_requests": 0}
    ended = STATS | {"finished_requests": 3, "generated_tokens": 9}
    going = ended | {"generated_tokens": 10}
    server: Any = ScriptedServer([idle, STATS, STATS, ended, going])
    await refit_in_flight(server, 7, 1.5)
    pauses = [call for call in server.calls if call != "stats"]
    assert pauses == ["pause", "resume", "pause", "resume", "pause", "perturb_weights", "resume"]


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="the folder holds other things"):
        prepare_folder(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert main(["--out", str(tmp_path)]) == 2


def test_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    for name in ("summary.json", "rows.parquet"):
        (tmp_path / name).write_text("old")
    (tmp_path / "store" / "deep").mkdir(parents=True)
    prepare_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(EngineDeadError, match=r"(?s)before it was ready: .*bad_config"):
        DemoServer(["--host", "0.0.0.0"], tmp_path / "log", said.append)


def test_what_a_summary_must_say() -> None:
    good = DemoSummary(6, 6, 0, 2, 2, True, 1, True, 100, 50, 1.5)
    assert good.shortcomings() == []
    bad = DemoSummary(5, 4, 1, 2, 1, False, 0, False, 100, 50, 1.5)
    assert bad.shortcomings() == [
        "calls >= 6",
        "staged == calls",
        "capture_failed == 0",
        "training_rows == rollouts",
        "prefix_exact",
        "spanning_calls >= 1",
        "replay_identical",
    ]
    assert list(good.to_json()) == [
        *("calls", "staged", "capture_failed", "rollouts", "training_rows", "prefix_exact"),
        *("spanning_calls", "replay_identical", "row_tokens", "trainable_tokens", "stage_ms_p50"),
    ]
