"""Folders, package list, type-checker links, names and sizes say the same thing."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

NAMESPACE = "tokenplane"
MAX_LINES = 350
"""Where a file is split by job; 300 is the aim."""

VAGUE = {"common", "helpers", "misc", "utils"}


def product_files(root: Path, layers: tuple[str, ...]) -> list[Path]:
    return [path for layer in layers for path in sorted((root / layer).rglob("*.py"))]


def test_every_package_is_listed_and_mapped_to_its_folder(
    root: Path, layers: tuple[str, ...], project: dict[str, Any]
) -> None:
    config = project["tool"]["setuptools"]
    folders = {
        f"{NAMESPACE}.{init.parent.relative_to(root).as_posix().replace('/', '.')}": (
            init.parent.relative_to(root).as_posix()
        )
        for layer in layers
        for init in (root / layer).rglob("__init__.py")
    }
    assert sorted(config["packages"]) == sorted(folders)
    assert config["package-dir"] == folders


def test_every_folder_with_modules_is_a_typed_package(root: Path, layers: tuple[str, ...]) -> None:
    for folder in {path.parent for path in product_files(root, layers)}:
        assert (folder / "__init__.py").is_file(), folder
        assert (folder / "py.typed").is_file(), folder


def test_the_links_of_the_type_checkers_lead_to_the_folders(
    root: Path, layers: tuple[str, ...]
) -> None:
    links = root / ".typings" / NAMESPACE
    assert sorted(path.name for path in links.iterdir()) == sorted(layers)
    for layer in layers:
        assert (links / layer).is_symlink()
        assert (links / layer).resolve() == root / layer


def test_the_editable_install_imports_the_files_of_the_tree(
    root: Path, layers: tuple[str, ...]
) -> None:
    for layer in layers[:3]:
        module = importlib.import_module(f"{NAMESPACE}.{layer}")
        assert module.__file__ == str(root / layer / "__init__.py")


def test_no_module_is_named_like_a_dependency_or_the_standard_library(
    root: Path, layers: tuple[str, ...]
) -> None:
    # "tests", "scripts" and the like come from careless wheels; nobody imports them.
    careless = {"recipe", "scripts", "tests", "tutorial"}
    taken = (set(packages_distributions()) - careless) | sys.stdlib_module_names | VAGUE
    clashes = [
        path.relative_to(root).as_posix()
        for path in product_files(root, layers)
        if path.stem in taken or path.parent.name in taken
    ]
    assert not clashes


def test_no_product_file_does_more_than_one_job(root: Path, layers: tuple[str, ...]) -> None:
    lengths = {
        path.relative_to(root).as_posix(): len(path.read_text().splitlines())
        for path in product_files(root, layers)
    }
    assert not {name: count for name, count in lengths.items() if count > MAX_LINES}


def test_test_files_have_unique_names(root: Path) -> None:
    seen: dict[str, Path] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        assert path.name not in seen, f"{path} and {seen[path.name]}"
        seen[path.name] = path


def test_the_extras_are_those_of_the_design(project: dict[str, Any]) -> None:
    assert list(project["project"]["optional-dependencies"]) == [
        "redis",
        "ray",
        "megatron",
        "bridge",
        "demo",
        "dev",
    ]
