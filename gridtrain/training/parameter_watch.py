"""Detects that a script has changed its model's parameters outside of the steps of the run.

optimizer.step()                     recorded
for ... in grid.batches(...)         recorded: what the loop changes between two batches belongs to its step
break
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
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
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
        return self._versions != self._count_versions() or any(
            _to_bytes(_first_values(parameter)) != _to_bytes(value)
            for parameter, value in zip(self._sampled, self._values, strict=True)
        )

    def _count_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]


def _first_values(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().as_strided((min(MAX_SAMPLED, parameter.numel()),), (1,)).clone()


def _to_bytes(values: Tensor) -> list[int]:
    """Return the values as bytes, which are equal for equal NaNs, too."""
    found: list[int] = values.cpu().view(torch.uint8).tolist()
    return found
