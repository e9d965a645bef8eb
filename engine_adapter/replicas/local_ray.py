"""A Ray of one's own on loopback, which leaves no process behind, or a cluster that was joined."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from tokenplane.engine_adapter.replicas.process_tree import (
    adopt_orphans,
    await_gone,
    children_of,
    command_of,
    descendants,
    kill,
    reap_orphans,
)
from tokenplane.engine_adapter.worker.generation_setup import maybe_configure_engine_reaping_env
from tokenplane.schemas.errors import DeadlineError

logger = logging.getLogger("tokenplane.replicas")

LOCAL = "local"
NAMESPACE = "tokenplane"
_OBJECT_STORE_BYTES = 128 * 2**20
"""Nothing big goes through Ray's own store."""
_ENDED_S = 10.0
_PAUSE_S = 1.0


class RayLink:
    """This process's connection to Ray.

    Make it on a thread that outlives the Ray it starts: the kernel kills Ray's processes when the
    *thread* that started them ends.

    Args:
        address: ``local`` starts a Ray, unless this process is connected to one already.
        cpus: that a Ray of one's own offers.
        ends: monotonic time at which no further start is tried.
    """

    def __init__(self, address: str, *, cpus: float, ends: float) -> None:
        self._before: set[int] | None = None
        self._roots: set[int] = set()
        self._joined = ray.is_initialized()
        if self._joined:
            return
        if address != LOCAL:
            _init(address=address)
            return
        _prepare_environment()
        adopt_orphans(True)
        self._before = children_of(os.getpid())
        while not self._start_once(cpus, ends):
            time.sleep(_PAUSE_S)
        self._roots = self._of_ray()

    def alive(self) -> bool:
        """False once a process of a Ray of our own has ended, or the connection is gone."""
        return ray.is_initialized() and self._roots <= descendants(self._roots).keys()

    def close(self, timeout_s: float) -> None:
        """Leave; end a Ray of our own, and see that every process of it is gone.

        Raises:
            DeadlineError: some were left, and have been killed.
        """
        if self._joined:
            return
        left = self._end(timeout_s)
        if self._before is not None:
            adopt_orphans(False)
        if left:
            raise DeadlineError(
                "processes of Ray did not end by themselves",
                expected=f"within {timeout_s:g} s",
                got=sorted(left),
            )

    def _start_once(self, cpus: float, ends: float) -> bool:
        """False where it is worth another try: on a busy machine Ray gives up on its own agents
        after seconds, and then as a whole."""
        try:
            _init(
                address=LOCAL,
                num_cpus=max(1, round(cpus + 0.5)),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
            )
        except Exception:
            self._end(_ENDED_S)
            if time.monotonic() > ends:
                adopt_orphans(False)
                raise
            logger.warning("Ray did not start; trying again", exc_info=True)
            return False
        return True

    def _end(self, timeout_s: float) -> dict[int, str]:
        """Leave Ray; what of it had to be killed."""
        ours = descendants(self._of_ray())
        ray.shutdown()
        ours |= descendants(self._of_ray())
        left = await_gone(ours, timeout_s)
        kill(left)
        await_gone(left, _ENDED_S)
        reap_orphans("ray::")
        return left

    def _of_ray(self) -> set[int]:
        """Children that came since the start and are a part of Ray, orphans of Ray's own included:
        they are this process's children, because it adopts them."""
        if self._before is None:
            return set()
        folder = str(Path(ray.__file__).parent)
        commands = {pid: command_of(pid) for pid in children_of(os.getpid()) - self._before}
        return {
            pid
            for pid, command in commands.items()
            if folder in command or command.startswith("ray::")
        }


def _init(**settings: Any) -> None:
    ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **settings)


def _prepare_environment() -> None:
    """For Ray's processes, which inherit it; what an operator has set stays."""
    maybe_configure_engine_reaping_env(True)
    # Ray makes its workers yield to everything else, which is wrong for an engine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Its control process runs on this host and is never started again. Where it is gone, Ray's own
    # agents would still try for a minute to tell it that they end.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    # Ray's word for "no cluster": all of its ports are on loopback then. It was read when Ray was
    # imported, so it is set here as well.
    os.environ.setdefault(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0")
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, False
    )
