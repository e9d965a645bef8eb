"""``load_model``: from a short spec to a Megatron model with its tokenizer and identity."""

from __future__ import annotations

from pathlib import Path

from tokenplane.engine_adapter.engine import EngineInfo
from tokenplane.engine_adapter.models.identity import (
    LoadedModel,
    Progress,
    fingerprint_tokenizer,
    fingerprint_weights,
)
from tokenplane.engine_adapter.models.megatron_process import engine_version
from tokenplane.schemas.errors import ConfigError

__all__ = ["MODEL_SPECS", "LoadedModel", "load_model"]

MODEL_SPECS = ("tiny", "tiny-moe", "smollm2")


def load_model(
    spec: str, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> LoadedModel:
    """The model that ``spec`` names: "tiny", "tiny-moe" (random, for tests) or "smollm2".

    "smollm2" is converted once and kept under ``cache_dir`` (default ``~/.cache/tokenplane``);
    ``progress`` hears of each stage. Each call gives a model of its own.

    Raises: ConfigError for another spec, or if the packages that it needs are not installed.
    """
    if spec not in MODEL_SPECS:
        raise ConfigError("no such model", expected=" or ".join(MODEL_SPECS), got=spec)
    if spec == "smollm2":
        from tokenplane.engine_adapter.models.smollm2 import load_smollm2

        folder = cache_dir or Path("~/.cache/tokenplane").expanduser()
        return load_smollm2(folder, progress or (lambda _line: None))
    return _load_tiny(spec)


def _load_tiny(spec: str) -> LoadedModel:
    from tokenplane.engine_adapter.models.megatron_tiny import (
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
