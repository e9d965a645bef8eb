"""The story that the commands are tried on: made once, copied for whoever damages it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tools.stories import Story, tell


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store, not to be changed."""
    story = tell(tmp_path_factory.mktemp("told") / "store")
    story.store.close()
    return story.path


@pytest.fixture
def story(told: Path, tmp_path: Path) -> Story:
    """An open store of one's own with the same rows."""
    shutil.copytree(told, tmp_path / "store")
    return Story(tmp_path / "store")
