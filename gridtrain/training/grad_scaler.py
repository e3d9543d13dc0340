"""A GradScaler (mixed precision, fp16) whose scale is the same on all workers.

If worker A overflows and worker B does not, the group skips the step on both, and both must reduce the scale:

    torch's GradScaler     A: scale / 2     B: counts a good step      the scales diverge
    GridScaler             A: scale / 2     B: scale / 2

A newcomer receives the group's scale (as a tracker; see `Grid.scaler`); if it started with 65536 while the
group's scale is 1024, it would make the group skip six steps.  With `LocalSteps`, each worker has its own
scale, because no gradient is exchanged.

Whether the group skipped the step is written to the scaler's own record: `optimizer.found_inf` is computed
from this record each time, so setting the attribute would have no effect.
"""

from __future__ import annotations

from typing import Any

import torch

from gridtrain.errors import ConfigError
from gridtrain.training.optimizer import GridOptimizer


def unsupported_scaler_error() -> ConfigError:
    return ConfigError(
        "grid.scaler() was called with a pipeline, whose pipe.step runs the backward pass without a scale",
        remedy="train in float32 or bfloat16, which need no scale; use wire='fp16' or 'bf16' for activations",
    )


class GridScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for the optimizer that `grid.optimizer` returned, used like torch's own."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        result = super().step(optimizer, *args, **kwargs)
        if self.is_enabled() and isinstance(optimizer, GridOptimizer) and optimizer.shares_scale:
            found: dict[torch.device, torch.Tensor]
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if not found:  # no gradient on this worker at all
                found[torch.device("cpu")] = torch.zeros((), dtype=torch.float32, device="cpu")
            for found_inf in found.values():
                found_inf.fill_(float(optimizer.last_overflowed))
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict`; do nothing if it is empty, as the state of a disabled scaler is."""
        if state_dict:
            super().load_state_dict(state_dict)
