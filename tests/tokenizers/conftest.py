"""The real tokenizers, loaded once, and how a test names one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.tokenizers.splice_rollout import TERMINATORS
from tokenplane.engine_adapter.chat_renderer import TokenizerChatRenderer, open_renderer

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
        return open_renderer(tokenizers_folder / name, TERMINATORS[name])

    return load
