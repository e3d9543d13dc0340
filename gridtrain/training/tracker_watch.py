"""Detects whether a script has stepped the objects that it tracks, such as a scheduler, after a step.

for ... in grid.batches(...):        record_turn
    optimizer.step()                 record_step
    scheduler.step(); break          has_followed: the state of step and scheduler can be saved
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gridtrain.training.checkpoint.serialization import Trackers


class TrackerWatch:
    """The tracked objects as they were after the latest step.

    An object that the script does not step after each step, such as a scheduler that it steps once per epoch,
    counts as stepped if it did not change after the step before, either.
    """

    def __init__(self, trackers: Trackers) -> None:
        self._trackers = trackers
        self._at_step: dict[str, Any] = {}
        self._following: set[str] | None = None  # the objects that changed after the step before

    def record_step(self) -> None:
        """Record the objects directly after a step."""
        self._at_step = self._read()

    def record_turn(self) -> None:
        """Record which objects the script has stepped since, when it requests its next batch."""
        if self._at_step:
            self._following, self._at_step = self._changed(), {}

    @property
    def has_followed(self) -> bool:
        """Whether the script has stepped all objects that it usually steps after a step."""
        usual = {*self._trackers} if self._following is None else self._following
        return usual <= self._changed()

    def _changed(self) -> set[str]:
        return {name for name, value in self._read().items() if value != self._at_step.get(name)}

    def _read(self) -> dict[str, Any]:
        return {name: _outline(tracker.state_dict()) for name, tracker in self._trackers.items()}


def _outline(value: Any) -> Any:
    """Return a copy of a state for comparisons, which contains the versions of tensors instead of values."""
    match value:
        case Tensor():
            return value.data_ptr(), value._version
        case Mapping():
            return {key: _outline(item) for key, item in value.items()}
        case list() | tuple():
            return [_outline(item) for item in value]
        case None | bool() | int() | float() | str() | bytes():
            return value
    return id(value)
