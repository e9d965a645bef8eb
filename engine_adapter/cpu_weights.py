"""A weight update in place that either succeeds whole or leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tokenplane.schemas.errors import EngineDeadError, EngineError


def apply_or_restore(model: torch.nn.Module, apply: Callable[[torch.nn.Module], None]) -> None:
    """Run ``apply(model)`` and prove the outcome; on any failure put the former weights back.

    The proof: every parameter and buffer is still there, the same tensor at the same address, with
    its shape and dtype, and finite. A full copy of them is kept meanwhile (a model's size in
    memory); it is written back into the same storages, so whoever holds a parameter keeps it.

    Raises: what ``apply`` raised; EngineError if the outcome is not proven; EngineDeadError if the
    former weights could not be put back, so that the model is of no known version.
    """
    saved = [_Saved.of(*slot) for slot in _slots(model)]
    try:
        with torch.no_grad():
            apply(model)
        _prove(model, saved)
    except BaseException as error:
        try:
            with torch.no_grad():
                for item in saved:
                    item.restore()
        except Exception as second:
            raise EngineDeadError(
                f"a weight update failed ({error!r}) and its weights could not be taken back"
            ) from second
        raise


_Slot = tuple[dict[str, torch.Tensor | None], str, str, torch.Tensor]


def _slots(model: torch.nn.Module) -> Iterator[_Slot]:
    """``(the module's own dict, name in it, full name, tensor)`` of every parameter and buffer."""
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    full = f"{prefix}.{name}" if prefix else name
                    yield table, name, full, tensor


@dataclass(frozen=True, slots=True)
class _Saved:
    table: dict[str, torch.Tensor | None]
    name: str
    full_name: str
    tensor: torch.Tensor
    storage: torch.Tensor
    copy: torch.Tensor

    @classmethod
    def of(
        cls, table: dict[str, torch.Tensor | None], name: str, full: str, tensor: torch.Tensor
    ) -> _Saved:
        return cls(table, name, full, tensor, tensor.data, tensor.detach().clone())

    def restore(self) -> None:
        self.storage.copy_(self.copy)
        self.tensor.data = self.storage
        self.table[self.name] = self.tensor


def _prove(model: torch.nn.Module, saved: list[_Saved]) -> None:
    present = {full: tensor for _, _, full, tensor in _slots(model)}
    expected = {item.full_name for item in saved}
    if present.keys() != expected:
        raise EngineError(
            "the weight update changed which tensors the model has",
            key=min(present.keys() ^ expected),
        )
    for item in saved:
        tensor = present[item.full_name]
        if (
            tensor is not item.tensor
            or tensor.data_ptr() != item.storage.data_ptr()
            or tensor.shape != item.copy.shape
            or tensor.dtype != item.copy.dtype
        ):
            raise EngineError(
                "the weight update replaced a tensor instead of writing into it",
                key=item.full_name,
                expected=f"{item.copy.dtype}{list(item.copy.shape)} at its address",
                got=f"{tensor.dtype}{list(tensor.shape)}",
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise EngineError(
                "the weight update left values that are not finite", key=item.full_name
            )
