"""Detects that a script has changed its model's parameters outside of the steps of the run.

for ... in grid.batches(...):        recorded, except within a step whose parameters have changed
    optimizer.step()                 recorded
    p.clamp_(-1, 1); break           recorded: what the loop changes after a step belongs to that step
model.load_state_dict(best)          has_changed: a checkpoint would have these values instead
grid.close()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MAX_SAMPLED = 16
"""The number of parameters whose values are compared, about, and the number of these values in each."""


class ParameterWatch:
    """The parameters of a model as they were recorded last.

    Torch counts changes, except those through `.data`: these are noticed if they change a sampled value.  A
    move to another device is not a change.

    Args:
        model: the model.
        parameters: those of its parameters that are trained.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._sampled = parameters[:: max(1, len(parameters) // MAX_SAMPLED)]
        self._versions: list[int] | None = None
        self._values: list[Tensor] = []

    def record(self) -> None:
        """Record the parameters, before the script can change them."""
        self._versions = self._count_versions()
        self._values = [_first_values(parameter) for parameter in self._sampled]

    @property
    def has_changed(self) -> bool:
        """Whether the parameters have changed since the latest `record`, if any."""
        if self._versions is None:
            return False
        is_replaced = not {*self._parameters} <= {*self._model.parameters()}
        return (
            is_replaced
            or self._versions != self._count_versions()
            or any(
                _to_bytes(_first_values(parameter)) != _to_bytes(value)
                for parameter, value in zip(self._sampled, self._values, strict=True)
            )
        )

    def _count_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]


def _first_values(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().reshape(-1)[:MAX_SAMPLED].clone()


def _to_bytes(values: Tensor) -> list[int]:
    """Return the values as bytes, which are equal for equal NaNs, too."""
    found: list[int] = values.cpu().view(torch.uint8).tolist()
    return found
