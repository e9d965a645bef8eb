"""The parts of a server, wired: engine, renderer, store, ledger, resolver, stager, call path."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenplane.capture.failures import CaptureFailure, FailureLog
from tokenplane.capture.ledger import Ledger
from tokenplane.capture.prefix_resolver import PrefixResolver
from tokenplane.capture.prompt_preparer import TQMegatronPromptPreparer
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.capture.unsaved_failures import UnsavedFailures
from tokenplane.engine_adapter.call_path.call_path import CallPath, CallPathLimits
from tokenplane.engine_adapter.chat.renderer import TokenizerChatRenderer, read_terminator_ids
from tokenplane.engine_adapter.chat.text import AnswerText, Detokenize
from tokenplane.engine_adapter.chat.tool_calls import open_parser
from tokenplane.engine_adapter.engine import Engine
from tokenplane.engine_adapter.metrics import ServerMetrics
from tokenplane.engine_adapter.server.config import ServerConfig
from tokenplane.engine_adapter.server.openai_answers import AnswerBuilder
from tokenplane.engine_adapter.server.openai_sampling import SamplingDefaults, parse_defaults
from tokenplane.schemas.errors import StoreError
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_url import shown_url
from tokenplane.staging.token_sink import TokenSink
from tokenplane.staging.token_source import TokenSource

logger = logging.getLogger("tokenplane.server")


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Everything that the routes use. ``close`` ends what this object owns, not the store."""

    config: ServerConfig
    engine: Engine
    store: StagingStore
    ledger: Ledger
    failures: FailureLog
    unsaved: UnsavedFailures
    """Failures whose rows the store has not taken yet."""
    resolver: PrefixResolver
    stager: TQMegatronTokenStager
    path: CallPath
    answers: AnswerBuilder
    defaults: SamplingDefaults
    metrics: ServerMetrics
    model_names: tuple[str, ...]
    """Names that requests may use; the first is the one that ``/v1/models`` lists first."""

    async def close(self) -> None:
        """End the engine, then wait for what is still being staged or recorded."""
        await self.engine.close()
        self.path.close()
        await asyncio.to_thread(self.unsaved.close)


def build_parts(
    config: ServerConfig,
    *,
    engine: Engine,
    tokenizer: Any,
    generation_config: Mapping[str, Any],
    detokenize: Detokenize,
    store: StagingStore,
) -> ServerParts:
    """The parts over an engine and an open store, which stay the caller's until ``close``.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template.
        generation_config: sampling defaults and end ids, as in ``generation_config.json``.

    Raises:
        ConfigError: the tokenizer cannot render chats, or a default is out of range.
    """
    info = engine.info
    terminators = read_terminator_ids(tokenizer, generation_config) | frozenset(info.eos_token_ids)
    renderer = TokenizerChatRenderer(tokenizer, terminators)
    metrics = ServerMetrics()
    ledger = Ledger(store)
    unsaved = UnsavedFailures(ledger.record_failure)
    failures = FailureLog(on_failure=_on_failure(unsaved, metrics))
    resolver = PrefixResolver(TokenSource(store), max_bytes=config.prefix_cache_bytes)
    sink = TokenSink(store, on_staged=ledger.note)
    stager = TQMegatronTokenStager(sink, resolver=resolver, failures=failures)
    template = tokenizer.chat_template
    answers = AnswerBuilder(
        AnswerText(detokenize, renderer.special_token_ids, renderer.token_text),
        open_parser(config.tool_parser, template if isinstance(template, str) else str(template)),
        split_thoughts=config.split_reasoning,
    )
    path = CallPath(
        engine,
        renderer,
        store,
        ledger=ledger,
        preparer=TQMegatronPromptPreparer(resolver),
        stager=stager,
        answers=answers,
        terminator_ids=terminators,
        failures=failures,
        metrics=metrics,
        limits=CallPathLimits(request_timeout_s=config.request_timeout_s, threads=config.threads),
    )
    names = dict.fromkeys((info.name, info.model_id, *config.served_model_names))
    parts = ServerParts(
        config=config,
        engine=engine,
        store=store,
        ledger=ledger,
        failures=failures,
        unsaved=unsaved,
        resolver=resolver,
        stager=stager,
        path=path,
        answers=answers,
        defaults=parse_defaults(
            generation_config,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            logprobs_mode=config.logprobs_mode,
            max_answer_tokens=config.max_answer_tokens,
        ),
        metrics=metrics,
        model_names=tuple(names),
    )
    metrics.add_gauges(lambda: read_gauges(parts))
    return parts


def _on_failure(unsaved: UnsavedFailures, metrics: ServerMetrics) -> Any:
    def record(failure: CaptureFailure) -> None:
        metrics.count_failure(failure.code)
        unsaved.record(failure)

    return record


def read_gauges(parts: ServerParts) -> dict[str, float]:
    """What ``/metrics`` shows of the present moment. Reads the store."""
    stats, cache = parts.engine.stats(), parts.resolver.stats()
    version = parts.engine.weight_version()
    gauges: dict[str, float] = {
        "engine_live_requests": stats.live_requests,
        "engine_waiting_requests": stats.waiting_requests,
        "engine_kv_tokens": stats.kv_tokens,
        "engine_generated_tokens": stats.generated_tokens,
        "weight_version": -1 if version is None else version,
        "prefix_cache_hits": cache.hits,
        "prefix_cache_misses": cache.misses,
        "prefix_cache_bytes": cache.nbytes,
    }
    try:
        held = parts.store.stats(STAGED_PARTITION)
    except StoreError as error:
        logger.warning("the store's sizes cannot be read: %s", error)
        return {**gauges, "store_up": 0}
    return {**gauges, "store_up": 1, "staged_rows": held.rows, "staged_bytes": held.bytes}


def read_status(parts: ServerParts) -> dict[str, Any]:
    """What ``/admin/status`` shows. Reads the store."""
    engine = parts.engine
    try:
        held: dict[str, Any] = dataclasses.asdict(parts.store.stats(STAGED_PARTITION))
    except StoreError as error:
        held = {"error": {"code": error.code, "message": str(error)}}
    return {
        "model": engine.info.model_id,
        "engine": engine.info.engine,
        "state": engine.state().value,
        "weight_version": engine.weight_version(),
        "engine_stats": dataclasses.asdict(engine.stats()),
        "prefix_cache": dataclasses.asdict(parts.resolver.stats()),
        "store": {
            "url": shown_url(parts.store.url),
            "durable": parts.store.durable,
            "staged": held,
        },
        "staged_calls": parts.stager.staged_count,
        "epoch_spanning_calls": parts.stager.epoch_span_count,
        "capture_failures": parts.failures.counts(),
    }
