"""The locks: exact versions, hashes, one version everywhere, and what pyproject.toml asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = ("base", "build", "dev", "gym", "gym-full", "gym-nodeps", "uv")
ENTRY = re.compile(r"^(?P<requirement>[^\s#][^\\]*?)\s*\\\n(?P<hashes>(?:    --hash=.*\n)+)", re.M)


def read_lock(path: Path) -> dict[str, Requirement]:
    """The requirements of a lock by canonical name; fails on anything but pins with hashes."""
    text = path.read_text()
    pins: dict[str, Requirement] = {}
    for entry in ENTRY.finditer(text):
        requirement = Requirement(entry["requirement"])
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert re.fullmatch(r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", entry["hashes"])
        pins[canonicalize_name(requirement.name)] = requirement
    assert ENTRY.sub("", text).strip() == "", f"{path.name} holds more than pins with hashes"
    return pins


@pytest.fixture(scope="module")
def locks(root: Path) -> dict[str, dict[str, Requirement]]:
    return {name: read_lock(root / "requirements" / f"{name}.txt") for name in LOCKS}


def test_every_line_is_a_pin_with_hashes(locks: dict[str, dict[str, Requirement]]) -> None:
    assert all(locks[name] for name in LOCKS)


def test_there_is_no_other_lock(root: Path) -> None:
    found = {path.stem for path in (root / "requirements").glob("*.txt")}
    assert found == set(LOCKS)


def test_a_line_without_a_hash_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(f"a==1 \\\n    --hash=sha256:{'0' * 64}\nb==2\n")
    with pytest.raises(AssertionError, match="more than pins"):
        read_lock(tmp_path / "x.txt")


@pytest.mark.parametrize("name", ["base", "build"])
def test_a_package_has_one_version_in_all_locks(
    name: str, locks: dict[str, dict[str, Requirement]]
) -> None:
    for package, requirement in locks[name].items():
        if package in locks["dev"]:
            assert requirement.specifier == locks["dev"][package].specifier, package


def test_the_base_lock_holds_nothing_that_only_an_extra_needs(
    locks: dict[str, dict[str, Requirement]],
) -> None:
    assert set(locks["base"]) < set(locks["dev"])
    heavy = {"ray", "redis", "torch", "transformers", "megatron-core", "fastapi", "tensordict"}
    assert not heavy & set(locks["base"])


def test_the_locks_fulfil_what_the_project_asks_for(
    locks: dict[str, dict[str, Requirement]], project: dict[str, Any]
) -> None:
    extras = project["project"]["optional-dependencies"].values()
    base = [Requirement(text) for text in project["project"]["dependencies"]]
    wanted = base + [Requirement(text) for extra in extras for text in extra]
    for lock, requirements in ((locks["base"], base), (locks["dev"], wanted)):
        for requirement in requirements:
            pin = lock[canonicalize_name(requirement.name)]
            (version,) = (spec.version for spec in pin.specifier)
            assert requirement.specifier.contains(version), f"{requirement}, but {pin}"
