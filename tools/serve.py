"""``tokenplane serve``: the OpenAI server over one model and one staging store."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tokenplane.engine_adapter.server.config import (
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
    from tokenplane.engine_adapter.server.parts import ServerParts
    from tokenplane.staging.store import StagingStore

logger = logging.getLogger("tokenplane.server")


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
        from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine
        from tokenplane.engine_adapter.engine_log import LoggedEngine
        from tokenplane.engine_adapter.models.source import load_model
        from tokenplane.engine_adapter.server.app import create_app
        from tokenplane.engine_adapter.server.parts import build_parts
        from tokenplane.engine_adapter.server.server_http import run_http
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
                well = await run_http(app, parts, listener, lambda url: _announce(url, parts))
                return 0 if well else 1
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


def _announce(url: str, parts: ServerParts) -> None:
    store = shown_url(parts.config.store)
    model = parts.engine.info.model_id
    print(f"tokenplane: ready {url} (model {model}, store {store})", flush=True)


def _progress(line: str) -> None:
    print(f"tokenplane: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
