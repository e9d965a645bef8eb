"""A weight update in place: whole, proven, or taken back to the last byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenplane.engine_adapter.weight_update import apply_or_restore
from tokenplane.schemas.errors import EngineError


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[1].register_buffer("extra", torch.arange(3.0), persistent=False)
    return model


def snapshot(model: torch.nn.Module) -> dict[str, tuple[int, int, bytes]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (id(tensor), tensor.data_ptr(), tensor.detach().numpy().tobytes())
        for name, tensor in tensors
    }


def test_success_keeps_what_was_written() -> None:
    model = make_model()
    before = snapshot(model)
    apply_or_restore(model, lambda m: m[0].weight.fill_(2))
    after = snapshot(model)
    assert (model[0].weight == 2).all()
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"0.weight"}


def _write_then_raise(model: Any) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.zero_()
    raise KeyboardInterrupt


def _replace_parameter(model: Any) -> None:
    model[0].weight = torch.nn.Parameter(torch.zeros(4, 3))


def _replace_storage(model: Any) -> None:
    model[0].bias.data = torch.zeros(4)


def _other_shape(model: Any) -> None:
    model[0].bias.data = torch.zeros(5)


def _other_dtype(model: Any) -> None:
    model[0].bias.data = model[0].bias.data.to(torch.bfloat16)


def _remove(model: Any) -> None:
    del model[1].running_mean


def _add(model: Any) -> None:
    model[0].register_buffer("new", torch.zeros(1))


def _add_module(model: Any) -> None:
    model[0].add_module("extra", torch.nn.Linear(1, 1, bias=False))


def _nan(model: Any) -> None:
    model[1].running_var[2] = torch.nan


def _infinite(model: Any) -> None:
    model[0].weight[1, 1] = torch.inf


@pytest.mark.parametrize(
    ("apply", "error", "match"),
    [
        (_write_then_raise, KeyboardInterrupt, None),
        (_replace_parameter, EngineError, "0.weight"),
        (_replace_storage, EngineError, "0.bias"),
        (_other_shape, EngineError, "0.bias"),
        (_other_dtype, EngineError, "bfloat16"),
        (_remove, EngineError, "1.running_mean"),
        (_add, EngineError, "0.new"),
        (_add_module, EngineError, "0.extra.weight"),
        (_nan, EngineError, "not finite.*1.running_var"),
        (_infinite, EngineError, "not finite.*0.weight"),
    ],
)
def test_failure_restores_values_tensors_and_addresses(
    apply: Callable[[Any], None], error: type[BaseException], match: str | None
) -> None:
    model = make_model()
    before = snapshot(model)
    with pytest.raises(error, match=match):
        apply_or_restore(model, apply)
    assert snapshot(model) == before


def test_freed_memory_is_allocated_again() -> None:
    """Sharding trainers free storages in place; touching one would end the process."""
    model = make_model()
    weight = model.get_parameter("0.weight")
    before = weight.tolist()

    def free(_model: Any) -> None:
        weight.untyped_storage().resize_(0)

    with pytest.raises(EngineError, match=r"0\.weight"):
        apply_or_restore(model, free)
    assert model.get_parameter("0.weight") is weight
    assert weight.tolist() == before


def test_writing_needs_no_gradient_mode_of_its_own() -> None:
    """A trainer's copy_ into a leaf that requires grad must work as it stands."""
    model = make_model()
    weights = torch.full((4, 3), 3.0)
    apply_or_restore(model, lambda m: m[0].weight.copy_(weights))
    assert model[0].weight.requires_grad
    assert torch.equal(model[0].weight.detach(), weights)
