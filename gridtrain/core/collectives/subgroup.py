"""A collective among some of the ranks, which are renumbered from 0; for example, the replicas of a stage.

For example, rank 3 in a subgroup of the ranks (2, 3) is rank 1 of 2 in the inner collective:

    the inner collective's SendTo(0)    ----> SendTo(2)
    its handle(from_rank=0)             <---- a payload from rank 2

A payload from a rank outside the subgroup violates the protocol.

The replicas of a stage exchange their gradients in a subgroup (`core.group.rank_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gridtrain.core.collectives.collective import (
    Collective,
    CollectiveComplete,
    CollectiveEffect,
    SendTo,
)
from gridtrain.core.messages import PayloadSlot
from gridtrain.errors import RemoteProtocolError


class Subgroup:
    """Runs the collective `inner` among `ranks`; rank i of the collective is `ranks[i]`."""

    __slots__ = ("_inner", "_ranks", "_within", "complete")

    def __init__(self, inner: Collective, ranks: Sequence[int]) -> None:
        self._inner = inner
        self._ranks = tuple(ranks)
        self._within = {rank: index for index, rank in enumerate(self._ranks)}
        self.complete = False

    def start(self) -> list[CollectiveEffect]:
        return self._to_global_ranks(self._inner.start())

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        sender = self._within.get(from_rank)
        if sender is None:
            raise RemoteProtocolError(
                f"rank {from_rank} sent {slot} to an exchange among only the ranks {self._ranks}",
            )
        return self._to_global_ranks(self._inner.handle(sender, slot, flags, payload))

    def waiting_for(self) -> frozenset[int]:
        return frozenset(self._ranks[rank] for rank in self._inner.waiting_for())

    def _to_global_ranks(self, effects: list[CollectiveEffect]) -> list[CollectiveEffect]:
        self.complete = self._inner.complete
        return [self._to_global_rank(effect) for effect in effects]

    def _to_global_rank(self, effect: CollectiveEffect) -> CollectiveEffect:
        """Translate the ranks of senders and receivers; leave ranks that index a buffer unchanged."""
        match effect:
            case SendTo(to_rank):
                return replace(effect, to_rank=self._ranks[to_rank])
            case CollectiveComplete():
                return effect
            case _:
                provenance = replace(effect.provenance, rank=self._ranks[effect.provenance.rank])
                return replace(effect, provenance=provenance)


def neighbours_within(
    neighbours: Callable[[int, int], frozenset[int]], ranks: Sequence[int], rank: int
) -> frozenset[int]:
    """Return the ranks to which `rank` must be connected for an exchange among `ranks`."""
    within = tuple(ranks)
    return frozenset(within[other] for other in neighbours(within.index(rank), len(within)))
