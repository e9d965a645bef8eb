"""Starts NeMo-Gym's model server as a process of its own, and asks it as an agent does."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Literal, Self

import httpx

from tokenplane.capture.collect.gym_rollouts import GymManifests
from tokenplane.schemas.manifest import RolloutManifest

SERVER = Path(__file__).with_name("gym_model_server.py")
LINKS = Path(__file__).resolve().parents[2] / ".typings"
"""Holds ``tokenplane/<folder>`` links: on PYTHONPATH they are the package, without an install."""
FILE_LEDGER = "nemo_gym.token_id_capture.lineage:FileLineageStore"
OUR_LEDGER = "tokenplane.capture.gym_ledger:GymLedger"
CONTROL_TOKEN = "control-secret"
CONTROL_TOKEN_ENV = "NEMO_GYM_TOKEN_CAPTURE_CONTROL_TOKEN"

type Backend = Literal["megatron_worker", "vllm_worker"]
BACKENDS: tuple[Backend, ...] = ("megatron_worker", "vllm_worker")


class GymModelServer:
    """One model server process; a context manager that ends it.

    Args:
        engine: base URL of the engine, with ``/v1``.
        folder: for its log.
    """

    def __init__(
        self,
        python: Path,
        engine: str,
        folder: Path,
        *,
        backend: Backend = "megatron_worker",
        lineage_store: str = FILE_LEDGER,
        lineage_store_kwargs: dict[str, Any],
    ) -> None:
        settings = {
            "engine": engine,
            "backend": backend,
            "model": "tiny",
            "lineage_store": lineage_store,
            "lineage_store_kwargs": lineage_store_kwargs,
        }
        self.log = folder / f"gym-{backend}.log"
        environment = {**os.environ, CONTROL_TOKEN_ENV: CONTROL_TOKEN, "PYTHONPATH": str(LINKS)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-B", SERVER, json.dumps(settings)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert ready.startswith("gym: ready "), self.log.read_text()[-4000:]
        self.url = ready.split()[-1]
        self._manifests = GymManifests(self.url, CONTROL_TOKEN)

    def manifest(self, rollout: str) -> RolloutManifest:
        """The rollout's manifest, through our own client of the control route."""
        return self._manifests.manifest(rollout)

    def reasons(self, rollout: str, *, at_least: int = 0, wait_s: float = 10) -> list[str]:
        """The failure rows of the rollout.

        Gym notes how a request ended after its reply has left, so a reader may be early: this one
        waits until there are ``at_least`` so many rows, or ``wait_s`` have passed.
        """
        deadline = time.monotonic() + wait_s
        while True:
            found = [failure.reason for failure in self.manifest(rollout).failures]
            if len(found) >= at_least or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    async def ask(self, rollout: str, dialect: str, body: dict[str, Any]) -> httpx.Response:
        """One captured model call, as an agent sends it."""
        path = f"{self.url}/ng-rollout/{rollout}/training-token-capture/v1/{dialect}"
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return await client.post(path, json=body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manifests.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
