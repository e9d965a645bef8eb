"""A weight update in place that either succeeds whole or leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenplane.schemas.errors import EngineError


class WeightsLost(Exception):
    """The model is of no known version any more: a signal to the engine thread alone."""


def apply_or_restore(model: torch.nn.Module, apply: Callable[[torch.nn.Module], None]) -> None:
    """Run ``apply(model)`` and prove the outcome; on any failure put the former weights back.

    The proof: every parameter and buffer is still there, the same tensor at the same address, with
    its shape and dtype, and finite. A full copy of them is kept meanwhile (a model's size in
    memory); it is written back into the same storages, so whoever holds a parameter keeps it.

    Raises: what ``apply`` raised; EngineError if the outcome is not proven; WeightsLost if the
    former weights could not be put back.
    """
    saved = _Saved(model)
    try:
        with torch.no_grad():
            apply(model)
        _prove(model, saved)
    except BaseException as error:
        try:
            with torch.no_grad():
                saved.restore()
        except Exception as second:
            raise WeightsLost(
                f"a weight update failed ({error!r}) and could not be taken back ({second!r})"
            ) from second
        raise


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A parameter or buffer as it was: the object, its storage, and a copy of its values."""

    tensor: torch.Tensor
    storage: torch.Tensor
    address: int
    nbytes: int
    """Of the storage."""
    copy: torch.Tensor


class _Saved:
    """All that an update could change in a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, dict(table))
            for module in model.modules()
            for table in (module._parameters, module._buffers, module._modules)
        ]
        """Each table of each module that names its tensors and submodules, and a copy of it."""
        self.tensors = {
            name: _Tensor(
                tensor=tensor,
                storage=tensor.data,
                address=tensor.data_ptr(),
                nbytes=tensor.untyped_storage().nbytes(),
                copy=tensor.detach().clone(),
            )
            for name, tensor in _named_tensors(model).items()
        }

    def restore(self) -> None:
        for table, names in self._tables:
            table.clear()
            table.update(names)
        for item in self.tensors.values():
            memory = item.storage.untyped_storage()
            if memory.nbytes() != item.nbytes:
                memory.resize_(item.nbytes)  # it was freed; writing into it would crash
            if not torch.equal(item.storage, item.copy):
                item.storage.copy_(item.copy)
            item.tensor.data = item.storage


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; one that has several names appears under its first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _prove(model: torch.nn.Module, saved: _Saved) -> None:
    present = _named_tensors(model)
    if present.keys() != saved.tensors.keys():
        raise EngineError(
            "the weight update changed which tensors the model has",
            key=min(present.keys() ^ saved.tensors.keys()),
        )
    for name, item in saved.tensors.items():
        tensor = present[name]
        if (
            tensor is not item.tensor
            or tensor.data_ptr() != item.address
            or tensor.shape != item.copy.shape
            or tensor.dtype != item.copy.dtype
        ):
            raise EngineError(
                "the weight update replaced a tensor instead of writing into it",
                key=name,
                expected=f"{item.copy.dtype}{list(item.copy.shape)} at its address",
                got=f"{tensor.dtype}{list(tensor.shape)}",
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise EngineError("the weight update left values that are not finite", key=name)
