"""Whether all members still hold the same model: compared now and then, beside the training (promise 1).

Decides whose state is another one.  Never looks at a state, and never repairs one: who has drifted says so
to the coordinator (Astray), reports in the next generation that it does not hold the state, and gets it anew.

    every N steps   Fingerprint(step, digest of parameters and optimizer) --> root
    root            all are here: the largest party is right, of equal ones that with the lowest rank
                    Drifted(step) --> the others

Equal updates do not prove equal models: a memory may flip a bit, and another kind of processor may round
otherwise.  Members go on meanwhile; a drifted one contributes gradients of its model until it is repaired.
"""

from __future__ import annotations

from gridtrain.errors import RemoteProtocolError
from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.round import ROOT

MOST_OPEN = 4
"""Comparisons that may be under way; an older one is given up."""


class Drift:
    """The comparisons of one generation, as one member sees them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._told: dict[int, dict[int, bytes]] = {}  # at the root: by step and rank

    def compare(self, step: int, digest: bytes) -> tuple[list[tuple[m.PeerId, m.Message]], bool]:
        """This member's own; what is to be sent, and whether this member itself has drifted."""
        seat = self._seat
        if seat.rank == ROOT:
            return self._collect(step, ROOT, digest)
        return [(seat.roster[ROOT].peer, m.Fingerprint(seat.term, seat.generation, step, digest))], False

    def heard(
        self, peer: m.PeerId, message: m.Fingerprint | m.Drifted
    ) -> tuple[list[tuple[m.PeerId, m.Message]], bool]:
        """A member's, or the root's verdict; dropped if it is of another generation.

        Raises:
            RemoteProtocolError: only the root compares, and only the root tells.
        """
        rank, seat = self._seat.rank_of(peer), self._seat
        if rank is None or (message.term, message.generation) != (seat.term, seat.generation):
            return [], False
        if rank != ROOT if isinstance(message, m.Drifted) else seat.rank != ROOT:
            raise RemoteProtocolError(
                f"rank {rank} sent {type(message).__name__} to rank {seat.rank}; states are compared by "
                f"rank {ROOT}",
                remedy="drop that peer; an honest one of the same version never sends this",
            )
        if isinstance(message, m.Drifted):
            return [], True
        return self._collect(message.step, rank, message.digest)

    def _collect(self, step: int, rank: int, digest: bytes) -> tuple[list[tuple[m.PeerId, m.Message]], bool]:
        seat = self._seat
        if step not in self._told and len(self._told) >= MOST_OPEN:
            del self._told[min(self._told)]
        told = self._told.setdefault(step, {})
        told[rank] = digest
        if len(told) < seat.world_size:
            return [], False
        del self._told[step]
        wrong = drifted(told)
        verdict = m.Drifted(seat.term, seat.generation, step)
        return [(seat.roster[r].peer, verdict) for r in wrong if r != ROOT], ROOT in wrong


def drifted(digests: dict[int, bytes]) -> list[int]:
    """Ranks that hold something else than the largest party; of equal ones the one with the lowest rank."""
    parties: dict[bytes, list[int]] = {}
    for rank in sorted(digests):
        parties.setdefault(digests[rank], []).append(rank)
    right = max(parties.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return sorted(set(digests) - set(right))
