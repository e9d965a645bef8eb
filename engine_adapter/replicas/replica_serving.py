"""Starts several workers behind one base URL, watches them, and ends them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import ray
from ray import serve

from tokenplane.engine_adapter.replicas.local_ray import LOCAL, RayLink
from tokenplane.engine_adapter.replicas.replica_settings import ReplicaSettings
from tokenplane.engine_adapter.replicas.serving_replica import (
    APPLICATION,
    DEPLOYMENT,
    OpenParts,
    ServingReplica,
)
from tokenplane.engine_adapter.server.bound_address import base_url, bind_socket
from tokenplane.engine_adapter.server.config import check_bind
from tokenplane.schemas.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    TokenplaneError,
)

logger = logging.getLogger("tokenplane.replicas")

_SERVE_NAMESPACE = "serve"
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"
_POLL_S = 0.2
_SYSTEM_CPUS = 1.0
"""For Serve's own actors, in a Ray of our own."""
_STOP_POLL_S = 1.0


class ReplicaServing:
    """Serves from the end of the constructor to ``close``. For one caller at a time.

    Each worker is an actor of Ray Serve: it opens its own engine and store by ``open_parts``, and
    Serve's proxy sends each request to one that has room. What they share is the store.
    """

    def __init__(
        self,
        open_parts: OpenParts,
        settings: ReplicaSettings,
        *,
        control_token: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Raises:
        ConfigError: a bind to other hosts without a token, or a cluster that has Serve already.
        OSError: the port is taken.
        DeadlineError: not every worker answered in time.
        EngineError: the workers cannot start; names what the first one said.
        """
        check_bind(settings.host, control_token)
        self._settings = settings
        self._token = control_token
        self._closed = False
        self._link: RayLink | None = None
        self._link_tried = threading.Event()
        self._link_unwanted = False
        with bind_socket(settings.host, settings.port) as probe:  # which port, and is it free
            self._port = probe.getsockname()[1]
        self.base_url = base_url(settings.host, self._port)
        ends = time.monotonic() + settings.start_timeout_s
        try:
            self._start(open_parts, control_token, api_key, ends)
            self._await_everyone(ends)
        except BaseException as error:
            # Who interrupts a start does not want to wait for Serve, whose workers still load.
            with contextlib.suppress(TokenplaneError):
                self._close(0.0, ask_serve=isinstance(error, Exception))
            raise

    def report_dp_openai_server_base_url(self) -> str:
        """``http://host:port/v1``: the one base URL of all workers."""
        return f"{self.base_url}/v1"

    def control(
        self, method: str, path: str, body: Any = None, *, replica: str | None = None
    ) -> dict[str, Any]:
        """One control call to every worker, or to ``replica`` alone; the merged reply.

        Raises:
            EngineError: with the reply's code where not every worker did it.
        """
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        reply = httpx.request(
            method,
            f"{self.base_url}{path}",
            json=body,
            headers=headers,
            params={} if replica is None else {"replica": replica},
            timeout=self._settings.start_timeout_s,
            trust_env=False,
        )
        found = _object(reply)
        if reply.status_code != 200:
            error = found.get("error", {})
            raise EngineError(
                str(error.get("message", reply.text[:300])),
                code=str(error.get("code", f"http_{reply.status_code}")),
                got=found.get("replicas"),
            )
        return found

    def set_rollout_weight_version(self, version: int) -> None:
        """Name the weights of every worker; all of them or an error. See ``control``."""
        self.control("POST", "/admin/weight_version", {"version": version})

    def health(self) -> dict[str, Any]:
        """What ``/health`` says; empty where nobody answers."""
        try:
            return _object(httpx.get(f"{self.base_url}/health", timeout=30.0, trust_env=False))
        except httpx.TransportError:
            return {}

    def wait(self, stopped: threading.Event) -> bool:
        """Until ``stopped`` is set (True), or until Ray itself has ended (False)."""
        while not stopped.wait(_POLL_S):
            if self._link is None or not self._link.alive():
                return False
        return True

    def close(self, *, drain_timeout_s: float | None = None) -> None:
        """No new call; running ones get the drain; then workers, Serve and a Ray of our own end.
        Idempotent.

        Raises:
            DeadlineError: something did not end in time; a process that was left has been killed.
        """
        drain_s = self._settings.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        self._close(drain_s, ask_serve=True)

    def _close(self, drain_s: float, *, ask_serve: bool) -> None:
        """``ask_serve`` False ends a Ray of our own without a word to Serve."""
        if self._closed:
            return
        self._closed = True
        limit = self._settings.stop_timeout_s
        local = self._settings.ray_address == LOCAL
        if local and not self._link_tried.wait(limit):
            self._link_unwanted = True
        link = self._link
        if link is None:
            return
        try:
            if ray.is_initialized() and (ask_serve or not local):
                if drain_s > 0:
                    _drain(drain_s)
                _within(limit, "stop Ray Serve", serve.shutdown)
        finally:
            link.close(limit)

    def _start(
        self, open_parts: OpenParts, control_token: str | None, api_key: str | None, ends: float
    ) -> None:
        """Ray, Serve and the deployment, on a thread that never ends; see ``RayLink``."""
        settings = self._settings
        cpus = settings.replicas * settings.cpus_per_replica + _SYSTEM_CPUS
        results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def start() -> None:
            try:
                self._link = RayLink(settings.ray_address, cpus=cpus, ends=ends)
            finally:
                self._link_tried.set()
            if self._closed:  # the deadline passed meanwhile
                if self._link_unwanted or settings.ray_address != LOCAL:
                    self._link.close(settings.stop_timeout_s)
                return
            if _serve_runs():
                raise ConfigError("the cluster has Ray Serve already", got=settings.ray_address)
            quiet = {"log_level": "WARNING", "enable_access_log": False}
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": settings.host, "port": self._port},
                logging_config=quiet,
            )
            application = _deployment(settings).bind(open_parts, settings, control_token, api_key)
            serve.run(application, name=APPLICATION, route_prefix="/", logging_config=quiet)

        def run() -> None:
            try:
                start()
            except BaseException as error:  # noqa: BLE001 - carried over to the caller
                results.put(error)
                return
            results.put(None)
            threading.Event().wait()

        threading.Thread(target=run, name="ray-parent", daemon=True).start()
        try:
            failure = results.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            raise DeadlineError(
                "the workers did not start", expected=f"within {settings.start_timeout_s:g} s"
            ) from None
        if isinstance(failure, TokenplaneError):
            raise failure
        if failure is not None:
            raise EngineError(f"the workers cannot start: {failure}") from failure

    def _await_everyone(self, ends: float) -> None:
        while self.health().get("status") != "ok":
            if time.monotonic() > ends:
                raise DeadlineError(
                    "not every worker answers",
                    expected=f"within {self._settings.start_timeout_s:g} s",
                    got=self.health().get("status", "nothing"),
                )
            time.sleep(_POLL_S)


