"""The engine thread behind Megatron's coordinator: requests go out through its client.

Megatron's own loop steps the engine; ours has its turn where that loop asks for messages, so
commands, admissions and cancellations still happen between two steps. Every client call is made on
the loop's thread, which Megatron's client demands.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from tokenplane.engine_adapter.dynamic.coordinator_liveness import CoordinatorLiveness
from tokenplane.engine_adapter.dynamic.coordinator_process import CoordinatorProcess
from tokenplane.engine_adapter.dynamic.loop import BuildCore, DynamicLoop
from tokenplane.engine_adapter.dynamic.records import (
    EVIDENCE,
    FAILURE,
    megatron_sampling,
)
from tokenplane.engine_adapter.dynamic.request import DynamicRequest, make_result, parse_wire
from tokenplane.engine_adapter.dynamic.settings import DynamicSettings
from tokenplane.engine_adapter.engine import EngineState
from tokenplane.engine_adapter.engine_thread import Outcome
from tokenplane.engine_adapter.models.megatron_process import quiet_imports
from tokenplane.schemas.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    RequestCancelledError,
)

with quiet_imports():
    import numpy as np
    import zmq
    from megatron.core.inference.engines.dynamic_engine import EngineState as MegatronState
    from megatron.core.inference.inference_client import InferenceClient

_HOST = "127.0.0.1"
_POLL_S = 0.05
_STATES = {
    EngineState.RUNNING: MegatronState.RUNNING,
    EngineState.PAUSED: MegatronState.PAUSED,
    EngineState.SUSPENDED: MegatronState.SUSPENDED,
    EngineState.CLOSED: MegatronState.STOPPING,
}


class CoordinatedLoop(DynamicLoop):
    """Owns the coordinator's process (unless given one), the client and Megatron's engine loop."""

    def __init__(
        self,
        build: BuildCore,
        device: torch.device,
        settings: DynamicSettings,
        coordinator: CoordinatorProcess | None = None,
    ) -> None:
        """``coordinator``: one that runs already and has no engine; it is not ended here."""
        super().__init__(build, device)
        self._timeout_s = settings.start_timeout_s
        self._liveness = CoordinatorLiveness(settings.coordinator_timeout_s)
        self._given = coordinator
        self.coordinator: CoordinatorProcess | None = coordinator
        self._client: Any = None
        self._sent: dict[str, tuple[list[int], dict[str, Any]]] = {}
        """Prompt and wire form of what is under way, by key."""
        self._local: dict[str, Exception] = {}
        """Errors of requests that ended in this process, as the objects that they are."""

    async def serve(self) -> None:
        """Start coordinator, engine loop and client; run until closed, or until one of them ends.

        Raises: EngineDeadError if one ended by itself, or the coordinator no longer forwards
        messages; DeadlineError if it does not from the start; what its failure was.
        """
        core, loop = self.core, asyncio.get_running_loop()
        process = self.coordinator = self._given or self._open_coordinator()
        address = await asyncio.to_thread(process.address, self._timeout_s)
        core.before_step = self.between_steps
        engine_task: asyncio.Task[None] | None = None
        try:
            await core.start_listening_to_data_parallel_coordinator(
                inference_coordinator_port=int(address.rsplit(":", 1)[1]),
                launch_inference_coordinator=False,
                hostname=_HOST,
                loop=loop,
            )
            engine_task = core.engine_loop_task
            self._client = InferenceClient(address)
            await self._connect(process, loop)
            await self._registered(process, engine_task)
            self.ready()
            await self._watch(process, engine_task)
        finally:
            if self._client is not None:
                self._client.stop()
            if engine_task is not None:
                engine_task.cancel()
                await asyncio.gather(engine_task, return_exceptions=True)
            # Megatron's loop does this itself, unless it was cancelled before its first turn.
            await core.shutdown()

    async def _connect(self, process: CoordinatorProcess, loop: asyncio.AbstractEventLoop) -> None:
        """Megatron's handshake blocks; in short pieces, so that a dead process is seen. A piece
        sends its greeting again, which the coordinator ignores."""
        self._client.socket.setsockopt(zmq.RCVTIMEO, int(_POLL_S * 1000))
        ends = time.monotonic() + self._timeout_s
        while True:
            self._require_alive(process)
            try:
                self._client.start(loop)
                return
            except zmq.Again as error:
                if time.monotonic() > ends:
                    raise DeadlineError(
                        "the coordinator did not answer", expected=f"within {self._timeout_s} s"
                    ) from error
            await asyncio.sleep(0)

    def give_up(self) -> None:
        """See ``DynamicLoop.give_up``; the coordinator's process, if it is ours, ends at once."""
        super().give_up()
        if self.coordinator is not None and self.coordinator is not self._given:
            self.coordinator.kill()

    async def release(self) -> None:
        """Free the device and end the coordinator if it is ours."""
        await super().release()
        if self.coordinator is not None and self.coordinator is not self._given:
            await asyncio.to_thread(self.coordinator.close)

    def _open_coordinator(self) -> CoordinatorProcess:
        context = self.core.context
        return CoordinatorProcess(
            vocab_size=self.core.info.vocab_size,
            max_requests=int(context.max_requests),
            block_tokens=int(context.block_size_tokens),
            prefix_caching=bool(context.enable_prefix_caching),
            policy=context.prefix_caching_coordinator_policy.value,
            alpha=float(context.prefix_caching_routing_alpha),
        )

    async def _registered(
        self, process: CoordinatorProcess, engine_task: asyncio.Task[None]
    ) -> None:
        """Wait until the coordinator knows this engine: a request before that would end it.

        An epoch of None reaches every registered engine and changes nothing.
        """
        ends = time.monotonic() + self._timeout_s
        while not self.core.received_messages:
            if engine_task.done():
                await engine_task
            self._require_alive(process)
            if time.monotonic() > ends:
                raise DeadlineError(
                    "the coordinator did not register the engine",
                    expected=f"within {self._timeout_s} s",
                )
            self._client.set_generation_epoch(None)
            await asyncio.sleep(_POLL_S)

    async def _watch(self, process: CoordinatorProcess, engine_task: asyncio.Task[None]) -> None:
        listener = self._client.listener_task
        while True:
            done, _ = await asyncio.wait(
                {engine_task, listener}, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            if self.state is EngineState.CLOSED and engine_task in done:
                return
            for task in done:
                task.result()
                raise EngineDeadError("a part of the engine loop ended by itself")
            if not self.closed:
                self._require_alive(process)
                self._liveness.check(
                    heard=self.core.received_messages,
                    turns=self.core.turns,
                    waiting=bool(self._sent),
                    ask=lambda: self._client.set_generation_epoch(None),
                )

    @staticmethod
    def _require_alive(process: CoordinatorProcess) -> None:
        status = process.poll()
        if status is not None:
            raise EngineDeadError("the coordinator process has ended", got=status)

    def enter(self, state: EngineState) -> None:
        """See ``EngineThread.enter``; Megatron's loop follows."""
        super().enter(state)
        self.core.state = _STATES[state]

    def submit(self, prompt: list[int], wire: dict[str, Any]) -> None:
        """Send a request through the client."""
        key = str(wire["key"])
        self._sent[key] = (prompt, wire)
        future = self._client.add_request(prompt, megatron_sampling(wire))
        future.add_done_callback(lambda done: self._replied(key, done))

    def take_finished(self, request: DynamicRequest, record: Any) -> None:
        """The answer travels in the reply; an error's object cannot, so it is kept here."""
        if request.error is not None:
            self._local[request.key] = request.error
        elif request.cancelled:
            self._local[request.key] = RequestCancelledError(
                "the request was cancelled", key=request.key
            )

    def _replied(self, key: str, done: asyncio.Future[dict[str, Any]]) -> None:
        prompt, wire = self._sent.pop(key)
        if done.cancelled():
            return  # the client was stopped; whoever waits is told by _end
        outcome = self._local.pop(key, None) or _parse_reply(key, prompt, wire, done.result())
        self.resolve(key, outcome)
        self.publish()
        self.deliver()


def _parse_reply(
    key: str, prompt: list[int], wire: dict[str, Any], reply: dict[str, Any]
) -> Outcome:
    params = reply["sampling_params"]
    if FAILURE in params:
        code, message = params[FAILURE]
        return EngineError(message, key=key, code=code)
    if EVIDENCE not in params:
        return EngineError("the engine refused the request", key=key, got=reply["status"])
    routes = reply["routing_indices"]
    if routes is not None:
        _tag, packed = routes
        routes = np.array(packed["data"], dtype=np.dtype(packed["dtype"]))
    ids = np.array(prompt, dtype=np.int32)
    ids.flags.writeable = False
    _, sampling = parse_wire(wire)
    try:
        return make_result(
            key,
            ids,
            sampling,
            reply["generated_tokens"],
            reply["generated_log_probs"],
            routes,
            params[EVIDENCE],
        )
    except EngineError as error:
        return error
