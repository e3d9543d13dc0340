"""The layers of each stage in the current generation of a pipeline."""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.stages.repartition import defined_cuts


class StageBounds:
    """The first layer of each stage, followed by the number of layers.

    An unpartitioned model has one stage of one layer.

    Attributes:
        recorded_bounds: the bounds in the generation's view; () if it uses the definition's bounds.
    """

    def __init__(self) -> None:
        self.recorded_bounds: tuple[int, ...] = ()
        self._definition: m.Setup | None = None

    def define(self, setup: m.Setup) -> None:
        """Set the run's definition; drop bounds that a member reported earlier if they do not fit it."""
        self._definition = setup
        if not self.is_valid(self.recorded_bounds):
            self.recorded_bounds = ()

    def adopt(self, bounds: tuple[int, ...]) -> None:
        self.recorded_bounds = bounds

    @property
    def is_pipeline(self) -> bool:
        """Whether the run is defined with more than one stage."""
        return self._definition is not None and self._definition.stages > 1

    @property
    def bounds(self) -> tuple[int, ...]:
        if self.recorded_bounds or self._definition is None:
            return self.recorded_bounds or (0, 1)
        return defined_cuts(self._definition)

    @property
    def repartitioned_bounds(self) -> tuple[int, ...]:
        """The bounds if they differ from the definition's bounds; otherwise ()."""
        is_defined = self._definition is None or self.bounds == defined_cuts(self._definition)
        return () if is_defined else self.bounds

    @property
    def stage_count(self) -> int:
        """The number of stages in the generation, or in the definition before the first generation."""
        return len(self.bounds) - 1

    def is_valid(self, bounds: tuple[int, ...]) -> bool:
        """Return whether the model can be divided at these bounds; True before the run is defined."""
        if self._definition is None or not bounds:
            return True
        return self.is_pipeline and bounds[-1] == defined_cuts(self._definition)[-1]

    def can_hold(self, layers: m.Span) -> bool:
        """Return whether a member could hold the state of these layers.

        The layers may be those of a stage or, after a repartition, of an earlier stage.
        """
        if not self.is_pipeline:
            return layers == m.Span(0, 1)
        return layers.start < layers.stop <= self.bounds[-1]
