"""One forward of a step plan through a GPTModel: the wanted logits, and the routes taken."""

from __future__ import annotations

from typing import Any

import torch

from tokenplane.engine_adapter.cpu.attention import StepAttention, StepRotary, step_plan
from tokenplane.engine_adapter.cpu.batch import StepPlan
from tokenplane.engine_adapter.models.megatron_process import quiet_imports
from tokenplane.schemas.errors import ConfigError

with quiet_imports():
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplayAction


class StepForward:
    """Runs plans through one model. Not thread-safe; owned by the engine thread.

    Raises: ConfigError if the model was not built with the seams of ``cpu.attention``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        attention = [m for m in model.modules() if isinstance(m, StepAttention)]
        if not attention or not isinstance(getattr(model, "rotary_pos_emb", None), StepRotary):
            raise ConfigError(
                "the model lacks the step seams", expected="cpu_layer_spec and install_rotary"
            )
        self._model = model
        self._recorders = [
            m.router_replay
            for m in model.modules()
            if isinstance(m, TopKRouter) and m.router_replay is not None
        ]
        for recorder in self._recorders:
            recorder.set_router_replay_action(RouterReplayAction.RECORD)

    @property
    def records_routes(self) -> bool:
        """True for a mixture-of-experts model built with ``moe_enable_routing_replay``."""
        return bool(self._recorders)

    def run(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits float[R, V] of ``plan.logit_rows``, and routes int16[T, L, K] if recorded.

        Writes the new keys and values behind each cache's length; committing is the caller's.
        """
        with step_plan(plan):
            logits: torch.Tensor = self._model(
                plan.token_ids,
                plan.positions[None],
                None,
                output_processor=_wanted_logits,
                output_processor_context=plan.logit_rows,
            )
        if not self._recorders:
            return logits, None
        routes = [recorder.get_recorded_indices() for recorder in self._recorders]
        return logits, torch.stack(routes, dim=1).to(torch.int16)


def _wanted_logits(
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    context: torch.Tensor,
    scale_logits: Any,
    **_: object,
) -> torch.Tensor:
    """Megatron's ``output_processor`` seam: the output layer for some rows only."""
    rows = hidden_states.index_select(0, context)
    logits, _bias = output_layer(rows, weight=output_weight, runtime_gather_output=True)
    scaled: torch.Tensor = scale_logits(logits)
    return scaled[:, 0]
