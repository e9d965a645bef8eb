"""Who may import whom: between the five packages, and from outside."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

BASE = {"apsw", "httpx", "numpy", "orjson", "pyarrow", "pydantic", "pydantic_core", "rich"}
"""Import names of the base install: any module may use them."""

OWNERS = {
    "accelerate": "engine_adapter/*",
    "einops": "engine_adapter/*",
    "fastapi": "engine_adapter/*",
    "gguf": "engine_adapter/*",
    "jinja2": "engine_adapter/*",
    "megatron": "engine_adapter/*",
    "msgpack": "engine_adapter/*",
    "omegaconf": "engine_adapter/*",
    "openai": "tools/*",
    "prometheus_client": "engine_adapter/*",
    "ray": "staging/tq_backend/* engine_adapter/replicas/*",
    "redis": "staging/redis_backend/*",
    "safetensors": "engine_adapter/*",
    "starlette": "engine_adapter/*",
    "tensordict": "staging/tq_backend/*",
    "tokenizers": "engine_adapter/*",
    # TransferQueue takes and gives tensors.
    "torch": "engine_adapter/* staging/tq_backend/*",
    "transfer_queue": "staging/tq_backend/*",
    "transformers": "engine_adapter/*",
    "uvicorn": "engine_adapter/*",
    "zmq": "engine_adapter/*",
    # The shipped contract suites are tests that users run.
    "hypothesis": "*/testing.py */contract_suite/*",
    "pytest": "*/testing.py */contract_suite/*",
}
"""Import names of the extras, and the only files that may name them (patterns by spaces)."""

LAZY_ANYWHERE = {"torch"}
"""May be imported inside a function of any package, where a tensor enters or leaves Arrow."""


class Found:
    """One import: the absolute dotted name, where it is, and whether it runs on import."""

    def __init__(self, path: str, line: int, name: str, *, lazy: bool) -> None:
        self.path = path
        self.name = name
        self.top = name.split(".")[0]
        self.lazy = lazy
        self.where = f"{path}:{line}: imports {name}"


def find_imports(source: str, path: str) -> Iterator[Found]:
    """Every import, at any depth; `lazy` for those inside a function or under TYPE_CHECKING."""
    yield from _walk(ast.parse(source), path, lazy=False)


def _walk(node: ast.AST, path: str, *, lazy: bool) -> Iterator[Found]:
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = True
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Found(path, child.lineno, alias.name, lazy=lazy)
        elif isinstance(child, ast.ImportFrom):
            if child.level:
                yield Found(path, child.lineno, "." * child.level + (child.module or ""), lazy=lazy)
            elif child.module == "tokenplane":
                for alias in child.names:
                    yield Found(path, child.lineno, f"tokenplane.{alias.name}", lazy=lazy)
            else:
                yield Found(path, child.lineno, child.module or "", lazy=lazy)
        yield from _walk(child, path, lazy=inside)


def offences(found: Found, layers: tuple[str, ...]) -> str | None:
    """Why this import is not allowed, or None."""
    layer = found.path.split("/")[0]
    if found.name.startswith("."):
        return "a relative import"
    if found.top == "tokenplane":
        target = found.name.split(".")[1] if "." in found.name else ""
        below = layers[: layers.index(layer) + 1]
        return None if target in below else f"{layer} is below {target}"
    if found.top in sys.stdlib_module_names or found.top in BASE:
        return None
    if found.top in layers:
        return "the bare folder name"
    if any(fnmatch(found.path, owner) for owner in OWNERS.get(found.top, "").split()):
        return None
    if found.lazy and found.top in LAZY_ANYWHERE:
        return None
    return f"allowed only in {OWNERS.get(found.top, 'no file: name its owner in this test')}"


@pytest.fixture(scope="module")
def imports(root: Path, layers: tuple[str, ...]) -> list[Found]:
    return [
        found
        for layer in layers
        for path in sorted((root / layer).rglob("*.py"))
        for found in find_imports(path.read_text(), path.relative_to(root).as_posix())
    ]


def test_layers_are_in_the_order_of_the_design(layers: tuple[str, ...]) -> None:
    assert layers == ("schemas", "staging", "capture", "engine_adapter", "tools")


def test_every_import_points_down_and_to_its_owner(
    imports: list[Found], layers: tuple[str, ...]
) -> None:
    assert len(imports) > 20
    wrong = [f"{f.where}: {why}" for f in imports if (why := offences(f, layers)) is not None]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("schemas/a.py", "from tokenplane.staging import x", "schemas is below staging"),
        ("capture/a.py", "def f():\n    import tokenplane.tools.cli", "capture is below tools"),
        ("staging/a.py", "from tokenplane import capture", "staging is below capture"),
        ("staging/a.py", "from . import store", "a relative import"),
        ("staging/a.py", "import schemas.errors", "the bare folder name"),
        (
            "staging/file_backend/store.py",
            "import redis",
            "allowed only in staging/redis_backend/*",
        ),
        ("capture/a.py", "import torch", "allowed only in engine_adapter/* staging/tq_backend/*"),
        (
            "capture/a.py",
            "class A:\n    import torch",
            "allowed only in engine_adapter/* staging/tq_backend/*",
        ),
        ("capture/a.py", "def f():\n    import megatron.core", "allowed only in engine_adapter/*"),
        ("tools/a.py", "import six", "allowed only in no file: name its owner in this test"),
    ],
)
def test_a_wrong_import_is_found(
    path: str, source: str, reason: str, layers: tuple[str, ...]
) -> None:
    (found,) = find_imports(source, path)
    assert offences(found, layers) == reason


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tools/cli.py", "from tokenplane.engine_adapter.engine import Engine"),
        ("capture/a.py", "def f():\n    import torch"),
        ("staging/a.py", "if TYPE_CHECKING:\n    import torch"),
        ("staging/redis_backend/store.py", "import redis.exceptions"),
        ("schemas/a.py", "from collections import abc"),
    ],
)
def test_a_right_import_passes(path: str, source: str, layers: tuple[str, ...]) -> None:
    (found,) = find_imports(source, path)
    assert offences(found, layers) is None
