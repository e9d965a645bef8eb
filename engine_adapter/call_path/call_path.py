"""The path of one call: admission, rendering, prefix, splice, engine, staging, answer.

Without HTTP. The row is durable before the answer exists for anybody (DESIGN invariant 2). Whatever
hashes, renders, reads or writes runs in a bounded pool of threads, never on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson

from tokenplane.capture.failures import FailureLog
from tokenplane.capture.hook_types import (
    COORDS_KEY,
    PREFIX_KEY,
    SPLICE_KEY,
    PreparedPrefix,
    SpliceInputs,
)
from tokenplane.capture.ledger import Ledger
from tokenplane.capture.ledger_index import LedgerRow
from tokenplane.capture.prompt_preparer import TQMegatronPromptPreparer
from tokenplane.capture.splice import ChatTemplateRenderer
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.engine_adapter.call_path.admission import Admissions, Admitted
from tokenplane.engine_adapter.call_path.call_staging import CompletionStaging
from tokenplane.engine_adapter.call_path.call_types import (
    CallOutcome,
    CallTimings,
    ChatPrompt,
    ModelCall,
    StandaloneCapture,
)
from tokenplane.engine_adapter.call_path.flights import Flights
from tokenplane.engine_adapter.engine import Engine, GenerationRequest, GenerationResult
from tokenplane.engine_adapter.metrics import ServerMetrics
from tokenplane.engine_adapter.server.openai_answers import AnswerBuilder
from tokenplane.schemas.epochs import spans_epochs
from tokenplane.schemas.errors import (
    DeadlineError,
    PrefixError,
    RequestCancelledError,
    RequestRejectedError,
    SpliceError,
    TokenplaneError,
)
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.schemas.tokens import Int32Array
from tokenplane.staging.store import StagingStore

logger = logging.getLogger("tokenplane.server")

OnTokens = Callable[[np.ndarray], None]


class FingerprintedRenderer(ChatTemplateRenderer, Protocol):
    """A chat template renderer that can say which template it is."""

    @property
    def template_fingerprint(self) -> str:
        """Hex digest of the template."""


@dataclass(frozen=True, slots=True)
class CallPathLimits:
    """Bounds of one call path."""

    request_timeout_s: float = 600.0
    """From the engine's admission to its answer, waiting included."""
    threads: int = 16
    """Of the pool that renders, resolves and stages."""
    kept_timings: int = 4096
    """Calls whose timings are remembered for the control routes."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    prompt: Int32Array
    offload_params: dict[str, Any] | None
    """For the stager; None where nothing is captured."""

    @property
    def prefix(self) -> PreparedPrefix | None:
        found = (self.offload_params or {}).get(PREFIX_KEY)
        return found if isinstance(found, PreparedPrefix) else None


class CallPath:
    """Serves model calls of one engine and one store. Belongs to one event loop.

    Args:
        terminator_ids: ids on which the model ends a turn.
        failures: shared with ``stager``; its callback should write failure rows and count.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: FingerprintedRenderer,
        store: StagingStore,
        *,
        ledger: Ledger,
        preparer: TQMegatronPromptPreparer,
        stager: TQMegatronTokenStager,
        answers: AnswerBuilder,
        terminator_ids: frozenset[int],
        failures: FailureLog,
        metrics: ServerMetrics,
        limits: CallPathLimits | None = None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._store = store
        self._preparer = preparer
        self._answers = answers
        self._terminator_ids = terminator_ids
        self._failures = failures
        self._metrics = metrics
        self._limits = limits or CallPathLimits()
        self._admissions = Admissions(ledger, failures)
        self._staging = CompletionStaging(
            stager, ledger, failures, engine.info, renderer.template_fingerprint
        )
        self._flights = Flights()
        self._pool = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="tokenplane-call")
        self._timings: OrderedDict[str, CallTimings] = OrderedDict()
        self.stopping = False
        """Set when the server drains: a call that is cancelled then was not left by its client."""

    async def serve(self, call: ModelCall, *, on_tokens: OnTokens | None = None) -> CallOutcome:
        """The served answer; its row is durable when this returns, if it says ``staged``.

        Cancelling the awaiting task cancels the request in the engine; nothing is staged then,
        and the rollout's failure is ``client_disconnected``.

        Args:
            on_tokens: see ``GenerationRequest``; not called for a repeated request.

        Raises:
            RequestRejectedError, ContextOverflowError, LedgerError: the request is at fault.
            PrefixError, SpliceError: the prefix or its continuation cannot be proven; nothing was
                generated.
            EngineError: the engine cannot answer; DeadlineError: not in time.
            StoreError: an earlier run of this request is there and cannot be read.
        """
        capture = call.capture
        try:
            if isinstance(capture, StandaloneCapture) and capture.idempotency_key is not None:
                outcome = await self._flights.run(
                    capture, capture.idempotency_key, lambda: self._lead(call, on_tokens)
                )
            else:
                outcome = await self._lead(call, on_tokens)
        except asyncio.CancelledError:
            self._metrics.count_call("cancelled")
            raise
        except TokenplaneError as error:
            self._metrics.count_call(error.code)
            raise
        self._metrics.count_call("repeated" if outcome.repeated else outcome.status)
        return outcome

    async def in_pool[T](self, work: Callable[[], T]) -> T:
        """Run blocking work in the path's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def timings(self, model_call_id: str) -> CallTimings | None:
        """The times of a recent call of this process."""
        return self._timings.get(model_call_id)

    def close(self) -> None:
        """Wait for what is being staged or recorded; nothing can be served afterwards."""
        self._pool.shutdown(wait=True)

    async def _lead(self, call: ModelCall, on_tokens: OnTokens | None) -> CallOutcome:
        started = time.perf_counter()
        admitted = await self.in_pool(lambda: self._admissions.admit(call))
        earlier = admitted.earlier
        if earlier is not None:
            return await self.in_pool(lambda: self._repeat(earlier))
        try:
            prepared = await self.in_pool(lambda: self._prepare(call, admitted))
            result = await self._generate(call, prepared, on_tokens)
        except (asyncio.CancelledError, RequestCancelledError) as error:
            self._record_cancelled(admitted, getattr(error, "code", "client_disconnected"))
            raise
        finishing = asyncio.ensure_future(
            self.in_pool(lambda: self._finish(call, admitted, prepared, result, started))
        )
        try:
            outcome = await asyncio.shield(finishing)
        except asyncio.CancelledError:
            # The answer exists and its row may be half way: let it become whole, so that the same
            # request finds it when it comes again.
            await asyncio.wait({finishing})
            raise
        self._measure(outcome, admitted, prepared, result)
        return outcome

    def _repeat(self, earlier: LedgerRow) -> CallOutcome:
        """The answer of the earlier run, from its row."""
        columns = ["staging_key", "response_body"]
        row = self._store.get(STAGED_PARTITION, [earlier.staging_key], columns)[0]
        body = orjson.loads(row.column("response_body")[0].as_py())
        return CallOutcome(body, "staged", earlier.model_call_id, repeated=True)

    def _prepare(self, call: ModelCall, admitted: Admitted) -> _Prepared:
        """The prompt to be conditioned on: rendered, or the staged prefix and the new suffix."""
        admission = admitted.admission
        if admission is None:
            return _Prepared(self._render(call), None)
        params = dict(admitted.offload_params)
        prompt: Int32Array | None = None
        if admission.mode == "token_in" and isinstance(call.prompt, ChatPrompt):
            # The suffix comes from the conversation: the whole need not be rendered and encoded.
            params[SPLICE_KEY] = SpliceInputs(
                renderer=self._renderer,
                messages=call.prompt.messages,
                tools=call.prompt.tools,
                template_kwargs=dict(call.prompt.template_kwargs),
                terminator_ids=self._terminator_ids,
            )
        else:
            prompt = self._render(call)
        try:
            ready = self._preparer.prepare_prompt(prompt, offload_params=params)
        except (PrefixError, SpliceError) as error:
            self._failures.record(
                rollout_id=admission.rollout_id,
                model_call_id=admission.model_call_id,
                code=error.code,
                message=str(error),
            )
            raise
        return _Prepared(ready.prompt, ready.offload_params)

    def _render(self, call: ModelCall) -> Int32Array:
        """int32[P]: the ids of the whole prompt, as the model's template prints it."""
        prompt = call.prompt
        if not isinstance(prompt, ChatPrompt):
            if prompt.token_ids is not None:
                return prompt.token_ids
            return self._renderer.encode(prompt.text)
        try:
            text = self._renderer.render(
                prompt.messages,
                prompt.tools,
                add_generation_prompt=True,
                template_kwargs=prompt.template_kwargs,
            )
        except Exception as error:
            # Templates refuse conversations by raising, with whatever their authors chose.
            logger.info("the chat template raised", exc_info=True)
            raise RequestRejectedError(
                f"the model's chat template refuses this conversation: {error}",
                code="template_refused",
                key="messages",
            ) from error
        return self._renderer.encode(text)

    async def _generate(
        self, call: ModelCall, prepared: _Prepared, on_tokens: OnTokens | None
    ) -> GenerationResult:
        # The routes of the prefix are in its rows: a growing rollout ships each route once.
        held = 0 if prepared.prefix is None else len(prepared.prefix.prefix.token_ids)
        request = GenerationRequest(call.answer_id, prepared.prompt, call.sampling, on_tokens, held)
        limit = self._limits.request_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._engine.generate(request)
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                "the answer did not come in time", expected=f"within {limit:g} s"
            ) from error

    def _finish(
        self,
        call: ModelCall,
        admitted: Admitted,
        prepared: _Prepared,
        result: GenerationResult,
        started: float,
    ) -> CallOutcome:
        """Build the answer, stage the row, and only then hand the answer out."""
        body = self._answers.build(call, result)
        staged = None
        if prepared.offload_params is not None:
            params = prepared.offload_params
            staged = self._staging.stage(call, admitted, prepared.prompt, params, result, body)
        prefix = prepared.prefix
        timings = CallTimings(
            resolve_s=0.0 if prefix is None else prefix.resolve_s,
            splice_s=0.0 if prefix is None else prefix.splice_s,
            queue_s=result.queue_s,
            prefill_s=result.prefill_s,
            decode_s=result.decode_s,
            stage_s=0.0 if staged is None else staged.stage_s,
            total_s=time.perf_counter() - started,
        )
        if staged is None:
            return CallOutcome(body, admitted.status, admitted.model_call_id, timings=timings)
        if staged.staged and (first := self._admissions.preceded_by(admitted)) is not None:
            return self._repeat(first)
        if staged.coords is not None and admitted.decision is None:
            body = {**body, COORDS_KEY: staged.coords.model_dump()}
        status = "staged" if staged.staged else admitted.status
        return CallOutcome(body, status, admitted.model_call_id, timings=timings)

    def _measure(
        self,
        outcome: CallOutcome,
        admitted: Admitted,
        prepared: _Prepared,
        result: GenerationResult,
    ) -> None:
        if outcome.timings is not None:
            self._metrics.observe(outcome.timings)
            if outcome.model_call_id is not None:
                self._timings[outcome.model_call_id] = outcome.timings
                if len(self._timings) > self._limits.kept_timings:
                    self._timings.popitem(last=False)
        if outcome.status == "staged" and admitted.admission is not None:
            self._metrics.count_staged(
                carried=len(result.prompt_token_ids) - admitted.admission.prev_len,
                generated=len(result.generated_token_ids),
                source="root" if prepared.prefix is None else prepared.prefix.prefix.source,
                spans=spans_epochs(result.policy_epochs),
            )

    def _record_cancelled(self, admitted: Admitted, code: str) -> None:
        """Off the event loop, as long as there is somewhere else."""
        code = "server_stopped" if self.stopping else code
        record = functools.partial(self._admissions.record_cancelled, admitted, code)
        try:
            self._pool.submit(record)
        except RuntimeError:  # the path was closed meanwhile
            record()
