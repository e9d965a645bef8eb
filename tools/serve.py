"""``tokenplane serve``: the OpenAI server over one model and one staging store."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tokenplane.engine_adapter.server_config import (
    ServerConfig,
    check_bind,
    parse_config,
    read_config_file,
    shown_url,
)
from tokenplane.schemas.errors import ConfigError, StoreError, TokenplaneError
from tokenplane.tools.command_frame import command_parser

if TYPE_CHECKING:
    from tokenplane.engine_adapter.engine import Engine
    from tokenplane.engine_adapter.server_parts import ServerParts
    from tokenplane.staging.store import StagingStore

logger = logging.getLogger("tokenplane.server")

_ENGINE_POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; a flag wins over the configuration file, which wins over defaults."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML or JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="log every refusal")
    for name, field in ServerConfig.model_fields.items():
        flag = "--" + name.replace("_", "-")
        kind: dict[str, Any] = {"dest": name, "default": None, "help": field.description}
        if field.annotation is bool:
            kind["action"] = argparse.BooleanOptionalAction
        elif name == "served_model_names":
            flag, kind["action"], kind["metavar"] = "--served-model-name", "append", "NAME"
        else:
            kind["metavar"] = name.rpartition("_")[2].upper()
            choices = get_args(field.annotation)
            if choices and all(isinstance(choice, str) for choice in choices):
                kind["choices"] = choices
                del kind["metavar"]
        parser.add_argument(flag, **kind)


def read_settings(args: argparse.Namespace) -> ServerConfig:
    """The settings of a parsed command line.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    values = {} if args.config is None else read_config_file(args.config)
    given = {name: getattr(args, name) for name in ServerConfig.model_fields}
    return parse_config(
        values | {name: value for name, value in given.items() if value is not None}
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0 after an orderly end, 1 after a failure, 2 for bad settings."""
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        config = read_settings(args)
        control_token = os.environ.get(config.control_token_env) or None
        check_bind(config.host, control_token)
        api_key = _api_key(config)
    except ConfigError as error:
        print(f"tokenplane serve: {error.code}: {error}", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_serve(config, control_token, api_key))
    except (TokenplaneError, OSError) as error:
        code = error.code if isinstance(error, TokenplaneError) else "os_error"
        print(f"tokenplane serve: {code}: {error}", file=sys.stderr)
        return 1


def main(argv: list[str] | None = None) -> int:
    """The command by itself."""
    parser = command_parser("serve", __doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _api_key(config: ServerConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError("the environment holds no API key", key=config.api_key_env)
    return key


def _cache_dir(config: ServerConfig) -> Path | None:
    if config.cache_dir is not None:
        return config.cache_dir
    folder = os.environ.get("TOKENPLANE_CACHE")
    return Path(folder) if folder else None


async def _serve(config: ServerConfig, control_token: str | None, api_key: str | None) -> int:
    with _bound(config) as listener:
        # Only now: torch, megatron-core and transformers take seconds to import.
        from tokenplane.engine_adapter.cpu_engine import MegatronCpuEngine
        from tokenplane.engine_adapter.engine_log import LoggedEngine
        from tokenplane.engine_adapter.model_source import load_model
        from tokenplane.engine_adapter.server_app import create_app
        from tokenplane.engine_adapter.server_parts import build_parts
        from tokenplane.staging.open_store import open_store

        with open_store(config.store) as store:
            loaded = load_model(config.model, cache_dir=_cache_dir(config), progress=_progress)
            _keep_tokenizer(store, loaded.tokenizer)
            engine: Engine = MegatronCpuEngine(
                loaded.model,
                loaded.info,
                loaded.detokenize,
                max_live_requests=config.max_live_requests,
                max_sequence_length=config.max_sequence_length,
            )
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
                app = create_app(parts, control_token=control_token, api_key=api_key)
                return await _run_http(app, parts, listener)
            finally:
                await parts.close()


def _keep_tokenizer(store: StagingStore, tokenizer: Any) -> None:
    """For whoever reads the rows as text. Serving does without, so a full store only loses that."""
    from tokenplane.engine_adapter.tokenizer_artifact import store_tokenizer

    try:
        store_tokenizer(store, tokenizer)
    except StoreError as error:
        logger.warning("the tokenizer was not stored: %s: %s", error.code, error)


def _bound(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError:
        listener.close()
        raise
    return listener


async def _run_http(app: Any, parts: ServerParts, listener: socket.socket) -> int:
    import uvicorn

    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=max(1, round(parts.config.drain_timeout_s)),
    )

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours end the process with a status of its own, uvicorn's by the signal again

    server = Server(config)
    stop = _stopper(parts, server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    announcing = asyncio.ensure_future(_announce(parts, server, listener))
    watching = asyncio.ensure_future(_watch_engine(parts, stop))
    try:
        await server.serve([listener])
    finally:
        announcing.cancel()
        watching.cancel()
    return 1 if watching.done() and not watching.cancelled() else 0


def _stopper(parts: ServerParts, server: Any) -> Callable[[], None]:
    def stop() -> None:
        server.force_exit = server.should_exit  # the second signal does not wait
        parts.path.stopping = True
        server.should_exit = True

    return stop


async def _announce(parts: ServerParts, server: Any, listener: socket.socket) -> None:
    """The one ready line, once ``/health`` answers 200."""
    while not server.started:  # noqa: ASYNC110 - uvicorn has a flag, no event
        await asyncio.sleep(0.01)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"tokenplane: ready http://{shown}:{port} "
        f"(model {parts.engine.info.model_id}, store {shown_url(parts.config.store)})",
        flush=True,
    )


async def _watch_engine(parts: ServerParts, stop: Callable[[], None]) -> None:
    """A dead engine answers nothing any more: end, so that a supervisor starts a new one."""
    from tokenplane.engine_adapter.engine import EngineState

    while parts.engine.state() is not EngineState.DEAD:  # noqa: ASYNC110 - it is read elsewhere
        await asyncio.sleep(_ENGINE_POLL_S)
    logger.error("the engine is dead; stopping")
    stop()


def _progress(line: str) -> None:
    print(f"tokenplane: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
