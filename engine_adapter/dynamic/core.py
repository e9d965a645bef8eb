"""Megatron's dynamic engine with our requests in it: two subclasses, nothing patched.

``StepController`` sees each sampled id before Megatron's bookkeeping, so that stop ids, stop
strings, failures and cancellations end a request in the very step that they belong to.
``HookedEngine`` overrides what megatron-core 0.19.2 leaves open: admission (``add_request``),
scheduling (to stamp KV epochs) and the end (``post_process_requests``). Everything here runs on the
engine's one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenplane.engine_adapter.dynamic.admission import Admission
from tokenplane.engine_adapter.dynamic.prefix import BlockEpochs, clear_prefix_cache
from tokenplane.engine_adapter.dynamic.records import EVIDENCE, FAILURE, MegatronSampling
from tokenplane.engine_adapter.dynamic.request import DynamicRequest
from tokenplane.engine_adapter.dynamic.sampling import RequestSampling, SampledRow
from tokenplane.engine_adapter.engine import EngineInfo
from tokenplane.engine_adapter.models.megatron_process import quiet_imports
from tokenplane.engine_adapter.sampling_stops import Detokenize
from tokenplane.schemas.errors import ContextOverflowError, EngineError

with quiet_imports():
    import msgpack  # type: ignore[import-untyped]
    from megatron.core.inference.config import KVCacheManagementMode
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
    from megatron.core.inference.engines.dynamic_engine import EngineState as MegatronState
    from megatron.core.inference.headers import Headers
    from megatron.core.inference.inference_request import Status
    from megatron.core.inference.text_generation_controllers import text_generation_controller
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

Finished = Callable[[DynamicRequest, Any], None]
"""Called on the engine thread with each ended request and Megatron's record of it."""


class StepController(text_generation_controller.TextGenerationController):
    """Megatron's controller, with our sampling and our say in which requests end."""

    def __init__(self, wrapped_model: Any, tokenizer: Any) -> None:
        super().__init__(inference_wrapped_model=wrapped_model, tokenizer=tokenizer)
        self._sampled: Any = None
        self._on_sampled: Callable[[Sequence[int], Sequence[int], Any], None] | None = None

    def attach(self, engine: HookedEngine) -> None:
        """Ask ``engine`` what each row wants and which rows end."""
        self._sampling = RequestSampling(engine)
        self._on_sampled = engine.take_samples

    def _transfer_samples_to_cpu(self, active_request_count: int) -> Any:
        result = super()._transfer_samples_to_cpu(active_request_count)
        self._sampled = result[0]
        return result

    def _apply_stop_word_finished_ids(
        self, active_request_ids: Any, active_request_mask: Any
    ) -> None:
        if self._on_sampled is not None:
            self._on_sampled(
                active_request_ids.tolist(), self._sampled.tolist(), active_request_mask
            )


