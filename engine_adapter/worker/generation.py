"""MegatronGenerationWorker: one engine's whole generation life cycle, by composition.

The parts: ``worker.thread`` (calls with deadlines), ``worker.lifecycle`` (sleep, wake, refit),
``worker.batches`` (the trainer's tensors), ``worker_requests`` (running a batch), ``worker.server``
(OpenAI API), ``worker.capture`` (token capture), ``generation_*`` (configuration). Method names are
those of the trainer's generation interface.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import torch

from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
from tokenplane.engine_adapter.engine import EngineState, SuspendMode
from tokenplane.engine_adapter.engine_control import check_version
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.worker.batches import Batch, to_batch, to_requests
from tokenplane.engine_adapter.worker.capture import CapturePair, make_capture
from tokenplane.engine_adapter.worker.generation_config import GenerationConfig
from tokenplane.engine_adapter.worker.generation_engine import (
    http_sampling_defaults,
    to_dynamic_settings,
    to_megatron_extra,
)
from tokenplane.engine_adapter.worker.generation_setup import configure_generation_config
from tokenplane.engine_adapter.worker.graph_managers import (
    apply_inference_cuda_graph_scope,
    setup_colocated_cuda_graph_managers,
)
from tokenplane.engine_adapter.worker.lifecycle import clear_rotary_cache
from tokenplane.engine_adapter.worker.running_engine import RunningEngine
from tokenplane.engine_adapter.worker.server import WorkerServer
from tokenplane.engine_adapter.worker.worker_requests import all_in_order, as_they_finish
from tokenplane.schemas.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    RequestRejectedError,
)
from tokenplane.staging.store import StagingStore

_TAGS = frozenset({"weights", "kv_cache"})
"""Of the refit protocol. A misspelt one would leave the engine asleep without a word."""


class MegatronGenerationWorker:
    """Generates for a trainer, and serves rollouts over HTTP if configured.

    The synchronous methods are for one caller at a time (a lock makes a second wait); generating
    may go on beside them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: GenerationConfig,
        *,
        model: torch.nn.Module | None = None,
        store: StagingStore | None = None,
        is_leader: bool = True,
        reserved_http_server_port: int | None = None,
        http_host: str = "127.0.0.1",
        control_token: str | None = None,
    ) -> None:
        """Starts no engine: the first ``prepare_for_generation`` does.

        ``model`` is the one to run, if it is not ``loaded.model`` (a GPU twin, or a dedicated
        inference layout). ``store`` is needed for the HTTP server; the caller closes it.
        ``is_leader``: of its model-parallel group; followers host no server and no hooks.

        Raises: ConfigError.
        """
        if config.megatron.expose_http_server and store is None:
            raise ConfigError("the HTTP server needs a staging store", key="expose_http_server")
        port = reserved_http_server_port
        if port is not None and not (isinstance(port, int) and 0 <= port <= 65535):
            raise ConfigError(
                "no such port",
                key="reserved_http_server_port",
                expected="0 to 65535",
                got=repr(port),
            )
        self.config = configure_generation_config(config, loaded.tokenizer)
        self._loaded = loaded
        self._model = loaded.model if model is None else model
        self._store = store
        self._is_leader = is_leader
        self._port = reserved_http_server_port
        self._host = http_host
        self._control_token = control_token
        self._guard = threading.RLock()
        if config.colocated:
            setup_colocated_cuda_graph_managers(self._model, config.megatron)
        self._init_inference_engine_state()

    def _init_inference_engine_state(self) -> None:
        """Everything that an engine brings, as before the first one."""
        self._running: RunningEngine | None = None
        self._server: WorkerServer | None = None
        self._capture: CapturePair | None = None
        self._version: int | None = None

    @property
    def engine(self) -> MegatronDynamicEngine | None:
        """None before the first ``prepare_for_generation`` and after ``shutdown``."""
        return None if self._running is None else self._running.engine

    # ---- life cycle

    def _gen_model(self) -> torch.nn.Module:
        """The model that the engine runs: the one given for it, else the loaded one."""
        return self._model

    def prepare_for_generation(self, tags: Sequence[str] | None = None, **kwargs: Any) -> None:
        """Start the engine, or wake it.

        A plain call on a serving engine returns at once. ``tags`` are the refit protocol's:
        ``["weights"]`` prepares weights only and never wakes, since waking would race the transfer;
        with ``"kv_cache"`` (or without tags) the engine serves afterwards. ``kwargs`` are for other
        backends of the trainer; none means anything here.

        Raises: EngineDeadError if the engine has died (``shutdown`` clears the way for another);
        RequestRejectedError for an unknown tag.
        """
        if tags is not None and (isinstance(tags, str) or not set(tags) <= _TAGS):
            raise RequestRejectedError("tags", expected=f"some of {sorted(_TAGS)}", got=repr(tags))
        with self._guard:
            if tags is not None and "kv_cache" not in tags:
                return
            if self._running is None:
                self._initialize_inference_engine()
            elif self._running.engine.state() is EngineState.DEAD:
                raise EngineDeadError(
                    "the engine has died", expected="shutdown() before it is prepared again"
                )
            elif self._running.lifecycle.asleep:
                self._wake()

    def finish_generation(self, *, release_gpu: bool = True) -> None:
        """Wind a generation phase down; nothing happens before the first engine.

        ``release_gpu``: the caller needs the GPU for itself, so a colocated engine gives its KV
        cache and CUDA graphs back. False keeps a colocated engine serving, with its caches. One
        that is not colocated keeps its memory and only drops cached rotary angles.
        """
        with self._guard:
            if self._running is None or (self.config.colocated and not release_gpu):
                return
            if self.config.colocated:
                self._sleep()
            clear_rotary_cache(self._model)

    def suspend_for_refit(self) -> None:
        """Stand down for a weight transfer; no-op without an engine, or if done already."""
        with self._guard:
            recompute = self.config.megatron.recompute_kv_cache_after_weight_updates
            mode: SuspendMode = "recompute" if recompute else "persist"
            if self._running is not None:
                self._running.move("suspend for the refit", lambda to: to.suspend_for_refit(mode))

    def resume_after_refit(self) -> None:
        """Undo ``suspend_for_refit``; an engine that slept before stays asleep. Idempotent."""
        with self._guard:
            if self._running is not None:
                self._running.move("resume after the refit", lambda to: to.resume_after_refit())

    def drain(self, timeout_s: float) -> None:
        """Wait until every request that is under way has its answer; no-op without an engine.

        Raises: DeadlineError, saying how many are left; EngineStateError if the engine stands down.
        """
        if self._running is not None:
            self._running.drain(timeout_s)

    def update_weights(self, apply: Callable[[torch.nn.Module], None], version: int) -> None:
        """Write new weights and then set the version, both or neither; see ``Engine``."""
        running = self._require_engine("update weights")
        limit = self.config.control_timeout_s
        running.call(
            running.engine.update_weights(apply, version=version, timeout_s=limit),
            what="update_weights",
            timeout_s=self.config.start_timeout_s,
        )
        self._version = version

    def set_rollout_weight_version(self, version: int) -> None:
        """Stamp what is admitted from now on, and open a boundary on live requests. Before the
        first engine the version is kept for it. Raises: RequestRejectedError."""
        check_version(version)
        with self._guard:
            if self._running is not None:
                self._running.set_version(version)
            self._version = version

    def setup_token_capture(
        self, dp_cfg: StagingStore | str, staging_partition: str, *, capture_media: bool = False
    ) -> None:
        """Install the prompt preparer and the token stager on a leader's engine; followers install
        nothing. Before the first engine they are kept for it. None: text rows need no media spec.

        ``dp_cfg``: the store that receives the rows, which the caller keeps open; or its URL, which
        the worker opens, and closes when it is shut down.

        Raises: ConfigError for media, or if capture is set up already; what opening raises.
        """
        with self._guard:
            if not self._is_leader:
                return
            if self._capture is not None:
                raise ConfigError("token capture is set up already", key=staging_partition)
            pair = make_capture(dp_cfg, staging_partition, capture_media=capture_media)
            if self.engine is not None:
                self.engine.install_capture(preparer=pair.preparer, stager=pair.stager)
            self._capture = pair

    @property
    def capture(self) -> CapturePair | None:
        """The installed hooks, with their counters."""
        return self._capture

    def report_dp_openai_server_base_url(self) -> str | None:
        """``http://host:port/v1`` of this worker's server; None on a follower or without one."""
        return None if self._server is None else self._server.base_url

    def get_inference_cuda_graph_capture_count(self) -> int:
        """CUDA graphs that this worker's engine holds; 0 where it runs eagerly or not at all."""
        return 0 if self.engine is None else self.engine.cuda_graph_count()

    def shutdown(self, *, drain_timeout_s: float = 0.0) -> None:
        """End server, engine and threads; nothing of this worker is left behind. Idempotent.

        Requests under way get up to ``drain_timeout_s`` to finish and are then cancelled. Every
        part is ended, whatever another one raises; then that is raised.
        """
        with self._guard, contextlib.ExitStack() as parts:
            server, running = self._server, self._running
            if drain_timeout_s > 0:
                with contextlib.suppress(DeadlineError, EngineStateError, EngineDeadError):
                    self.drain(drain_timeout_s)
            if self._capture is not None:
                parts.callback(self._capture.close)
            self._init_inference_engine_state()
            if running is not None:
                parts.callback(running.close)
            if server is not None:
                parts.callback(server.close)  # the last one runs first

    # ---- generating

    def generate(self, *, data: Mapping[str, Any], greedy: bool = False) -> Batch:
        """The answers to a batch, in its order; ``worker.batches`` has the keys and shapes.

        Raises: EngineStateError before the engine was prepared, DeadlineError, and what a request
        raises (the others are then cancelled).
        """
        running = self._require_engine("generate")
        requests = to_requests(data, self.config, greedy=greedy)
        results = running.call(
            all_in_order(running.engine, requests, self.config.request_timeout_s),
            what="generate",
            timeout_s=threading.TIMEOUT_MAX,  # the deadline inside does not count stand-downs
        )
        return to_batch(results, self._pad_token_id)

    async def generate_async(
        self, data: Mapping[str, Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, Batch]]:
        """``(index in the batch, a batch of one)`` as answers finish. Raises as ``generate``."""
        engine = self._require_engine("generate").engine
        requests = to_requests(data, self.config, greedy=greedy)
        timeout_s = self.config.request_timeout_s
        async for index, result in as_they_finish(engine, requests, timeout_s):
            yield index, to_batch([result], self._pad_token_id)

    # ---- inside

    @property
    def _pad_token_id(self) -> int:
        return self.config.pad_token_id or 0

    def _initialize_inference_engine(self) -> None:
        own = self.config.megatron
        apply_inference_cuda_graph_scope(self._model, own)
        engine = MegatronDynamicEngine(
            self._model,
            self._loaded.info,
            self._loaded.detokenize,
            settings=to_dynamic_settings(self.config),
            mode="coordinator" if own.use_coordinator else "direct",
            megatron_extra=to_megatron_extra(self.config),
        )
        self._running = RunningEngine(engine, self.config)
        try:
            if self._capture is not None:
                engine.install_capture(preparer=self._capture.preparer, stager=self._capture.stager)
            if self._version is not None:
                self.set_rollout_weight_version(self._version)
            if own.expose_http_server and self._is_leader:
                self._setup_openai_api_server()
        except BaseException:
            version, capture = self._version, self._capture
            self._capture = None  # kept, with its store, for the next start
            self.shutdown()
            self._version, self._capture = version, capture
            raise

    def _setup_openai_api_server(self) -> None:
        if self.engine is None or self._store is None:
            raise ConfigError("the HTTP server needs an engine and a staging store")
        self._server = WorkerServer(
            self.engine,
            self._loaded,
            self._store,
            defaults=http_sampling_defaults(self.config),
            host=self._host,
            port=self._port,
            control_token=self._control_token,
            start_timeout_s=self.config.start_timeout_s,
        )

    def _sleep(self) -> None:
        """Pause and suspend, giving the memory back; no-op when asleep."""
        self._require_engine("sleep").move("sleep", lambda to: to.sleep("recompute"))

    def _wake(self) -> None:
        """Resume and unpause; no-op when awake."""
        self._require_engine("wake").move("wake", lambda to: to.wake())

    def _require_engine(self, what: str) -> RunningEngine:
        if self._running is None:
            raise EngineStateError(
                f"cannot {what}: the engine is not prepared",
                expected="prepare_for_generation before",
                got=EngineState.CLOSED.value,
            )
        return self._running
