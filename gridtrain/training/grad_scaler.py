"""A GradScaler whose scale stays equal on all workers.

Decides nothing: it takes over the group's verdict.  Worker A overflows, worker B does not; the group skips
the step on both, and both must back off:

    torch's GradScaler     A: scale / 2     B: counts a good step      scales drift apart
    GridScaler             A: scale / 2     B: scale / 2

A newcomer takes over the others' scale, as a tracker (`Grid.scaler`): with 65536, where they are at 1024, it
would have the group skip six steps.  With `LocalSteps` each worker's scale is its own: no gradient is
exchanged.

The verdict has to be put into the scaler's own record: it hands `optimizer.found_inf` out as a fresh sum, so
that a write to the optimizer's attribute does nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from gridtrain.training.optimizer import GridOptimizer


class GridScaler(torch.amp.GradScaler):
    """Use it exactly as `torch.amp.GradScaler`, with the optimizer that `grid.optimizer` returned."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        result = super().step(optimizer, *args, **kwargs)
        if self.is_enabled() and isinstance(optimizer, GridOptimizer) and optimizer.shares_scale:
            found: dict[torch.device, torch.Tensor]
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if not found:  # no gradient on this worker at all
                found[torch.device("cpu")] = torch.zeros(())
            for found_inf in found.values():
                found_inf.fill_(float(optimizer.last_overflowed))
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of a worker whose scaler is not enabled says nothing."""
        if state_dict:
            super().load_state_dict(state_dict)
