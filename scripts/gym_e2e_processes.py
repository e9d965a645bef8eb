"""Processes of the end-to-end run: an engine, NeMo-Gym's servers, and Gym's own collector."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from bootstrap import ROOT, SetupError

RESOURCES_SERVER = "example_multi_step"
AGENT = "example_multi_step_simple_agent"
CONTROL_TOKEN_ENV = "NEMO_GYM_TOKEN_CAPTURE_CONTROL_TOKEN"
LEDGERS = ("ours", "gym")
_SERVER_FOLDERS = (
    "environment_servers/legacy_agent",
    "resources_servers/example_multi_step",
    "responses_api_agents/simple_agent",
    "responses_api_models/vllm_model",
)
_STOP_S = 30.0


def free_port() -> int:
    """A port of this host that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def gym_config(out: Path, *, engine: str, model: str, model_port: int, ledger: str) -> Path:
    """Write the configuration that both of Gym's commands read (CONTRACT section 14).

    ``uv_venv_dir`` makes every server of Gym run in the one environment of this run.
    """
    if ledger == "ours":
        store = {"store": (out / "store").as_uri()}
        lineage = {
            "lineage_store": "tokenplane.capture.gym_ledger:GymLedger",
            "lineage_store_kwargs": store,
        }
    else:
        lineage = {
            "lineage_store": "nemo_gym.token_id_capture.lineage:FileLineageStore",
            "lineage_store_kwargs": {"root": str(out / "gym-ledger")},
        }
    config: dict[str, Any] = {
        "token_id_capture": {
            "enabled": True,
            "all_agents": True,
            "external_staging": True,
            "external_staging_backend": "megatron_worker",
            "rebuild_response": False,
            "control_auth_token_env": CONTROL_TOKEN_ENV,
            **lineage,
        },
        "policy_base_url": engine,
        "policy_api_key": "unused",
        "policy_model_name": model,
        "policy_model": {
            "responses_api_models": {
                "vllm_model": {
                    "host": "127.0.0.1",
                    "port": model_port,
                    "uses_reasoning_parser": False,
                }
            }
        },
        "head_server": {"host": "127.0.0.1", "port": free_port()},
        "skip_venv_if_present": True,
        "uv_venv_dir": str(out / "venvs"),
    }
    path = out / "capture.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def link_environments(out: Path, python: Path) -> None:
    """``<type>/<name>/.venv`` below ``uv_venv_dir``: all of them the one environment."""
    for folder in _SERVER_FOLDERS:
        link = out / "venvs" / folder / ".venv"
        link.parent.mkdir(parents=True)
        link.symlink_to(python.parents[1])


def gym_environment(python: Path, token: str) -> dict[str, str]:
    """Variables for Gym's processes: their commands first, the control secret, our packages."""
    return {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / ".typings"),
        CONTROL_TOKEN_ENV: token,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray gives up on its own node after 30 s by default; a busy machine needs more.
        "RAY_raylet_start_wait_time_s": "90",
    }


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], log: Path, *, cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, all of which has ended when the context has."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # Gym ends its servers on an interrupt, and waits for them.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_STOP_S)
        process.wait()


def wait_for_line(process: subprocess.Popen[bytes], log: Path, start: str, timeout_s: float) -> str:
    """The first line of the log that contains ``start``.

    Raises:
        SetupError: the process ended, or the line did not come in time; shows the log's end.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        for line in text.splitlines():
            if start in line:
                return line
        if process.poll() is not None:
            break
        time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    raise SetupError(f"no {start!r} within {timeout_s:g} s in {log}:\n{tail}")


def answers(url: str) -> bool:
    """True if a GET gets any HTTP reply."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
