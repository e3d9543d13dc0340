"""Executes a schedule of hops for the butterfly and the tree: decides when one hop ends and the next begins.

    rank 1 of 6 in a butterfly    fold <- 5    swap <-> 0    swap <-> 3    unfold -> 5
                                               ^ the current hop

A payload that this rank sends in a hop is sent when the hop begins.  If the rank receives a payload in the
hop, the next hop begins when the received payload has been merged or adopted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gridtrain.core.collectives.collective import (
    CollectiveBase,
    CollectiveEffect,
    MergePayload,
    ReplacePayload,
    SendTo,
)
from gridtrain.core.messages import PayloadSlot


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of a rank's schedule: send this rank's payload to `partner`, receive the partner's, or both.

    Attributes:
        owner_modulus: number of ranks that compute the same merge with the received payload; 0 if the
            received payload replaces this rank's payload instead.
        contributors, roundings: the bounds in the received payload's `collective.Provenance`.
    """

    slot: PayloadSlot
    partner: int
    is_sender: bool
    is_receiver: bool
    owner_modulus: int = 0
    contributors: int = 0
    roundings: int = 0


class HopExchange(CollectiveBase):
    """One gTop-k exchange along a schedule of hops.

    A partner may be several hops ahead of this rank; at most one early payload is deferred for each hop.

    Args:
        name: name of the exchange in error messages.
        flags: flags of this rank's contribution (`core.group.round_flags`).
    """

    __slots__ = ("_arrived", "_awaited", "_hops", "_started")

    def __init__(self, name: str, hops: Sequence[Hop], rank: int, world_size: int, flags: int) -> None:
        super().__init__(name, rank, world_size, flags)
        self._hops = list(hops)  # the first one is the current one
        self._awaited = {hop.slot: (hop.partner, hop.slot) for hop in self._hops if hop.is_receiver}
        self._arrived: dict[PayloadSlot, tuple[int, Any]] = {}  # flags and payload
        self._started = False

    def start(self) -> list[CollectiveEffect]:
        self._started = True
        return self._begin_hop() + self._advance()

    def handle(self, from_rank: int, slot: PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        self._check(from_rank, slot, self._awaited.get(slot))
        del self._awaited[slot]
        self._arrived[slot] = (flags, payload)
        return self._advance() if self._started else []

    def waiting_for(self) -> frozenset[int]:
        return frozenset() if self.complete else frozenset({self._hops[0].partner})

    def _advance(self) -> list[CollectiveEffect]:
        """Execute all hops whose payloads have arrived, up to the first one whose payload is missing."""
        effects: list[CollectiveEffect] = []
        while self._hops and (not self._hops[0].is_receiver or self._hops[0].slot in self._arrived):
            hop = self._hops.pop(0)
            if hop.is_receiver:
                flags, payload = self._arrived.pop(hop.slot)
                self._flags |= flags
                effects.append(self._take(hop, payload))
            effects += self._begin_hop()
        return effects

    def _begin_hop(self) -> list[CollectiveEffect]:
        """Send this rank's payload, before the partner's payload is merged into it.

        If no hop is left, complete the exchange instead.
        """
        if not self._hops:
            return self._completed()
        hop = self._hops[0]
        return [SendTo(hop.partner, hop.slot, self._flags)] if hop.is_sender else []

    def _take(self, hop: Hop, payload: Any) -> CollectiveEffect:
        provenance = self._provenance(hop.partner, hop.contributors, hop.roundings)
        if hop.owner_modulus:
            return MergePayload(payload, hop.owner_modulus, self._rank % hop.owner_modulus, provenance)
        return ReplacePayload(payload, provenance)
