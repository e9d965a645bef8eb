"""What `make gpu-check` runs on one GPU: the engine contract, agreement, capture, prefixes, speed.

Writes `gpu-check.json`, `report.md` and the contract's `contract.xml` into `--out`. Each step runs
whatever became of the others; exit status 1 if any failed. The contract runs in a process of its
own beside the other steps, but for the last two, which measure time and have the GPU to themselves.
With `--rehearse` the same steps run on the CPU under the tests' facade, with small numbers that
mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import math
import platform
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_check_speed as speed
import gpu_check_steps as steps
import torch
from gpu_check_parts import CheckError, Plan, close_engines

from tokenplane.engine_adapter.dynamic.attention import install_torch_attention
from tokenplane.engine_adapter.dynamic.gpu_model import require_gpu_process
from tokenplane.tools.command_frame import at_least_one

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = "tests/dynamic/gpu_contract.py"
REHEARSED = "tests/dynamic/test_dynamic_contract.py"
_QUICK = (
    "exact or greedy or refit or changes_are or transitions or failed_update or seed "
    "or log_probs or stop_id or stop_string or released or cancelling"
)
"""Of the contract's tests, those that a device may break."""
_INI = """[pytest]
addopts = --import-mode=importlib -ra
markers =
    slow
    engine
    gpu
"""
"""All that the contract needs: the plugins and warnings of another machine do not matter."""
SPEED = ("throughput", "small-throughput")
"""The checks that measure time: each has the GPU to itself."""
SPEED_S = 90.0
"""What each of them needs at the least: its engine with its graphs, and some rounds."""
_PACKAGES = ("megatron-core", "torch", "transformers", "triton", "pyarrow", "apsw", "numpy")

CHECKS: dict[str, Callable[[Plan], Any]] = {
    "agreement": steps.check_agreement,
    "rollout": steps.check_rollout,
    "experts": steps.check_experts,
    "prefixes": steps.check_prefixes,
    "colocated": steps.check_colocated,
    "throughput": partial(speed.measure_throughput, name="4b"),
    "small-throughput": partial(speed.measure_throughput, name="small"),
}


def run_check(name: str, plan: Plan) -> Any:
    """One of ``CHECKS``.

    Raises: CheckError if it found something wrong, or did not end within the plan's time.
    """

    # A check of SPEED ends by itself: one that is cut off has measured nothing.
    limit_s = None if name in SPEED else plan.left_s()

    async def run() -> Any:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await CHECKS[name](plan)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise CheckError("the deadline of all steps passed before this one ended") from error
        finally:
            await close_engines()

    return asyncio.run(run())


