"""The server's settings: frozen, every key known, and a bind that is safe or refused."""

from __future__ import annotations

import ipaddress
import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tokenplane.engine_adapter.chat.tool_calls import ParserName
from tokenplane.engine_adapter.config_errors import LONGEST_TIMEOUT_S, config_error
from tokenplane.schemas.errors import ConfigError


class ServerConfig(BaseModel):
    """What ``tokenplane serve`` runs with; a flag or a key of the configuration file each."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: str = "smollm2"
    """What to load: smollm2 (SmolLM2-135M-Instruct), or tiny or tiny-moe (random, for tests)."""
    engine: Literal["cpu", "dynamic", "coordinated"] = "cpu"
    """cpu; or Megatron's dynamic engine on a GPU, stepped directly or behind its coordinator."""
    served_model_names: tuple[str, ...] = ()
    """Further names under which requests may ask for the model."""
    store: str = "memory:"
    """URL of the staging store."""
    host: str = "127.0.0.1"
    """Address to bind; other hosts need a control token."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one; the ready line names it."""
    weight_version: int = Field(default=0, ge=0)
    """Version of the weights as loaded: captured traffic needs one."""
    control_token_env: str = "TOKENPLANE_CONTROL_TOKEN"
    """Environment variable with the bearer token of the control routes."""
    api_key_env: str | None = None
    """Environment variable with the key that model calls must bring; None asks for none."""
    allow_weight_edit: bool = False
    """Serve ``/admin/perturb_weights``, which changes the model for demonstrations."""
    engine_log: Path | None = None
    """File to which the engine's own tokens of every request are appended, for checks. Several
    workers write one each, with their name appended."""

    replicas: int = Field(default=1, ge=1)
    """Workers behind the one base URL, with an engine each; above 1 they run under Ray Serve."""
    ray_address: str = "local"
    """Ray cluster for several workers; local starts one on loopback, for this server alone."""
    cpus_per_replica: float = Field(default=1.0, ge=0)
    """CPUs that Ray sets aside for each of several workers."""
    gpus_per_replica: float = Field(default=0.0, ge=0)
    """GPUs that Ray gives to each of several workers."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_TIMEOUT_S)
    """Until every one of several workers answers."""

    tool_parser: ParserName = "auto"
    """How this model writes tool calls; auto looks at its chat template."""
    split_reasoning: bool = False
    """Serve thoughts as ``reasoning_content`` instead of within the content."""
    temperature: float | None = Field(default=None, ge=0)
    """Of requests that name none; None takes the model's generation config. Likewise:"""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """1 keeps all."""
    top_k: int | None = Field(default=None, ge=-1)
    """0 keeps all."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Of which distribution log-probabilities are: the model's, or the one sampled from."""
    max_answer_tokens: int | None = Field(default=None, ge=1)
    """Token limit of requests that name none; None lets an answer fill the context."""
    max_sequence_length: int | None = Field(default=None, ge=2)
    """Lowers the model's own."""
    max_live_requests: int = Field(default=64, ge=1)
    """Computed together; more wait in order."""

    request_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_TIMEOUT_S)
    """For one answer, waiting for the engine included."""
    control_timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_TIMEOUT_S)
    """For one control call."""
    drain_timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_TIMEOUT_S)
    """How long a stopping server lets running calls finish."""
    heartbeat_s: float = Field(default=15.0, gt=0, le=LONGEST_TIMEOUT_S)
    """A stream with nothing to say for so long sends a comment, so that no proxy cuts it."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Larger requests get 413."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Model calls at once; further ones get 503."""
    threads: int = Field(default=16, ge=1)
    """Of the pool that renders, resolves and stages."""
    prefix_cache_bytes: int = Field(default=256 * 2**20, ge=0)
    """Memory for resolved prefixes."""
    cache_dir: Path | None = None
    """Where converted models are kept; None takes the user's cache folder."""


def parse_config(values: dict[str, Any]) -> ServerConfig:
    """Checked settings.

    Raises:
        ConfigError: an unknown key or a value out of range; names the first.
    """
    try:
        return ServerConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error) from error


def read_config_file(path: Path) -> dict[str, Any]:
    """The keys of a TOML or JSON file.

    Raises:
        ConfigError: unreadable, or no table of keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the configuration file cannot be read: {error}", key=str(path)
        ) from error
    if not isinstance(values, dict):
        raise ConfigError("the configuration file holds no table", key=str(path))
    return values


def check_bind(host: str, control_token: str | None) -> None:
    """Refuse to offer the control routes to other hosts without a token.

    Raises:
        ConfigError: ``host`` is no loopback address and there is no token.
    """
    if control_token or is_loopback(host):
        return
    raise ConfigError(
        "a bind to other hosts needs a control token",
        expected="a loopback host, or a token in the environment",
        got=host,
    )


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and addresses that only this host reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