class HookedEngine(DynamicInferenceEngine):
    """Megatron's dynamic engine that knows our requests."""

    def __init__(
        self,
        controller: StepController,
        context: Any,
        info: EngineInfo,
        detokenize: Detokenize | None,
    ) -> None:
        """Captures CUDA graphs if the model's configuration says so. Must run on the engine thread,
        inside its event loop, which the engine keeps."""
        self.info = info
        self.admission = Admission(info, detokenize, self._tokenize)
        self.hooks = self.admission.hooks
        self.callbacks = self.admission.callbacks
        self.live: dict[int, DynamicRequest] = {}
        """By Megatron's request id."""
        self.version: int | None = None
        self.on_finished: Finished = _nobody
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.evictions = 0
        self.steps = 0
        self.step_s = 0.0
        self.before_step: Callable[[], None] = _nothing
        """Called before each look for messages of the coordinator."""
        self.received_messages = 0
        self.turns = 0
        """Looks for messages of the coordinator."""
        super().__init__(controller=controller, context=context)
        controller.attach(self)
        self.block_epochs = BlockEpochs(context)

    # ---- what each step asks

    def rows(self, context: Any) -> Sequence[SampledRow | None]:
        """See ``RowSource.rows``."""
        active = context.request_ids[context.paused_request_count : context.total_request_count]
        partial = context.chunked_prefill_request_id
        return [None if i == partial else self.live.get(i) for i in active.tolist()]

    def take_samples(self, ids: Sequence[int], tokens: Sequence[int], mask: Any) -> None:
        """Give each request its sampled id; clear the mask of those that end with it."""
        self.computed_tokens += int(self.context.active_token_count)
        for row, (request_id, token) in enumerate(zip(ids, tokens, strict=True)):
            request = self.live.get(request_id)
            if request is None or request_id == self.context.chunked_prefill_request_id:
                continue  # the sample of an unfinished prefill means nothing
            self.generated_tokens += not request.over
            if request.take(token):
                mask[row] = 0

    async def async_step(self) -> Any:
        """Megatron's step, counted."""
        began = time.monotonic()
        result = await super().async_step()
        self.steps += 1
        self.step_s += time.monotonic() - began
        return result

    def schedule_requests(self) -> int:
        """Megatron's look for messages, at the top of its loop: our turn between two steps."""
        self.before_step()
        self.turns += 1
        if self.state is MegatronState.STOPPING:
            return 0
        epoch = self._generation_epoch
        count = int(super().schedule_requests())
        self.received_messages += count
        if self._generation_epoch != epoch and self._generation_epoch is not None:
            self.set_version(self._generation_epoch)  # another client of the coordinator set it
        return count

    # ---- admission

    def add_request(self, request_id: int, prompt: Any, sampling_params: Any = None) -> Any:
        """Megatron's admission, with our request beside it. Never raises: see ``Admission``."""
        if sampling_params is None:
            sampling_params = MegatronSampling()
        request = self.admission.request(request_id, prompt, sampling_params, self.version)
        self.live[request_id] = request
        sampling_params.termination_id = -1
        sampling_params.stop_words = None
        sampling_params.return_log_probs = sampling_params.skip_prompt_log_probs = True
        sampling_params.num_tokens_total = None
        sampling_params.num_tokens_to_generate = request.sampling.max_tokens
        future = super().add_request(request_id, request.prompt.tolist(), sampling_params)
        inner = self.requests[request_id].record[-1]
        inner.prompt = ""  # else Megatron decodes the prompt when it ends; text is ours to make
        if inner.status is Status.FAILED:
            request.error = request.error or ContextOverflowError(
                "the engine has no room for this request", key=request.key, got=len(request.prompt)
            )
            self._end(request_id, self.requests[request_id].record)
        elif request.over:
            self.withdraw(request_id)
        return future

    def _tokenize(self, text: str) -> Any:
        return self.controller.tokenize_prompt(self.controller.tokenizer, text)

    # ---- scheduling, epochs

    def schedule_waiting_requests(self) -> None:
        """Megatron's scheduling; requests that it starts learn which epochs fill their cache."""
        waiting = list(self.waiting_request_ids)
        super().schedule_waiting_requests()
        partial = self.context.chunked_prefill_request_id
        still = set(self.waiting_request_ids) - {partial}
        for request_id in waiting:
            request = self.live.get(request_id)
            if request is not None and request_id not in still and not request.in_context:
                inner = self.get_request(request_id)
                reused = self._reused(request_id)
                request.started(self.block_epochs.pieces(inner, reused, self.version))

    def _reused(self, request_id: int) -> int:
        """How many positions of a request that has just started come from the prefix cache."""
        rows = self.context.request_ids[: self.context.total_request_count].tolist()
        return int(self.context.request_kv_length_offsets[rows.index(request_id)])

    def set_version(self, version: int) -> None:
        """The weights are ``version`` from the next step on."""
        if version == self.version:
            return
        self.version = self._generation_epoch = version
        self.block_epochs.set_version(version)
        partial = self.context.chunked_prefill_request_id
        for request_id, request in self.live.items():
            computed = None
            if request_id == partial:
                computed = int(self.get_request(request_id).finished_chunk_token_count)
            request.change_version(version, computed)

    def clear_prefixes(self) -> int:
        """Forget every cached prefix; how many blocks were forgotten.

        A prefill under way registers no further block: its later ones build on forgotten ones.
        """
        partial = self.context.chunked_prefill_request_id
        if partial in self.requests:
            self.get_request(partial).precomputed_block_hashes = []
        return clear_prefix_cache(self.context)

    def suspend_kv(self, mode: str) -> None:
        """Suspend; "recompute" frees the KV cache and restarts every request's prefill."""
        if mode == "recompute":
            self.context.kv_cache_management_mode = KVCacheManagementMode.RECOMPUTE
            for request in self.live.values():
                self.evictions += request.dropped(self.version)
        self.suspend()

    def resume_kv(self) -> None:
        """Undo ``suspend_kv``; a freed KV cache is allocated and CUDA graphs are captured anew."""
        self.resume()
        self.context.kv_cache_management_mode = KVCacheManagementMode.PERSIST

    # ---- the end of a request

    def post_process_requests(
        self,
        request_ids: Any,
        finished_request_ids: Any,
        evict_request_ids: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Megatron's bookkeeping, then ours for what was evicted or has ended."""
        active, finished = super().post_process_requests(
            request_ids, finished_request_ids, evict_request_ids, *args, **kwargs
        )
        if evict_request_ids is not None:
            for request_id in evict_request_ids.tolist():
                self.evictions += self.live[request_id].dropped(self.version)
        for record in finished:
            self._end(record.request_id, record)
        return active, finished

    def withdraw(self, request_id: int) -> None:
        """End a request that holds no KV cache (it waits, or was evicted), outside a step."""
        entry = self.requests.pop(request_id)
        if request_id in self.waiting_request_ids:
            self.waiting_request_ids.remove(request_id)
        elif self.resume_request_ids and request_id in self.resume_request_ids:
            self.resume_request_ids.remove(request_id)
        inner = entry.record[-1]
        inner.status = Status.FAILED
        inner.add_event_fail()
        self._end(request_id, entry.record)
        entry.future.cancel()
        self.reply(entry.record)

    def reply(self, record: Any) -> None:
        """Answer the coordinator for a request that ends outside a step; nobody in direct mode."""
        if self.use_coordinator and self.is_mp_coordinator:
            answer = [Headers.ENGINE_REPLY.value, [record.merge().serialize()]]
            self.socket_for_receiving_requests.send(msgpack.packb(answer, use_bin_type=True))

    def kv_gauges(self) -> tuple[int, int]:
        """Positions whose keys and values are held, and the bytes of their blocks."""
        context = self.context
        if not context.is_tensor_state_allocated:
            return 0, 0
        rows = slice(0, context.total_request_count)
        tokens = int(context.request_kv_length_offsets[rows].sum())
        blocks = int(context.request_kv_block_counts[rows].sum())
        return tokens, blocks * int(context.block_size_bytes)

    def cuda_graph_count(self) -> int:
        """CUDA graphs that are captured now; 0 while a recompute-suspend has freed them."""
        if self.capture_stats is None or not self.context.is_tensor_state_allocated:
            return 0
        return len(self.context.cuda_graph_batch_dimensions_list)

    def free(self) -> None:
        """Give the KV cache and the CUDA graphs back, and leave Megatron's inference mode."""
        self.context.kv_cache_management_mode = KVCacheManagementMode.RECOMPUTE
        self.context.deallocate_inference_state_buffers()
        if self.cuda_graph_impl == "local":
            delete_cuda_graphs()
        InferenceMode.unset_active()

    def _end(self, request_id: int, record: Any) -> None:
        request = self.live.pop(request_id)
        for inner in record.requests:
            # merge() joins these lists, and fails where an interrupted pass left none.
            inner.generated_log_probs = inner.generated_log_probs or []
            inner.prompt_log_probs = inner.prompt_log_probs or []
        attributes: dict[str, Any] = {EVIDENCE: request.evidence()}
        if request.error is not None:
            code = getattr(request.error, "code", EngineError.code)
            attributes[FAILURE] = [code, str(request.error)]
        if request.error is not None or request.cancelled:
            self.hooks.forget(record)
        else:
            attributes |= self.hooks.stage(request, record)
        record.requests[0].sampling_params.add_attributes(attributes)
        self.on_finished(request, record)


def _nothing() -> None:
    """Stands in where Megatron's loop does not run."""


def _nobody(request: DynamicRequest, record: Any) -> None:
    """Stands in until a loop takes the finished requests."""
