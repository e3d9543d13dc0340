"""Detects that a script has changed its model's parameters outside of the steps of the run.

    for ... in grid.batches(...):    record_turn, when the next turn begins
        optimizer.step()             record_step; record, after a local step
        p.clamp_(-1, 1); break       record_end: changes by the loop after a step belong to that step
    model.load_state_dict(best)      has_changed is True: a checkpoint written now would contain these values
    grid.close()

While a variable refers to the loop's iterator, the loop's end is not noticed: `record_end` is then called
later, possibly after `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MAX_SAMPLED = 16
"""The approximate number of parameters whose values are compared, and the number of values in each."""

_Reading = tuple[list[int], list[Tensor]]  # numbers of changes by parameter, and the values of those sampled


class ParameterWatch:
    """The parameters of a model as they were recorded last.

    Torch counts changes, except those through `.data`: these are noticed if they change a sampled value.  A
    move to another device is not a change.

    Args:
        model: the model.
        parameters: the model's trained parameters.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._sampled = parameters[:: max(1, len(parameters) // MAX_SAMPLED)]
        self._recorded: _Reading | None = None
        self._step_end: _Reading | None = None  # of the turn in progress
        self._loop_body: tuple[_Reading, _Reading] | None = (
            None  # after the latest turn's step, and at its end
        )

    def record(self) -> None:
        """Record the parameters as unchanged, before the script can change them."""
        self._recorded = self._read()

    def record_step(self) -> None:
        """Record the parameters after a step."""
        self.record()
        self._step_end = self._recorded

    def record_turn(self) -> None:
        """Record the parameters when the script requests the first batch of the next turn."""
        self._recorded = self._read()
        if self._step_end is not None:
            self._loop_body = self._step_end, self._recorded
            self._step_end = None

    def record_end(self) -> None:
        """Record the parameters when the script's loop is closed, unless the latest turn shows that the loop
        changes no parameter after its steps: in that case any change came after the loop."""
        if self._loop_body is None or _differ(*self._loop_body):
            self.record()

    @property
    def has_changed(self) -> bool:
        """Whether the parameters have changed, or were replaced in the model, since they were recorded last;
        False if they were never recorded."""
        if self._recorded is None:
            return False
        is_replaced = not {*self._parameters} <= {*self._model.parameters()}
        return is_replaced or _differ(self._recorded, self._read())

    def _read(self) -> _Reading:
        values = [_first_values(parameter) for parameter in self._sampled]
        return [parameter._version for parameter in self._parameters], values


def _differ(before: _Reading, after: _Reading) -> bool:
    (versions, values), (later_versions, later_values) = before, after
    return versions != later_versions or any(
        _to_bytes(value) != _to_bytes(later) for value, later in zip(values, later_values, strict=True)
    )


def _first_values(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().reshape(-1)[:MAX_SAMPLED].clone()


def _to_bytes(values: Tensor) -> list[int]:
    """Return the values as bytes, so that NaN is equal to a NaN with the same bits."""
    found: list[int] = values.cpu().view(torch.uint8).tolist()
    return found
