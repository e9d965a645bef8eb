"""What a run does before its generation workers start: completes the configuration, picks them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from tokenplane.engine_adapter.worker.generation_config import GenerationConfig
from tokenplane.schemas.errors import ConfigError

REAPING_VARIABLE = "RAY_process_group_cleanup_enabled"
"""Read by Ray's raylet at its own start."""


def resolve_generation_class(config: GenerationConfig | Mapping[str, Any]) -> type[Any]:
    """The worker class for a configuration's backend. Raises: ConfigError for another backend."""
    backend = config.get("backend") if isinstance(config, Mapping) else config.backend
    if backend != "megatron":
        raise ConfigError("no such generation backend", expected="megatron", got=repr(backend))
    from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker

    return MegatronGenerationWorker


def configure_generation_config(
    config: GenerationConfig,
    tokenizer: Any,
    is_eval: bool = False,
    has_refit_draft_weights: bool = False,
    trains_mtp: bool = False,
    draft_full_refit: bool = False,
) -> GenerationConfig:
    """The configuration completed from the tokenizer and from what the trainer will send.

    - ``pad_token_id`` and ``stop_token_ids`` from the tokenizer where unset.
    - ``load_weights`` where unset: "placeholder" if the first refit overwrites every weight, else
      "real". Real for evaluation, where no refit comes; and for speculative decoding, unless the
      drafter's whole set arrives: by ``draft_full_refit``, or by the trained MTP head together with
      refit draft weights.

    Raises: ConfigError if the tokenizer names no end, or refit flags contradict each other.
    """
    if draft_full_refit and not has_refit_draft_weights:
        raise ConfigError("a full draft refit without draft weights", key="draft_full_refit")
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    changes: dict[str, Any] = {}
    if config.stop_token_ids is None:
        if eos is None:
            raise ConfigError("the tokenizer names no end of sequence", key="stop_token_ids")
        changes["stop_token_ids"] = (int(eos),)
    if config.pad_token_id is None:
        if pad is None and eos is None:
            raise ConfigError("the tokenizer names no padding", key="pad_token_id")
        changes["pad_token_id"] = int(eos if pad is None else pad)
    if config.load_weights is None:
        drafter_arrives = draft_full_refit or (has_refit_draft_weights and trains_mtp)
        overwritten = not is_eval and (not config.speculative_decoding or drafter_arrives)
        changes["load_weights"] = "placeholder" if overwritten else "real"
    return config.model_copy(update=changes)


def draft_full_refit_enabled(policy_cfg: Mapping[str, Any]) -> bool:
    """Whether the trainer streams the drafter's full weight set on refit.

    True for draft co-training on the Automodel path, which exports the drafter's whole state under
    ``draft.``; Megatron's own path streams a part. ``automodel_cfg.enabled`` identifies the path.
    """
    automodel = policy_cfg.get("automodel_cfg") or {}
    draft = policy_cfg.get("draft") or {}
    return bool(automodel.get("enabled")) and bool(draft.get("enabled"))


def maybe_configure_engine_reaping_env(
    enabled: bool, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Let the raylet end the process group of a dead generation worker; call before ``ray.init``.

    A killed worker runs none of its own clean-up, and its engine process would keep the GPU. The
    raylet reads the variable when it starts, so this reaches only a raylet that the driver starts
    (a local run); a cluster sets it where ``ray start`` runs. An explicit value stays, 0 too: an
    operator may want to look at a wedged engine.
    """
    if enabled:
        environ.setdefault(REAPING_VARIABLE, "1")
