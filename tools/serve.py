"""``tokenplane serve``: the OpenAI server over one model and one staging store."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, get_args

from tokenplane.engine_adapter.server.bound_address import bind_socket
from tokenplane.engine_adapter.server.config import (
    ServerConfig,
    check_bind,
    parse_config,
    read_config_file,
)
from tokenplane.schemas.errors import ConfigError, TokenplaneError
from tokenplane.staging.store_url import parse_store_url, shown_url
from tokenplane.tools.command_frame import command_parser
from tokenplane.tools.serve_parts import open_replica_parts, open_serve_parts

logger = logging.getLogger("tokenplane.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        _check_replicas(config)
        api_key = _api_key(config)
    except ConfigError as error:
        print(f"tokenplane serve: {error.code}: {error}", file=sys.stderr)
        return 2
    try:
        _warn_of_memory(config)
        if config.replicas > 1:
            return _serve_replicas(config, control_token, api_key)
        # While the model loads nothing must end in order, and no event loop would hear of Ctrl-C.
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            return asyncio.run(_serve(config, control_token, api_key))
        finally:
            signal.signal(signal.SIGINT, before)
    except (TokenplaneError, OSError) as error:
        code = error.code if isinstance(error, TokenplaneError) else "os_error"
        print(f"tokenplane serve: {code}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def main(argv: list[str] | None = None) -> int:
    """The command by itself."""
    parser = command_parser("serve", __doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _check_replicas(config: ServerConfig) -> None:
    if config.replicas > 1 and parse_store_url(config.store).scheme == "memory":
        raise ConfigError(
            "several replicas need a store that they share",
            key="store",
            expected="file:, redis: or tq:",
            got=config.store,
        )


def _warn_of_memory(config: ServerConfig) -> None:
    if parse_store_url(config.store).scheme == "memory":
        logger.warning("captured rows end with this server: --store file:///FOLDER keeps them")


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
    with bind_socket(config.host, config.port) as listener:
        # Only now: torch, megatron-core and transformers take seconds to import.
        from tokenplane.engine_adapter.server.app import create_app
        from tokenplane.engine_adapter.server.server_http import run_http

        async with open_serve_parts(config, _cache_dir(config)) as parts:
            app = create_app(parts, control_token=control_token, api_key=api_key)
            model = parts.engine.info.model_id
            well = await run_http(app, parts, listener, lambda url: _announce(url, model, config))
            return 0 if well else 1


def _serve_replicas(config: ServerConfig, control_token: str | None, api_key: str | None) -> int:
    """Several workers. This process runs none of them: it starts them, waits, and ends them."""
    from tokenplane.engine_adapter.replicas.replica_serving import ReplicaServing
    from tokenplane.engine_adapter.replicas.replica_settings import ReplicaSettings

    stopped = threading.Event()

    def stop(_number: int, _frame: Any) -> None:
        stopped.set()
        for number in _SIGNALS:  # the second one does not wait: Ray dies with this process
            signal.signal(number, signal.SIG_DFL)

    def interrupt(number: int, _frame: Any) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        print("tokenplane serve: interrupted while starting", file=sys.stderr)
        raise SystemExit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, interrupt)
    with _stdout_kept() as stdout:
        serving = ReplicaServing(
            functools.partial(open_replica_parts, config, _cache_dir(config)),
            ReplicaSettings(
                replicas=config.replicas,
                host=config.host,
                port=config.port,
                ray_address=config.ray_address,
                cpus_per_replica=config.cpus_per_replica,
                gpus_per_replica=config.gpus_per_replica,
                max_in_flight=config.max_in_flight,
                start_timeout_s=config.start_timeout_s,
                drain_timeout_s=config.drain_timeout_s,
            ),
            control_token=control_token,
            api_key=api_key,
        )
        for number in _SIGNALS:  # only now: Ray has put handlers of its own there
            signal.signal(number, stop)
        try:
            workers = serving.health()["replicas"]
            model = next(iter(workers.values()))["model"]
            _announce(serving.base_url, model, config, stdout)
            if serving.wait(stopped):
                return 0
            logger.error("Ray has ended; stopping")
            return 1
        finally:
            serving.close()


@contextmanager
def _stdout_kept() -> Iterator[TextIO]:
    """The real stdout; what others write to theirs goes to stderr, as Ray's own code would."""
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        try:
            yield stdout
        finally:
            os.dup2(stdout.fileno(), 1)


def _announce(url: str, model: str, config: ServerConfig, stdout: TextIO | None = None) -> None:
    several = f", {config.replicas} replicas" if config.replicas > 1 else ""
    store = shown_url(config.store)
    line = f"tokenplane: ready {url} (model {model}, store {store}{several})"
    print(line, file=stdout or sys.stdout, flush=True)


if __name__ == "__main__":
    sys.exit(main())
