"""Detects whether a script has changed its model's parameters outside of the steps of the run.

    for ... in grid.batches(...):    record_turn, when the next turn begins; True after a change by the loop
        p.clamp_(-1, 1)              is_written is True
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

_Reading = tuple[list[int], Tensor]  # each parameter's number of changes, and the sampled values' bytes


class ParameterWatch:
    """The parameters of a model as they were last recorded.

    Torch counts changes, except changes through `.data`, which are noticed only if they change a sampled
    value.  A move to another device is not a change.

    Args:
        model: the model.
        parameters: the parameters of the model's state.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._sampled = parameters[:: max(1, len(parameters) // MAX_SAMPLED)]
        self._recorded: _Reading | None = None
        self._is_after_step = False  # of the turn in progress
        self._loop_changes: bool | None = None  # whether the loop changed parameters after the latest step

    def record(self) -> None:
        """Record the parameters as unchanged, before the script can change them."""
        self._recorded = self._read()

    def record_step(self) -> None:
        """Record the parameters after a step."""
        self.record()
        self._is_after_step = True

    def record_turn(self) -> bool:
        """Record the parameters when the script requests the first batch of the next turn; return whether
        they have been written since they were last recorded."""
        is_written = self.is_written
        if is_written or self._recorded is None:
            self.record()
        if self._is_after_step:
            self._loop_changes, self._is_after_step = is_written, False
        return is_written

    def record_end(self) -> None:
        """Record the parameters when the script's loop is closed, unless the latest turn shows that the loop
        changes no parameter after its steps: in that case any change came after the loop."""
        if self._loop_changes is not False:
            self.record()

    @property
    def has_changed(self) -> bool:
        """Whether the parameters have changed, or have been replaced in the model, since they were last
        recorded; False if they were never recorded."""
        if self._recorded is None:
            return False
        return not {*self._parameters} <= {*self._model.parameters()} or self.is_written

    @property
    def is_written(self) -> bool:
        """Whether the parameters have changed since they were last recorded; False if they were never
        recorded."""
        return self._recorded is not None and _differ(self._recorded, self._read())

    def _read(self) -> _Reading:
        device = self._sampled[0].device
        values = [_first_bytes(parameter).to(device) for parameter in self._sampled]
        return [parameter._version for parameter in self._parameters], torch.cat(values)


def _differ(before: _Reading, after: _Reading) -> bool:
    (versions, values), (later_versions, later_values) = before, after
    # One comparison, because each waits for a GPU.
    return versions != later_versions or not torch.equal(values.to(later_values.device), later_values)


def _first_bytes(parameter: nn.Parameter) -> Tensor:
    """Return the first values as bytes, so that NaN is equal to a NaN with the same bits."""
    return parameter.detach().reshape(-1)[:MAX_SAMPLED].view(torch.uint8)
