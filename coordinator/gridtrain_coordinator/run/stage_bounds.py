"""Which layers of the model belong to which stage, in the current generation."""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.stages.repartition import defined_cuts


class StageBounds:
    """The first layer of each stage, then the number of layers; without stages, one stage of one layer.

    Attributes:
        recorded_bounds: as the generation's view names them; (): as the run is defined.
    """

    def __init__(self) -> None:
        self.recorded_bounds: tuple[int, ...] = ()
        self._definition: m.Setup | None = None

    def define(self, setup: m.Setup) -> None:
        """The run is defined.  Bounds that a member reported before and that do not fit are dropped."""
        self._definition = setup
        if not self.is_valid(self.recorded_bounds):
            self.recorded_bounds = ()

    def adopt(self, bounds: tuple[int, ...]) -> None:
        self.recorded_bounds = bounds

    @property
    def is_pipeline(self) -> bool:
        """The run is defined with more than one stage."""
        return self._definition is not None and self._definition.stages > 1

    @property
    def bounds(self) -> tuple[int, ...]:
        if self.recorded_bounds or self._definition is None:
            return self.recorded_bounds or (0, 1)
        return defined_cuts(self._definition)

    @property
    def stage_count(self) -> int:
        """Stages of the generation; before there is one, stages of the definition."""
        return len(self.bounds) - 1

    def is_valid(self, bounds: tuple[int, ...]) -> bool:
        """The model can be divided so; anything is accepted before the run is defined."""
        if self._definition is None or not bounds:
            return True
        return self.is_pipeline and bounds[-1] == defined_cuts(self._definition)[-1]

    def can_hold(self, layers: m.Span) -> bool:
        """A member may hold the state of these layers: a stage's or, after a repartition, of an older one."""
        if not self.is_pipeline:
            return layers == m.Span(0, 1)
        return layers.start < layers.stop <= self.bounds[-1]
