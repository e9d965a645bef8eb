"""``tokenplane serve`` as users run it: a process, the ``openai`` client, signals, restarts."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.server.serve_process import serve_process
from tests.server.serving import TOOLS, scripted, serving
from tokenplane.capture.collect.collector import Collector
from tokenplane.capture.ledger import Ledger
from tokenplane.engine_adapter.contract_suite.suite import until
from tokenplane.engine_adapter.server.server_http import run_http
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.staging.open_store import open_store
from tokenplane.staging.token_source import TokenSource
from tokenplane.tools import serve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


def agent(url: str, rollout: str) -> openai.OpenAI:
    """An ordinary client; only its base URL is ours."""
    return openai.OpenAI(base_url=f"{url}/rollouts/{rollout}/v1", api_key="unused", max_retries=0)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def manifest(url: str, rollout: str) -> RolloutManifest:
    reply = httpx.get(f"{url}/rollouts/{rollout}/manifest", timeout=30)
    return RolloutManifest.model_validate(reply.json())


def test_the_openai_client_rolls_out_streams_and_restarts(tmp_path: Path) -> None:
    store, log = f"file://{tmp_path}/store", tmp_path / "log"
    messages: list[Any] = [{"role": "user", "content": "Count."}]
    with (
        serve_process(store, log, "--weight-version", "5", fresh=True) as server,
        agent(server.url, "r1") as client,
    ):
        assert server.ready_line.endswith(f"(model tokenplane/tiny, store {store})")
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert [model.id for model in client.models.list()] == ["tiny", "tokenplane/tiny"]
        first = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=12,
            seed=1,
            tools=TOOLS,
        )
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "On."}]
        stream = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=40,
            seed=2,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces, usage, finish = [], None, None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                finish = choice.finish_reason or finish
        assert finish in ("stop", "length")
        assert usage is not None
        assert usage.prompt_tokens > usage.completion_tokens > 0
        said = {"role": "assistant", "content": "".join(pieces)}
        messages += [said, {"role": "user", "content": "More."}]
        with pytest.raises(openai.BadRequestError, match="n is not supported") as refused:
            client.chat.completions.create(model="tiny", messages=messages, n=2)
        assert refused.value.code == "unsupported_parameter"
        assert len(manifest(server.url, "r1").records) == 2
        assert server.stop() == 0
        assert server.output == []
    with (
        serve_process(store, log, "--weight-version", "6") as server,
        agent(server.url, "r1") as client,
    ):
        third = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=8,
            tools=TOOLS,
        )
        listed = manifest(server.url, "r1")
        assert [record.weight_version for record in listed.records] == [5, 5, 6]
        assert listed.records[2].response_id == third.id
        assert not listed.failures
        assert server.stop(signal.SIGINT) == 0
    with open_store(store) as reopened:
        (row,) = Collector(TokenSource(reopened), Ledger(reopened)).finalize("r1")
        assert row.sample_mask == 1, row.reason
        assert len(row.call_spans) == 3


def test_a_client_that_leaves_cancels_its_request(tmp_path: Path) -> None:
    with serve_process("memory:", tmp_path / "log") as server:

        def stats() -> dict[str, Any]:
            status: dict[str, Any] = httpx.get(f"{server.url}/admin/status", timeout=30).json()
            return dict(status["engine_stats"])

        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 8000,
            "ignore_eos": True,
        }
        ask = f"{server.url}/rollouts/r1/v1/chat/completions"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(ask, json=body, timeout=httpx.Timeout(30, read=1.0))
        wait_for(lambda: stats()["cancelled_requests"] == 1)
        with httpx.stream("POST", ask, json=body | {"stream": True}, timeout=30) as reply:
            assert next(reply.iter_lines()).startswith("data: ")
        wait_for(lambda: stats()["cancelled_requests"] == 2)
        assert stats()["live_requests"] == 0
        wait_for(lambda: len(manifest(server.url, "r1").failures) == 2)
        listed = manifest(server.url, "r1")
        assert {failure.reason for failure in listed.failures} == {"client_disconnected"}
        assert not listed.records


def test_a_signal_lets_running_calls_finish_and_takes_no_more(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    answers: list[httpx.Response] = []
    with serve_process(store, tmp_path / "log", "--drain-timeout-s", "60") as server:
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 600,
            "ignore_eos": True,
        }
        ask = f"{server.url}/rollouts/r1/v1/chat/completions"
        running = threading.Thread(
            target=lambda: answers.append(httpx.post(ask, json=body, timeout=90))
        )
        running.start()
        status = f"{server.url}/admin/status"
        wait_for(lambda: httpx.get(status).json()["engine_stats"]["generated_tokens"] > 3)
        server.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                return httpx.post(ask, json=body, timeout=1).status_code == 503
            except httpx.TransportError:
                return True

        wait_for(refused)
        running.join(90)
        assert server.process.wait(60) == 0
    assert answers[0].status_code == 200
    assert answers[0].headers["x-tokenplane-capture"] == "staged"
    with open_store(store) as reopened:
        (record,) = Ledger(reopened).manifest("r1").records
        assert record.response_id == answers[0].json()["id"]


def test_ctrl_c_while_the_model_loads_ends_at_once_and_prints_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenplane.tools.cli", "serve", "--model", "tiny"]
    command += ["--store", str(tmp_path / "store")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "libtorch" in maps.read_text(), 120)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "log").read_text() == ""


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for more in ((), ("--replicas", "2", "--store", f"file://{tmp_path}/store")):
            assert serve.main(["--model", "tiny", "--port", port, *more]) == 1
            said = capsys.readouterr().err
            assert said.startswith("tokenplane serve: os_error: ")
            assert said.endswith(f"Address already in use: 127.0.0.1 port {port}\n")


def test_a_call_that_outlasts_the_drain_is_recorded(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with serve_process(store, tmp_path / "log", "--drain-timeout-s", "1") as server:
        body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
        ask = f"{server.url}/rollouts/r1/v1/chat/completions"

        answers: list[httpx.Response] = []
        running = threading.Thread(
            target=lambda: answers.append(httpx.post(ask, json=body, timeout=90))
        )
        running.start()
        status = f"{server.url}/admin/status"
        wait_for(lambda: httpx.get(status).json()["engine_stats"]["generated_tokens"] > 3)
        assert server.stop() == 0
        running.join(30)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "server_stopped"
    with open_store(store) as reopened:
        (failure,) = Ledger(reopened).failures("r1")
        assert failure.code == "server_stopped"


async def test_a_dead_engine_ends_the_serving() -> None:
    engine, urls = scripted([]), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving(engine) as served, asyncio.timeout(60):
            running = asyncio.create_task(run_http(served.app, served.parts, listener, urls.append))
            await until(lambda: bool(urls))
            assert urls == [f"http://127.0.0.1:{listener.getsockname()[1]}"]
            engine.fail()
            assert await running is False


def test_another_host_with_a_token_asks_for_it(tmp_path: Path) -> None:
    env = {"SECRET": "t0ken"}
    arguments = ("--host", "0.0.0.0", "--control-token-env", "SECRET")
    with serve_process("memory:", tmp_path / "log", *arguments, env=env) as server:
        assert "0.0.0.0" not in server.url
        url = f"http://127.0.0.1:{urlsplit(server.url).port}"
        assert httpx.get(f"{url}/admin/status").status_code == 401
        good = {"Authorization": "Bearer t0ken"}
        status = httpx.get(f"{url}/admin/status", headers=good).json()
        assert json.dumps(status)
        assert status["state"] == "running"
