"""The process of Megatron's request coordinator, which ends when its parent does.

Run as ``python -m tokenplane.engine_adapter.dynamic.coordinator_main '<json>'`` with a pipe as
standard input. It reports on standard output, one JSON object a line: ``{"address": ...}`` once its
port is bound, ``{"ready": true}`` once the expected engines have registered. Megatron's own way to
start the coordinator leaves it running when the parent is killed; here the end of standard input,
which the kernel brings about however the parent ends, ends this process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from tokenplane.engine_adapter.dynamic.build import IdTokenizer
from tokenplane.engine_adapter.models.megatron_process import quiet_imports

PARENT_GONE = 75
"""Exit status after the end of standard input."""


class Report:
    """Stands for the pipe and the event that Megatron's entry point reports through."""

    def send(self, address: str) -> None:
        """The port is bound."""
        self._line({"address": address})

    def set(self) -> None:
        """Every expected engine has registered."""
        self._line({"ready": True})

    def close(self) -> None:
        """Megatron closes its pipe; ours is standard output and stays."""

    def _line(self, values: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()


class RoutingTokenizer(IdTokenizer):
    """Of a text prompt the coordinator only wants hashes to route by: it has none. The engine
    refuses the request; raising here would end the coordinator, and every other request with it."""

    def tokenize(self, text: str) -> list[int]:
        """Always []."""
        return []


def main(argv: list[str]) -> int:
    """Run until told to stop, or until the parent has gone."""
    settings = json.loads(argv[0])
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    with quiet_imports():
        from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
        from megatron.core.inference.data_parallel_inference_coordinator import (
            DataParallelInferenceCoordinator,
        )
    report = Report()
    DataParallelInferenceCoordinator.entrypoint(
        report,
        report,
        settings["engines"],
        RoutingTokenizer(settings["vocab_size"]),
        settings["max_requests"],
        None,
        block_size_tokens=settings["block_tokens"],
        enable_prefix_caching=settings["prefix_caching"],
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy(settings["policy"]),
        prefix_caching_routing_alpha=settings["alpha"],
        hostname=settings["host"],
    )
    return 0


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(PARENT_GONE)  # nothing here needs an orderly end, and Megatron's loop cannot be asked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
