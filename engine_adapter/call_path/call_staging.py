"""From a finished generation and its served answer to one staged row, with its whole evidence."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import orjson

from tokenplane.capture.core import failed_coords
from tokenplane.capture.failures import FailureLog
from tokenplane.capture.hook_types import (
    CONTEXT_KEY,
    CallContext,
    FinishedRequestRecord,
    OffloadedRequestPayload,
)
from tokenplane.capture.ledger import Ledger
from tokenplane.capture.token_stager import StageOutcome, TQMegatronTokenStager
from tokenplane.engine_adapter.call_path.admission import Admitted
from tokenplane.engine_adapter.call_path.call_types import ModelCall
from tokenplane.engine_adapter.engine import EngineInfo, GenerationResult, SamplingParams
from tokenplane.schemas.staged_row import CallEvidence, LedgerEntry, Sampling
from tokenplane.schemas.tokens import Int32Array, first_difference

logger = logging.getLogger("tokenplane.server")


class CompletionStaging:
    """Stages answered calls; never raises for one. Thread-safe."""

    def __init__(
        self,
        stager: TQMegatronTokenStager,
        ledger: Ledger,
        failures: FailureLog,
        info: EngineInfo,
        template_fingerprint: str,
    ) -> None:
        self._stager = stager
        self._ledger = ledger
        self._failures = failures
        self._info = info
        self._template_fingerprint = template_fingerprint

    def stage(
        self,
        call: ModelCall,
        admitted: Admitted,
        prompt: Int32Array,
        offload_params: dict[str, Any],
        result: GenerationResult,
        body: dict[str, Any],
    ) -> StageOutcome | None:
        """What became of the row; None without an admission.

        Args:
            prompt: int32[P], what the engine was given.
            offload_params: as the prompt preparer left them.
            body: the served object, which the row keeps for a repeated request.
        """
        at = first_difference(result.prompt_token_ids, prompt)
        if at is not None:
            # The row would be true to the engine, but the next turn could not be true to the row.
            return self._failed(
                admitted,
                result,
                "engine_prompt_differs",
                f"the engine was conditioned on other ids than it was given, from token {at} on",
            )
        drift = _drift(call.sampling, result.sampling)
        if drift:
            # A trainer corrects for the distribution that the row names; nobody asked for this one.
            return self._failed(
                admitted,
                result,
                "sampling_differs",
                f"the engine sampled in another way than it was asked to: {'; '.join(drift)}",
            )
        entry = None
        if admitted.decision is not None:
            try:
                entry = self._ledger_entry(admitted, body)
            except Exception as error:
                # Invariant 3: the answer exists and is served, whatever is wrong here.
                logger.exception("the ledger columns of %s", admitted.model_call_id)
                reason = f"{type(error).__name__}: {error}"
                return self._failed(admitted, result, "ledger_entry_failed", reason)
        context = CallContext(self._evidence(call, admitted, result), entry)
        return self._stager.stage_admitted(
            call.answer_id,
            OffloadedRequestPayload(
                prompt_token_ids=result.prompt_token_ids,
                generated_token_ids=result.generated_token_ids,
                generated_log_probs=result.generated_log_probs,
                routing_indices=result.routing_indices,
                routing_start=result.routing_start,
            ),
            finished_metadata=FinishedRequestRecord(
                policy_epoch=result.policy_epochs,
                kv_cache_epoch=result.kv_cache_epochs,
                num_evictions=result.num_evictions,
            ),
            offload_params={**offload_params, CONTEXT_KEY: context},
        )

    def _failed(
        self, admitted: Admitted, result: GenerationResult, code: str, message: str
    ) -> StageOutcome | None:
        self._failures.record(
            rollout_id=admitted.rollout_id,
            model_call_id=admitted.model_call_id or "",
            code=code,
            message=message,
        )
        if admitted.admission is None:
            return None
        version = result.policy_epochs[0][1] if result.policy_epochs else 0
        return StageOutcome(failed_coords(admitted.admission, version), 0.0)

    def _ledger_entry(self, admitted: Admitted, body: dict[str, Any]) -> LedgerEntry | None:
        if admitted.decision is None:
            return None
        choice = body["choices"][0]
        return self._ledger.entry_for(
            admitted.decision,
            response_id=body["id"],
            response_messages=[choice["message"]] if "message" in choice else [],
            response_body=orjson.dumps(body).decode(),
        )

    def _evidence(
        self, call: ModelCall, admitted: Admitted, result: GenerationResult
    ) -> CallEvidence:
        """Without epochs: the stager adds those of the finished request."""
        used = result.sampling
        return CallEvidence(
            policy_epochs=(),
            sampling=Sampling(
                temperature=used.temperature,
                top_k=used.top_k,
                top_p=used.top_p,
                max_tokens=used.max_tokens,
                seed=used.seed,
                stop_token_ids=used.stop_token_ids,
                stop_strings=used.stop_strings,
                ignore_eos=used.ignore_eos,
            ),
            logprobs_mode=used.logprobs_mode,
            finish_reason=result.finish_reason,
            stop_reason=None if result.stop_reason is None else json.dumps(result.stop_reason),
            model=call.model,
            model_fingerprint=self._info.model_fingerprint,
            tokenizer_fingerprint=self._info.tokenizer_fingerprint,
            template_fingerprint=self._template_fingerprint,
            engine=self._info.engine,
            admitted_at=admitted.admitted_at,
        )


def _drift(asked: SamplingParams, used: SamplingParams) -> list[str]:
    """Where the effective parameters are not the ones asked for. An engine may draw the seed where
    none was given, and lower the token limit to what fits."""
    fitted = dataclasses.replace(
        asked,
        seed=used.seed if asked.seed is None else asked.seed,
        max_tokens=min(asked.max_tokens, used.max_tokens),
    )
    return [
        f"{field.name}: asked {getattr(fitted, field.name)!r}, used {getattr(used, field.name)!r}"
        for field in dataclasses.fields(SamplingParams)
        if getattr(fitted, field.name) != getattr(used, field.name)
    ]
