"""What a loaded model is, and the fingerprints that tell one from another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokenplane.engine_adapter.engine import EngineInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str], None]
"""Receives one line per stage of a long load."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that an engine and a server need of a model."""

    model: torch.nn.Module
    """A megatron-core GPTModel with ``cpu.attention``'s seams, in evaluation mode."""
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
