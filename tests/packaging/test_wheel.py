"""What the wheel holds, and what it asks for."""

from __future__ import annotations

import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

# Built once, so all its tests stay on the worker that built it.
pytestmark = pytest.mark.slow


@pytest.fixture
def names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture
def metadata(wheel: Path, names: list[str]) -> Message:
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(zipfile.ZipFile(wheel).read(name).decode())


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(
    names: list[str], tracked: list[Path], root: Path, layers: tuple[str, ...]
) -> None:
    relative = [path.relative_to(root) for path in tracked if path.suffix != ".md"]
    expected = {f"tokenplane/{path.as_posix()}" for path in relative if path.parts[0] in layers}
    found = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert found == expected


def test_every_package_of_the_wheel_is_typed(names: list[str], layers: tuple[str, ...]) -> None:
    for layer in layers:
        assert f"tokenplane/{layer}/__init__.py" in names
        assert f"tokenplane/{layer}/py.typed" in names


def test_the_wheel_carries_the_license(names: list[str], wheel: Path, root: Path) -> None:
    (name,) = (name for name in names if name.endswith("/licenses/LICENSE"))
    assert zipfile.ZipFile(wheel).read(name) == (root / "LICENSE").read_bytes()


def test_the_base_install_asks_for_no_extra(metadata: Message) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    base = {r.name for r in requirements if r.marker is None}
    assert base == {"apsw", "httpx", "numpy", "orjson", "pyarrow", "pydantic", "rich"}
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_command_is_one_script(names: list[str], wheel: Path) -> None:
    (name,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(name).decode()
    assert text.split() == ["[console_scripts]", "tokenplane", "=", "tokenplane.tools.cli:main"]
