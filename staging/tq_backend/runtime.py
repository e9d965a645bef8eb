"""Finds the TransferQueue of a Ray cluster, or starts one; starts it anew after a loss."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import Any, Final

import ray
import transfer_queue

from tokenplane.schemas.errors import StoreError, StoreUnavailableError
from tokenplane.staging.tq_backend.link import QueueLink, check_endpoints, unit_endpoints, within
from tokenplane.staging.tq_backend.options import QueueOptions

logger = logging.getLogger("tokenplane.staging")

CONTROLLER: Final = ("TransferQueueController", "transfer_queue")
RAY_NAMESPACE: Final = "tokenplane"
STARTED_BY_US: Final = "tokenplane"
"""Key in a queue's configuration: only such a queue is ever stopped by us."""
POLL_S: Final = 0.5
# One start at a time: transfer_queue keeps its state in module globals.
_LOCK: Final = threading.Lock()


def connect(options: QueueOptions) -> QueueLink:
    """A link to a queue whose controller and storage units all answer.

    Raises:
        StoreUnavailableError: there is none and none may be started, or it is broken and not ours.
        StoreTimeoutError: ``start_s`` passed.
    """

    def work() -> QueueLink:
        with _LOCK:
            join_cluster(options)
            config = _running_queue(options)
        return QueueLink(config, options.partition, deadline_s=options.deadline_s)

    return within(options.start_s, "find or start the queue", work)


def join_cluster(options: QueueOptions) -> None:
    """Connect this process to Ray, or start one; nothing if it is connected.

    Ray has its processes killed when the *thread* that started them ends (``PR_SET_PDEATHSIG``), so
    they are started by one that never does.
    """
    if ray.is_initialized():
        return
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            _init_ray(options)
        except BaseException as exc:  # noqa: BLE001 - carried over to the caller
            results.put(exc)
            return
        results.put(None)
        threading.Event().wait()

    threading.Thread(target=run, name="ray-parent", daemon=True).start()
    error = results.get()
    if error is not None:
        raise error


def _init_ray(options: QueueOptions) -> None:
    local = options.address == "local"
    more = {"num_cpus": options.units + 2, "include_dashboard": False} if local else {}
    ray.init(
        address=options.address,
        namespace=RAY_NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **more,
    )


def _running_queue(options: QueueOptions) -> Any:
    """The configuration of a queue that works."""
    deadline = time.monotonic() + options.start_s
    while True:
        controller = _controller()
        if controller is None:
            if not options.start:
                raise StoreUnavailableError("TransferQueue: the cluster has no controller")
            _start(options)
        else:
            config = _config(controller, options)
            if config is not None:
                try:
                    check_endpoints(unit_endpoints(config))
                except StoreError:
                    if not (options.start and config.get(STARTED_BY_US)):
                        raise
                    logger.warning("TransferQueue lost a storage unit: starting it anew")
                    _stop(controller, config)
                    continue
                return config
        if time.monotonic() > deadline:
            raise StoreUnavailableError("TransferQueue: its controller never became ready")
        time.sleep(POLL_S)


def _controller() -> Any:
    try:
        return ray.get_actor(CONTROLLER[0], namespace=CONTROLLER[1])
    except ValueError:
        return None


def _config(controller: Any, options: QueueOptions) -> Any:
    """None while the queue is being started, or when its controller is dead."""
    try:
        return ray.get(controller.get_config.remote(), timeout=options.deadline_s)
    except ray.exceptions.GetTimeoutError as exc:
        raise StoreUnavailableError("TransferQueue: its controller hangs") from exc
    except ray.exceptions.ActorDiedError:
        if not options.start:
            raise StoreUnavailableError("TransferQueue: its controller died") from None
        # Ray keeps a dead actor's name until somebody kills it.
        ray.kill(controller)
        return None


def _start(options: QueueOptions) -> None:
    logger.info("starting TransferQueue with %d storage units", options.units)
    # Forget what an earlier queue left in the module's globals; it starts nothing otherwise.
    transfer_queue.close()
    _kill_units(options.units)
    transfer_queue.init(
        {
            "backend": {"SimpleStorage": {"num_data_storage_units": options.units}},
            STARTED_BY_US: {"started": True},
        }
    )


def _stop(controller: Any, config: Any) -> None:
    ray.kill(controller)
    _kill_units(len(unit_endpoints(config)))


def _kill_units(count: int) -> None:
    """Units that survived their queue would keep their names, and hold memory for nobody."""
    for rank in range(count):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(f"TransferQueueStorageUnit#{rank}"))
