"""The one shim needed on the CPU: importing Megatron Bridge where TransformerEngine is absent.

megatron-bridge 0.6.2 imports TransformerEngine unguarded in a single module,
``megatron.bridge.peft.lora_layers``, which lies on the way to ``AutoBridge`` and uses it only for
fused LoRA layers on a GPU. TransformerEngine cannot stand in for itself here: with it installed,
Megatron's CPU forward fails. So, while Bridge is being imported (and only then, and only for that
module), the import finds placeholders under its two names; everybody else keeps seeing that it is
absent. No file of an installed package is touched, and nothing stays behind but the loaded module.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_NEEDS_ENGINE = "megatron.bridge.peft.lora_layers"
_ENGINE = "transformer_engine"
_ENGINE_TORCH = "transformer_engine.pytorch"


@contextmanager
def importable_bridge() -> Iterator[None]:
    """Within this block, ``import megatron.bridge`` works where TransformerEngine is absent."""
    if importlib.util.find_spec(_ENGINE) is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module, and has it executed beside the placeholders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NEEDS_ENGINE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        engine, engine_torch = _Placeholder(_ENGINE), _Placeholder(_ENGINE_TORCH)
        engine.__dict__["pytorch"] = engine_torch
        sys.modules[_ENGINE], sys.modules[_ENGINE_TORCH] = engine, engine_torch
        try:
            self._inner.exec_module(module)
        finally:
            del sys.modules[_ENGINE], sys.modules[_ENGINE_TORCH]


class _Placeholder(types.ModuleType):
    """A module whose submodules are placeholders and whose classes have no instances."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return _Placeholder(full) if name.islower() else type(name, (), {"__module__": full})