def _deployment(settings: ReplicaSettings) -> Any:
    ingress: Any = serve.ingress()
    return serve.deployment(
        ingress(ServingReplica),
        name=DEPLOYMENT,
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_in_flight,
        ray_actor_options={
            "num_cpus": settings.cpus_per_replica,
            "num_gpus": settings.gpus_per_replica,
        },
        health_check_period_s=settings.health_period_s,
        health_check_timeout_s=settings.health_timeout_s,
        # Calls have been drained before Serve is told to stop.
        graceful_shutdown_wait_loop_s=_STOP_POLL_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + 5.0,
    )


def _serve_runs() -> bool:
    try:
        ray.get_actor(_CONTROLLER, namespace=_SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _drain(timeout_s: float) -> None:
    handle: Any = serve.get_deployment_handle(DEPLOYMENT, APPLICATION)
    try:
        ended = handle.broadcast("drain", timeout_s).results(
            timeout_s=timeout_s + 10.0, return_exceptions=True
        )
    except Exception:
        # Whatever Serve's state is, what follows ends it.
        logger.exception("the drain failed")
        return
    late = sum(count for count in ended if isinstance(count, int))
    if late:
        logger.warning("%d calls outlasted the drain", late)


def _within(timeout_s: float, what: str, work: Callable[[], None]) -> None:
    """Run blocking work with a deadline; a thread that hangs is left to the process's end."""
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - carried over to the caller
            results.put(error)
        else:
            results.put(None)

    threading.Thread(target=run, name="serve-stop", daemon=True).start()
    try:
        failure = results.get(timeout=timeout_s)
    except queue.Empty:
        raise DeadlineError(f"could not {what}", expected=f"within {timeout_s:g} s") from None
    if failure is not None:
        raise failure


def _object(reply: httpx.Response) -> dict[str, Any]:
    try:
        found = reply.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
