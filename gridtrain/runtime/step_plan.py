"""What the optimizer wrapper and the runtime tell each other about one attempt at a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One attempt at one step's exchange, as this worker sees it.

    Attributes:
        step: global step, from 0 over the whole run.
        attempt: attempt at it, from 0 in each generation.
        rank, world_size: in the generation that runs it.
        samples: samples behind this worker's gradient, n_i (0: it takes part with zeros).
        total_samples: samples of the whole step, N = sum of all n_i.
        exchange: what the coordinator has chosen, if the choice is its own.
        compare_after: new workers have entered: after this step all members compare their replicas.
        stage_bounds: of a model in stages, where the stages begin, and the number of layers.
        generation, first_step: the generation that runs it, and the first step that this one ran.
    """

    step: int
    attempt: int
    rank: int
    world_size: int
    samples: int
    total_samples: int
    compare_after: bool = False
    exchange: str = ""
    stage_bounds: tuple[int, ...] = ()
    generation: int = 0
    first_step: int = 0

    @property
    def weight(self) -> float:
        """n_i / N, the weight of this worker's mean gradient in the step."""
        return self.samples / self.total_samples if self.samples else 0.0


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """How the attempt ended, the same on every member.

    Attributes:
        is_committed: False: nothing may change; begin again with the same gradient.
        is_skipped: committed, but somebody's gradient was not finite: the update is empty.
    """

    is_committed: bool
    is_skipped: bool