class Contract:
    """The engine contract under pytest, in a process of its own."""

    def __init__(self, plan: Plan, out: Path, *, whole: bool) -> None:
        self._plan = plan
        self._report = out / "contract.xml"
        self._log = (out / "contract.log").open("wb")
        self._began = time.monotonic()
        chosen = [] if whole else ["-k", _QUICK]
        settings = out / "contract.ini"
        settings.write_text(_INI)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", REHEARSED if plan.rehearse else CONTRACT),
                *("-q", "-c", str(settings), f"--rootdir={ROOT}", "-p", "no:cacheprovider"),
                f"--junit-xml={self._report}",
                *chosen,
            ],
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def result(self, keep_s: float) -> dict[str, Any]:
        """Its counts. It gets what is left of the plan's time but ``keep_s``.

        Raises: CheckError if a test failed, none ran, or it did not end in time.
        """
        try:
            status = self._process.wait(max(1.0, self._plan.left_s() - keep_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = None
        self._log.close()
        seconds = round(time.monotonic() - self._began, 1)
        if status is None or not self._report.exists():
            raise CheckError(f"the contract ended with {status} after {seconds} s: see its log")
        suite = ElementTree.parse(self._report).getroot().find("testsuite")
        if suite is None:
            raise CheckError("the contract's report names no suite")
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors")}
        counts["skipped"] = int(suite.get("skipped", 0))
        found: dict[str, Any] = {**counts, "seconds": seconds}
        cases = suite.findall("testcase")
        found["slowest"] = sorted(
            ((float(case.get("time", 0)), str(case.get("name"))) for case in cases), reverse=True
        )[:3]
        if status != 0 or not counts["tests"]:
            found["failed"] = [
                f"{case.get('classname')}::{case.get('name')}"
                for case in cases
                if case.find("failure") is not None or case.find("error") is not None
            ]
            raise CheckError(f"the contract is broken: {found}")
        return found


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    found["attention"] = install_torch_attention()
    return found


class Report:
    """The outcome of each step, written anew after each."""

    def __init__(self, out: Path, arguments: str) -> None:
        self._out = out
        about = {"arguments": arguments, **versions()}
        self._values: dict[str, Any] = {"versions": about, "checks": {}}

    @property
    def failed(self) -> bool:
        return any(check["status"] != "passed" for check in self._values["checks"].values())

    def step(self, name: str, run: Callable[[], Any]) -> None:
        """Run a step and write down what it gave or how it failed."""
        began = time.monotonic()
        try:
            result, status = run(), "passed"
        except Exception as error:  # noqa: BLE001 - the other checks still tell something
            traceback.print_exc()
            result, status = f"{type(error).__name__}: {error}", "failed"
        seconds = round(time.monotonic() - began, 1)
        self._values["checks"][name] = {"status": status, "seconds": seconds, "result": result}
        print(f"{name}: {status} in {seconds} s: {result}", flush=True)
        (self._out / "gpu-check.json").write_text(json.dumps(self._values, indent=1) + "\n")
        (self._out / "report.md").write_text(self._page())

    def _page(self) -> str:
        lines = ["# gpu-check", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in self._values["versions"].items()]
        for name, check in self._values["checks"].items():
            lines += ["", f"## {name}: {check['status']} ({check['seconds']} s)", "", "```json"]
            lines += [json.dumps(check["result"], indent=1), "```"]
        return "\n".join(lines) + "\n"


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments. Exits with 2 where one is wrong."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check-out"))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", action="append", choices=("contract", *CHECKS))
    parser.add_argument("--whole-contract", action="store_true", help="not the quick part alone")
    parser.add_argument("--deadline-s", type=_seconds, default=600.0, help="for all steps together")
    parser.add_argument("--graphs", default="block", choices=("none", "layer", "block"))
    parser.add_argument(
        "--pairs", type=at_least_one, help="rounds of throughput, off and on (12; rehearsed, 2)"
    )
    parser.add_argument("--load", action="append", choices=speed.LOADS, help="of the throughput")
    parser.add_argument("--switch-interval-s", type=_seconds, default=0.0005)
    args = parser.parse_args(argv)
    for name in ("only", "load"):  # named twice is meant once
        setattr(args, name, list(dict.fromkeys(getattr(args, name) or ())))
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out: expected a folder, got the file {str(args.out)!r}")
    return args


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a time above 0, got {text!r}")
    return value


def main(argv: list[str] | None = None) -> int:
    """0 if every check passed."""
    given = sys.argv[1:] if argv is None else argv
    args = parse(given)
    limit, loads = args.deadline_s, tuple(args.load or speed.LOADS)
    if args.rehearse:
        from tests.dynamic import cpu_facade

        cpu_facade.install()
        plan = Plan(True, 8, args.pairs or 2, "none", limit, args.switch_interval_s, loads)
    elif torch.cuda.is_available():
        require_gpu_process()
        pairs = args.pairs or 12
        plan = Plan(False, 128, pairs, args.graphs, limit, args.switch_interval_s, loads)
    else:
        print("gpu_check: no CUDA device (--rehearse runs the steps on the CPU)", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out, " ".join(given))
    names = args.only or ["contract", *CHECKS]
    timed = [name for name in names if name in SPEED]
    contract = None
    if "contract" in names:
        contract = Contract(plan, args.out, whole=args.whole_contract)
    for name in names:
        if name not in ("contract", *SPEED):
            report.step(name, partial(run_check, name, plan))
    if contract is not None:
        report.step("contract", partial(contract.result, SPEED_S * len(timed)))
    for number, name in enumerate(timed):
        share = plan.left_s() / (len(timed) - number)
        report.step(name, partial(run_check, name, plan.until(share)))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
