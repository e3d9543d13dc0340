"""Who holds which part of a model that is cut into stages: a pure function of the rank.

Decides nothing about who gets which rank: that is the coordinator's plan.  With S stages and R replicas a
generation has S x R members.  The replicas of a stage have neighbouring ranks: they exchange gradients.

    S = 3, R = 2            replica 0   replica 1
                 stage 0       0           1         }  ranks 0 and 1 exchange the gradients of stage 0
                 stage 1       2           3
                 stage 2       4           5
                               |           +-- ranks 1, 3, 5: a pipeline, activations down, gradients up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from gridtrain.errors import LocalProtocolError

T = TypeVar("T")


def group_by_stage(members: Sequence[T], stages: int) -> list[list[T]]:
    """Who holds the same stage; `members` in rank order.  One group if they cannot hold the stages equally:
    no coordinator has made such a generation, but somebody may tell of one."""
    if not members or len(members) % stages:
        return [list(members)]
    seats = RankLayout.for_world_size(stages, len(members))
    return [[members[rank] for rank in seats.stage_ranks(stage)] for stage in range(stages)]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """S stages x R replicas; raises `LocalProtocolError` unless both are at least 1."""

    stages: int
    replicas: int

    def __post_init__(self) -> None:
        if self.stages < 1 or self.replicas < 1:
            raise LocalProtocolError(
                f"{self.stages} stages x {self.replicas} replicas; at least 1 x 1 is needed"
            )

    @classmethod
    def for_world_size(cls, stages: int, world_size: int) -> RankLayout:
        """Of a generation; `world_size` must be a multiple of `stages`."""
        if world_size % stages:
            raise LocalProtocolError(f"{world_size} members cannot hold {stages} stages equally often")
        return cls(stages, world_size // stages)

    @property
    def world_size(self) -> int:
        return self.stages * self.replicas

    def rank_of(self, stage: int, replica: int) -> int:
        return stage * self.replicas + replica

    def stage_of(self, rank: int) -> int:
        return rank // self.replicas

    def replica_of(self, rank: int) -> int:
        return rank % self.replicas

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage, ascending."""
        return tuple(range(stage * self.replicas, (stage + 1) * self.replicas))

    def pipeline_ranks(self, replica: int) -> tuple[int, ...]:
        """The ranks of one replica of the whole model, first stage first."""
        return tuple(range(replica, self.world_size, self.replicas))

    def previous_stage_rank(self, rank: int) -> int | None:
        """Who sends activations to this rank; None: it is in the first stage."""
        return rank - self.replicas if rank >= self.replicas else None

    def backup_rank(self, rank: int) -> int:
        """Whose disk keeps a copy of this rank's checkpoints: the next stage's, of the last the first's."""
        return (rank + self.replicas) % self.world_size

    def backed_up_rank(self, rank: int) -> int:
        """Whose checkpoints this rank's disk keeps a copy of."""
        return (rank - self.replicas) % self.world_size

    def next_stage_rank(self, rank: int) -> int | None:
        """To whom this rank sends activations; None: it is in the last stage."""
        return rank + self.replicas if rank + self.replicas < self.world_size else None
