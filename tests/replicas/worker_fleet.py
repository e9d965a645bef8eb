"""A process that serves two generation workers, Megatron's genuine engine each, on the CPU.

``python worker_fleet.py STORE_URL``: prints the base URL, then names the workers' weights by the
number on each line of its stdin, until that ends.
"""

from __future__ import annotations

import functools
import sys

from tokenplane.engine_adapter.replicas.replica_serving import ReplicaServing
from tokenplane.engine_adapter.replicas.replica_settings import ReplicaSettings
from tokenplane.engine_adapter.replicas.worker_parts import ReplicaWorker, open_worker_parts

WEIGHT_VERSION = 3


def make_worker(store_url: str, _name: str) -> ReplicaWorker:
    """In the worker's process: the facade stands for the GPU, everything else is the product."""
    from tests.dynamic import cpu_facade
    from tokenplane.engine_adapter.models.source import load_model
    from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
    from tokenplane.engine_adapter.worker.generation_config import parse_generation_config
    from tokenplane.staging.open_store import open_store

    cpu_facade.install()
    loaded = load_model("tiny")
    megatron = {"max_sequence_length": 512, "block_size_tokens": 16, "max_requests": 8}
    config = parse_generation_config({"max_new_tokens": 12, "megatron": megatron})
    worker = MegatronGenerationWorker(loaded, config)
    worker.set_rollout_weight_version(WEIGHT_VERSION)
    return ReplicaWorker(worker, loaded, open_store(store_url))


def main(store_url: str) -> None:
    """Serve, and name weights, until stdin ends."""
    open_parts = functools.partial(open_worker_parts, functools.partial(make_worker, store_url))
    serving = ReplicaServing(open_parts, ReplicaSettings(replicas=2, cpus_per_replica=0.5))
    print(serving.report_dp_openai_server_base_url(), flush=True)
    for line in sys.stdin:
        serving.set_rollout_weight_version(int(line))
        print(f"named {line.strip()}", flush=True)
    serving.close()


if __name__ == "__main__":
    # The workers find this module by its name, so it must not be called __main__ there.
    from tests.replicas import worker_fleet

    worker_fleet.main(sys.argv[1])
