"""What ``tokenplane serve`` serves: store, model, engine and parts, opened and closed as one."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenplane.engine_adapter.server.config import ServerConfig
from tokenplane.schemas.errors import ConfigError, EngineError, StoreError

if TYPE_CHECKING:
    from tokenplane.engine_adapter.engine import Engine
    from tokenplane.engine_adapter.models.identity import LoadedModel
    from tokenplane.engine_adapter.server.parts import ServerParts
    from tokenplane.staging.store import StagingStore

logger = logging.getLogger("tokenplane.server")


@asynccontextmanager
async def open_serve_parts(
    config: ServerConfig, cache_dir: Path | None
) -> AsyncIterator[ServerParts]:
    """The parts of one server; its engine bears the configured weight version.

    Raises: ConfigError, StoreError.
    """
    # Only now: torch, megatron-core and transformers take seconds to import.
    from tokenplane.engine_adapter.engine_log import LoggedEngine
    from tokenplane.engine_adapter.models.source import load_model
    from tokenplane.engine_adapter.server.parts import build_parts
    from tokenplane.staging.open_store import open_store

    with open_store(config.store) as store:
        loaded = load_model(config.model, cache_dir=cache_dir, progress=_progress)
        _keep_tokenizer(store, loaded.tokenizer)
        engine = _open_engine(config, loaded)
        if config.engine_log is not None:
            engine = LoggedEngine(engine, config.engine_log)
        parts = build_parts(
            config,
            engine=engine,
            tokenizer=loaded.tokenizer,
            generation_config=loaded.generation_config,
            detokenize=loaded.detokenize,
            store=store,
        )
        try:
            await engine.set_weight_version(config.weight_version)
            yield parts
        finally:
            await parts.close()


@asynccontextmanager
async def open_replica_parts(
    config: ServerConfig, cache_dir: Path | None, name: str
) -> AsyncIterator[ServerParts]:
    """The same in a worker of that name, among several."""
    if config.engine_log is not None:
        own = config.engine_log.with_name(f"{config.engine_log.name}.{name}")
        config = config.model_copy(update={"engine_log": own})
    async with open_serve_parts(config, cache_dir) as parts:
        yield parts


def _open_engine(config: ServerConfig, loaded: LoadedModel) -> Engine:
    if config.engine == "cpu":
        from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine

        return MegatronCpuEngine(
            loaded.model,
            loaded.info,
            loaded.detokenize,
            max_live_requests=config.max_live_requests,
            max_sequence_length=config.max_sequence_length,
        )
    import torch

    from tokenplane.engine_adapter.dynamic.engine import MegatronDynamicEngine
    from tokenplane.engine_adapter.dynamic.settings import parse_settings

    model, on_gpu = loaded.model, torch.cuda.is_available()
    try:
        if on_gpu:
            from tokenplane.engine_adapter.dynamic.gpu_model import gpu_twin

            model = gpu_twin(loaded.model)
        return MegatronDynamicEngine(
            model,
            loaded.info,
            loaded.detokenize,
            settings=parse_settings(
                {
                    "max_live_requests": config.max_live_requests,
                    "max_sequence_length": config.max_sequence_length,
                }
            ),
            mode="direct" if config.engine == "dynamic" else "coordinator",
        )
    except (AssertionError, RuntimeError) as error:
        if on_gpu:
            raise EngineError(
                "the dynamic engine did not start", got=f"{type(error).__name__}: {error}"
            ) from error
        raise ConfigError(
            f"the dynamic engine needs a CUDA device: {error}", key="engine", got=config.engine
        ) from error


def _keep_tokenizer(store: StagingStore, tokenizer: Any) -> None:
    """For whoever reads the rows as text. Serving does without, so a full store only loses that."""
    from tokenplane.engine_adapter.tokenizer_artifact import store_tokenizer

    try:
        store_tokenizer(store, tokenizer)
    except StoreError as error:
        logger.warning("the tokenizer was not stored: %s: %s", error.code, error)


def _progress(line: str) -> None:
    print(f"tokenplane: {line}", file=sys.stderr, flush=True)
