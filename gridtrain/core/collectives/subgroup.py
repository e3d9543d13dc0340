"""A collective among some of a generation's ranks: the core counts them 0, 1, .., the wire by their own.

Decides nothing about the exchange; the core inside does not know that there are others.

    ranks (2, 3) of 4          core, rank 1 of 2: SendTo(0) ----> SendTo(2)
    rank 3                     Arrived(from 0)    <-------------- Arrived(from 2)
                               whoever is not among them breaks the protocol

The replicas of one stage exchange their gradients like this (`protocol.seats`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gridtrain.core.collectives.collective import (
    Collective,
    CollectiveComplete,
    CollectiveEffect,
    PayloadReceived,
    SendTo,
)
from gridtrain.errors import RemoteProtocolError


class Subgroup:
    """`inner` over `ranks`, in its order.  See `gridtrain.core.collectives.collective.Collective`."""

    __slots__ = ("_inner", "_ranks", "_within", "complete")

    def __init__(self, inner: Collective, ranks: Sequence[int]) -> None:
        self._inner = inner
        self._ranks = tuple(ranks)
        self._within = {rank: index for index, rank in enumerate(self._ranks)}
        self.complete = False

    def start(self, now_s: float) -> list[CollectiveEffect]:
        return self._to_global_ranks(self._inner.start(now_s))

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        sender = self._within.get(event.from_rank)
        if sender is None:
            raise RemoteProtocolError(
                f"rank {event.from_rank} sent {event.slot} in an exchange of ranks {self._ranks} alone",
                remedy="drop that peer; an honest one of the same version never sends this",
            )
        return self._to_global_ranks(self._inner.handle(replace(event, from_rank=sender), now_s))

    def waiting_for(self) -> frozenset[int]:
        return frozenset(self._ranks[rank] for rank in self._inner.waiting_for())

    def _to_global_ranks(self, effects: list[CollectiveEffect]) -> list[CollectiveEffect]:
        self.complete = self._inner.complete
        return [self._to_global_rank(effect) for effect in effects]

    def _to_global_rank(self, effect: CollectiveEffect) -> CollectiveEffect:
        """A workspace's own ranks stay those within: only who sent, and to whom, is the wire's affair."""
        match effect:
            case SendTo(to_rank):
                return replace(effect, to_rank=self._ranks[to_rank])
            case CollectiveComplete():
                return effect
            case _:
                source = replace(effect.provenance, rank=self._ranks[effect.provenance.rank])
                return replace(effect, provenance=source)


def neighbours_within(
    neighbours: Callable[[int, int], frozenset[int]], ranks: Sequence[int], rank: int
) -> frozenset[int]:
    """Ranks to which `rank` needs an edge for an exchange among `ranks`."""
    within = tuple(ranks)
    return frozenset(within[other] for other in neighbours(within.index(rank), len(within)))
