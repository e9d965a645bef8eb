"""``load_model``: from a short spec to a Megatron model with its tokenizer and identity."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokenplane.engine_adapter.engine import EngineInfo
from tokenplane.engine_adapter.megatron_process import engine_version, prepare_process
from tokenplane.schemas.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str], None]
"""Receives one line per stage of a long load."""

MODEL_SPECS = ("tiny", "tiny-moe", "smollm2")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that an engine and a server need of a model."""

    model: torch.nn.Module
    """A megatron-core GPTModel with ``cpu_attention``'s seams, in evaluation mode."""
    tokenizer: PreTrainedTokenizerBase
    info: EngineInfo
    generation_config: Mapping[str, Any]
    """Sampling defaults and end ids, with the keys of a ``generation_config.json``."""

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens included, nothing cleaned up."""
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


def load_model(spec: str, *, progress: Progress | None = None) -> LoadedModel:
    """The model that ``spec`` names: "tiny", "tiny-moe" (random, for tests) or "smollm2".

    "smollm2" is converted once and cached; ``progress`` hears of it. Each call gives a model of
    its own.

    Raises: ConfigError for another spec, or if the packages that it needs are not installed.
    """
    if spec not in MODEL_SPECS:
        raise ConfigError("no such model", expected=" or ".join(MODEL_SPECS), got=spec)
    prepare_process()
    return _load_tiny(spec)


def _load_tiny(spec: str) -> LoadedModel:
    from tokenplane.engine_adapter.megatron_tiny import (
        MAX_SEQUENCE_LENGTH,
        tiny_model,
        tiny_tokenizer,
    )

    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), moe=spec == "tiny-moe")
    eos = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    info = EngineInfo(
        name=spec,
        model_id=f"tokenplane/{spec}",
        model_fingerprint=fingerprint_weights(model),
        tokenizer_fingerprint=fingerprint_tokenizer(tokenizer),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        eos_token_ids=eos,
        vocab_size=len(tokenizer),
        engine=engine_version(),
    )
    return LoadedModel(model, tokenizer, info, {"eos_token_id": list(eos)})


def fingerprint_weights(model: torch.nn.Module) -> str:
    """Hex SHA-256 over every parameter in name order: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        tensor = parameter.detach().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Hex SHA-256 of the fast tokenizer's own serialization (vocabulary, merges, added tokens)."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
