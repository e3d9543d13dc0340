"""Maps ranks to the stages and replicas of a model, and lists the members of a generation in rank order.

With S stages and R replicas, a generation has S x R members.  The replicas of a stage, which exchange
gradients, have consecutive ranks.

    S = 3, R = 2            replica 0   replica 1
                 stage 0       0           1         }  ranks 0 and 1 exchange the gradients of stage 0
                 stage 1       2           3
                 stage 2       4           5
                               |           +-- ranks 1, 3, 5: a pipeline, activations down, gradients up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gridtrain.core.messages import GenerationMessage, Member, PeerId, RoundId, Span
from gridtrain.errors import LocalProtocolError
from gridtrain.quantities import format_count

T = TypeVar("T")


def group_by_stage(members: Sequence[T], stages: int) -> list[list[T]]:
    """Group `members`, which are in rank order, by stage.

    If the number of members is not a multiple of `stages`, return one group of all members.  The coordinator
    never makes a generation of such a size, but a worker could report one.
    """
    if not members or len(members) % stages:
        return [list(members)]
    layout = RankLayout.for_world_size(stages, len(members))
    return [[members[rank] for rank in layout.stage_ranks(stage)] for stage in range(stages)]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Layout of S stages x R replicas; raises `LocalProtocolError` unless both are at least 1."""

    stages: int
    replicas: int

    def __post_init__(self) -> None:
        if self.stages < 1 or self.replicas < 1:
            raise LocalProtocolError(
                f"the layout has {self.stages} stages x {self.replicas} replicas; it must have at least 1 x 1"
            )

    @classmethod
    def for_world_size(cls, stages: int, world_size: int) -> RankLayout:
        """Return the layout of a generation.

        Raises:
            LocalProtocolError: `world_size` is not a positive multiple of `stages`.
        """
        if world_size % stages:
            raise LocalProtocolError(
                f"the generation has {format_count(world_size, 'member')}; the number of members must be a "
                f"multiple of the number of stages ({stages})"
            )
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
        """Return the ranks that hold a stage, in ascending order."""
        return tuple(range(stage * self.replicas, (stage + 1) * self.replicas))

    def pipeline_ranks(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one replica of the whole model, first stage first."""
        return tuple(range(replica, self.world_size, self.replicas))

    def previous_stage_rank(self, rank: int) -> int | None:
        """Return the rank that sends activations to `rank`, or None if `rank` is in the first stage."""
        return rank - self.replicas if rank >= self.replicas else None

    def next_stage_rank(self, rank: int) -> int | None:
        """Return the rank to which `rank` sends activations, or None if `rank` is in the last stage."""
        return rank + self.replicas if rank + self.replicas < self.world_size else None

    def backup_rank(self, rank: int) -> int:
        """Return the rank in the next stage (cyclically) that stores a copy of this rank's checkpoints."""
        return (rank + self.replicas) % self.world_size

    def backed_up_rank(self, rank: int) -> int:
        """Return the rank in the previous stage (cyclically) whose checkpoints this rank stores as a copy."""
        return (rank - self.replicas) % self.world_size


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The members of one generation in rank order, from the point of view of the member `own_id`.

    Attributes:
        exchange: the value of `MembershipView.exchange`.
        stage_bounds: stages + 1 numbers, the first layer of each stage and then the number of layers; () if
            each stage is treated as one layer.
    """

    own_id: PeerId
    term: int
    generation: int
    members: tuple[Member, ...]
    stages: int = 1
    exchange: str = ""
    stage_bounds: tuple[int, ...] = ()
    _ranks: dict[PeerId, int] = field(init=False, repr=False, compare=False)  # looked up for each message

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranks", {member.peer: rank for rank, member in enumerate(self.members)})

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def shares(self) -> tuple[tuple[PeerId, int], ...]:
        """(peer, share) pairs in rank order, for `data_ledger.assign`."""
        return tuple((member.peer, member.share) for member in self.members)

    def is_generation_of(self, message: GenerationMessage | RoundId) -> bool:
        """Return whether the message, or the round, belongs to this generation."""
        return (message.term, message.generation) == (self.term, self.generation)

    def rank_of(self, peer: PeerId) -> int | None:
        return self._ranks.get(peer)

    def name_of(self, peer: PeerId) -> str:
        """Return a member's name, for the log."""
        return self.members[self._ranks[peer]].name or peer.hex()[:8]

    @property
    def rank(self) -> int:
        rank = self.rank_of(self.own_id)
        if rank is None:
            raise LocalProtocolError(f"this worker is not a member of generation {self.generation}")
        return rank

    @property
    def layout(self) -> RankLayout:
        return RankLayout.for_world_size(self.stages, self.world_size)

    @property
    def stage(self) -> int:
        """The stage that this member holds."""
        return self.layout.stage_of(self.rank)

    @property
    def layers(self) -> Span:
        """The layers that this member holds."""
        return self.layers_of_stage(self.stage)

    def layers_of_stage(self, stage: int) -> Span:
        return Span(*self.stage_bounds[stage : stage + 2]) if self.stage_bounds else Span(stage, stage + 1)

    @property
    def checkpoint_sources(self) -> tuple[tuple[Span, int], ...]:
        """The checkpoints from which this member assembles its stage, as pairs (layers, storing rank)."""
        return self.members[self.rank].pieces

    def checkpoint_source_digest(self, layers: Span, rank: int) -> bytes:
        """Return the digest of the checkpoint of `layers` that `rank` stores; empty if unknown."""
        own = self.members[self.rank]
        return dict(zip(own.pieces, own.piece_digests, strict=False)).get((layers, rank), b"")
