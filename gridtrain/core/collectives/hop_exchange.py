"""A schedule of hops, carried out: what the butterfly and the tree have in common.

Decides when a rank sends what it has and when it merges what came.  Never decides who its partners are (the
schedule does), and never opens a payload.

    schedule   fold <- 5    swap <-> 0    swap <-> 3    unfold -> 5
                            ^ the current hop: mine is sent; theirs is awaited, or was held

A hop is over when what it awaits has been merged or adopted; only then the next one sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    CollectiveEffect,
    MergePayload,
    PayloadReceived,
    Provenance,
    ReplacePayload,
    SendTo,
    check_expected,
)
from gridtrain.core.messages import PayloadSlot


@dataclass(frozen=True, slots=True)
class Hop:
    """One line of a rank's schedule: send mine to `partner`, or wait for theirs, or both.

    `owner_modulus`: ranks that compute the same merge from what comes (0: it is not merged).
    `members`, `roundings`: see `collective.Source`, of what comes.
    """

    slot: PayloadSlot
    partner: int
    is_sender: bool
    is_receiver: bool
    owner_modulus: int = 0
    contributors: int = 0
    roundings: int = 0


class HopExchange:
    """One gTop-k exchange as rank `rank` of `world_size` sees it: its schedule, carried out.

    A partner may be hops ahead; what comes early is held, at most one payload for each hop.
    `name`: of the exchange, for texts.  `skip`: this rank's gradient is not finite.  See
    `gridtrain.core.collectives.collective.Collective`.
    """

    __slots__ = (
        "_arrived",
        "_awaited",
        "_hops",
        "_name",
        "_rank",
        "_skip",
        "_started",
        "_world_size",
        "complete",
    )

    def __init__(self, name: str, hops: Sequence[Hop], rank: int, world_size: int, skip: bool) -> None:
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._skip = skip
        self._hops = list(hops)  # the first one is the current one
        self._awaited = {hop.slot: (hop.partner, hop.slot) for hop in self._hops if hop.is_receiver}
        self._arrived: dict[PayloadSlot, PayloadReceived] = {}
        self._started = False
        self.complete = False

    def start(self, now_s: float) -> list[CollectiveEffect]:
        self._started = True
        return self._enter() + self._advance()

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        says = f"{self._name}, rank {self._rank} of {self._world_size}"
        check_expected(says, event, self._awaited.get(event.slot), "nothing (more) of this place")
        del self._awaited[event.slot]
        self._arrived[event.slot] = event
        return self._advance() if self._started else []

    def waiting_for(self) -> frozenset[int]:
        return frozenset() if self.complete else frozenset({self._hops[0].partner})

    def _advance(self) -> list[CollectiveEffect]:
        """Go through the hops as far as what has arrived allows."""
        effects: list[CollectiveEffect] = []
        while self._hops and (not self._hops[0].is_receiver or self._hops[0].slot in self._arrived):
            hop = self._hops.pop(0)
            if hop.is_receiver:
                event = self._arrived.pop(hop.slot)
                self._skip |= event.skip
                effects.append(self._take(hop, event))
            effects += self._enter()
        return effects

    def _enter(self) -> list[CollectiveEffect]:
        """What a hop begins with: mine goes out as it is before theirs is merged into it."""
        if not self._hops:
            self.complete = True
            return [CollectiveComplete(self._skip)]
        hop = self._hops[0]
        return [SendTo(hop.partner, hop.slot, self._skip)] if hop.is_sender else []

    def _take(self, hop: Hop, event: PayloadReceived) -> CollectiveEffect:
        source = Provenance(event.from_rank, hop.contributors, self._world_size, hop.roundings)
        if hop.owner_modulus:
            return MergePayload(event.payload, hop.owner_modulus, self._rank % hop.owner_modulus, source)
        return ReplacePayload(event.payload, source)
