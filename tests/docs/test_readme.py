"""What the README shows works as it says, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_tour_prints_what_the_readme_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    script = tmp_path / "tour.py"
    script.write_text(code.replace("file:///tmp/tour", f"file://{tmp_path}/store"))
    shown = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert shown.split("]")[:2] == ["[1 2 3 7 8 4 5 7 8", " [0 0 0 1 1 0 0 1 1"]
    assert "3  3 -1 -1  3  3" in shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    for link in links:
        if not link.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / link).exists(), link
