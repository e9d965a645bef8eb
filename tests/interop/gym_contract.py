"""Both sides of the contract, asked the same: NeMo-Gym in its own process, tokenplane in this one.

Our side raises nothing but coded errors; anything else is a failure of the test, not a rejection.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from tests.interop import gym_contract_ours as ours
from tests.interop.gym_contract_ours import Rejected

SERVER = Path(__file__).with_name("gym_contract_server.py")


class GymContract:
    """The long-lived server process; one question at a time."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [python, "-B", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        """Gym's answer: ``{"value": ...}`` or ``{"rejected": class, "code": ...}``.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, "args": to_line(args)}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the Gym process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def to_line(value: Any) -> Any:
    """``value`` with tuples and bytes in the form that survives JSON."""
    if isinstance(value, tuple):
        return {"$tuple": [to_line(item) for item in value]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, list):
        return [to_line(item) for item in value]
    if isinstance(value, dict):
        return {key: to_line(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Both:
    """What the two sides said."""

    gym: dict[str, Any]
    ours: dict[str, Any]

    @property
    def accepted(self) -> bool:
        """Whether they accepted; they must agree.

        Raises:
            AssertionError: one accepts what the other rejects.
        """
        assert ("value" in self.gym) == ("value" in self.ours), self
        return "value" in self.gym

    def agree(self) -> Self:
        """Self, after every bit was compared.

        Raises:
            AssertionError: they accept, answer or (with a code) reject differently.
        """
        if self.accepted:
            assert bits(self.ours["value"]) == bits(self.gym["value"])
        elif self.gym["code"] is not None:
            assert self.ours["code"] == self.gym["code"], self
        return self


def bits(value: Any) -> str:
    """JSON text, in which 1 and 1.0, 0.0 and -0.0 differ, and lists stand for tuples."""
    return json.dumps(value, sort_keys=True)


def as_binary32(values: list[float]) -> list[float]:
    """What the columns and the digest keep of log probabilities."""
    return [float(x) for x in np.array(values, np.float64).astype(np.float32)]


def ask_both(gym: GymContract, op: str, **args: Any) -> Both:
    """One question to both sides."""
    said = gym.ask(op, **args)
    try:
        return Both(said, {"value": getattr(ours, op)(**args)})
    except Rejected as error:
        return Both(said, {"rejected": error.name, "code": error.code})
