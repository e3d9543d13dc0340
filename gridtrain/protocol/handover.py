"""Who takes over the residual of a member that leaves, and when it counts.

Decides whom a leaver asks, what an heir accepts, and at which moment the residual is the heir's.  Never opens
a payload, never waits: deadlines are the trainer's.

    leaver, rank 2            heir, rank 3 (or 1)        coordinator
      | no step more              |                          |
      | -- HandOver 0, 1, .. ---> | complete, checked        |
      | <------- TakenOver ------ | kept apart               |
      | -- Leave ------------------------------------------> |
      x                           | <-- Freeze, .., View --- |  the leaver is no member, and no step was
                                  | adds it to its own       |  committed since: once, between two steps

A step takes the vote of all, so as long as the leaver is a member no step can be committed without it: what
it handed over after step s is whole until a View goes on from s without it.  If it votes again after all, or
anything else comes, the heir forgets it.  A leaver asks a second heir only where the first one has said that
it does not take it: so a residual is added once or not at all, whatever is lost on the way.

An heir that leaves itself takes nothing more, waits until what it has acknowledged counts, and hands that on
with its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gridtrain.errors import RemoteProtocolError
from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.member_io import Effect, Forget, Handed, Inherit, Note, Post, TakePiece

_REMEDY = "drop that peer; an honest one of the same version never sends this"


def heirs(rank: int, world_size: int, stages: int = 1) -> tuple[int, ...]:
    """Ranks that a leaver may ask, in this order: its neighbours in the ring, to whom it is connected.

    Of a model in stages: in the ring of those who hold the same stage.
    """
    size = world_size // stages
    first, at = rank - rank % size, rank % size
    ring = (first + (at + 1) % size, first + (at - 1) % size)
    return tuple(dict.fromkeys(other for other in ring if other != rank))


@dataclass(slots=True)
class _Estate:
    """What one leaver handed over to us."""

    applied: int
    history: bytes
    complete: bool = False


class Handover:
    """Both sides of it, of one member.

    Attributes:
        leaving: this member hands over its residual, and takes part in no step any more.
        refusing: it takes nothing over any more, since it is about to leave.
    """

    def __init__(self) -> None:
        self.leaving = False
        self.refusing = False
        self._heir: m.PeerId | None = None
        self._asked: set[m.PeerId] = set()
        self._pieces: tuple[Any, ...] = ()
        self._estates: dict[m.PeerId, _Estate] = {}

    # -- the leaver --------------------------------------------------------------------------------

    def begin(
        self, pieces: Sequence[Any], seat: Seat | None, up: Collection[m.PeerId], applied: int, history: bytes
    ) -> list[Effect]:
        """Ask the first heir; `Handed` answers.  No part in a round may be open."""
        self.leaving, self.refusing, self._pieces = True, True, tuple(pieces)
        why = "no generation is running" if seat is None else "no neighbour is connected"
        return self._ask(seat, up, applied, history, why)

    def answered(
        self, peer: m.PeerId, answer: m.TakenOver, seat: Seat, up: Collection[m.PeerId], at: tuple[int, bytes]
    ) -> list[Effect]:
        """The heir has it, or does not want it: then the next one is asked."""
        if peer != self._heir:
            return []
        self._heir = None
        if answer.taken:
            return [Handed(True, peer.hex()[:8])]
        return self._ask(seat, up, *at, f"{peer.hex()[:8]} declined: {answer.reason}")

    def lost(self, peer: m.PeerId) -> list[Effect]:
        """The heir is gone before it answered: whether it has everything cannot be known."""
        if peer != self._heir:
            return []
        self._heir = None
        return [Handed(None, f"{peer.hex()[:8]} was lost before it answered")]

    def _ask(
        self, seat: Seat | None, up: Collection[m.PeerId], applied: int, history: bytes, why: str
    ) -> list[Effect]:
        ranks = heirs(seat.rank, seat.world_size, seat.stages) if seat is not None else ()
        peers = [seat.roster[rank].peer for rank in ranks] if seat is not None else []
        heir = next((peer for peer in peers if peer in up and peer not in self._asked), None)
        if seat is None or heir is None:
            return [Handed(False, why)]
        self._heir = heir
        self._asked.add(heir)
        total = len(self._pieces)
        return [
            Post(heir, m.HandOver(seat.term, seat.generation, applied, history, index, total, piece))
            for index, piece in enumerate(self._pieces)
        ]

    # -- the heir ----------------------------------------------------------------------------------

    def piece(
        self, seat: Seat, peer: m.PeerId, piece: m.HandOver, applied: int, synced: bool
    ) -> list[Effect]:
        """Raises `RemoteProtocolError` where an honest leaver would not have sent it here."""
        if (piece.term, piece.generation) != (seat.term, seat.generation):
            return []
        _check_heir(seat, peer)
        known = self._estates.get(peer)
        if known is not None and known.complete:
            raise RemoteProtocolError(
                f"peer {peer.hex()[:8]} hands over its residual of generation {seat.generation} twice",
                remedy=_REMEDY,
            )
        why = self._unwanted(piece, applied, synced)
        if why:
            return [self._answer(seat, peer, False, why)] if piece.index + 1 == piece.total else []
        if piece.index == 0:
            self._estates[peer] = _Estate(piece.applied, piece.history)
        return [TakePiece(peer, piece, seat.world_size)]

    def _unwanted(self, piece: m.HandOver, applied: int, synced: bool) -> str:
        """Why an honest piece is of no use here; empty: it is."""
        if self.refusing:
            return "it leaves, too"
        # We may not have heard yet that the step was committed after which the leaver stopped.
        if not synced or piece.applied not in (applied, applied + 1):
            return f"it is at step {applied + 1}, the residual at step {piece.applied + 1}"
        return ""

    def complete(self, seat: Seat | None, peer: m.PeerId) -> list[Effect]:
        """All pieces are there and hold what they may."""
        estate = self._estates.get(peer)
        if estate is None or seat is None:
            return [Forget(peer)]
        if self.refusing:
            del self._estates[peer]
            return [Forget(peer), self._answer(seat, peer, False, "it leaves, too")]
        estate.complete = True
        return [self._answer(seat, peer, True, "")]

    def viewed(self, seat: Seat, applied: int, history: bytes, synced: bool) -> list[Effect]:
        """A generation begins: what its leavers left is ours now, or nobody's."""
        effects: list[Effect] = []
        for peer, estate in list(self._estates.items()):
            whole = estate.complete and synced and (estate.applied, estate.history) == (applied, history)
            if whole and seat.rank_of(peer) is not None:
                continue  # it has not left yet
            del self._estates[peer]
            effects += [Inherit(peer)] if whole else self._forget(peer, "the group went on with it")
        return effects

    def committed(self, applied: int) -> list[Effect]:
        """A step was committed: all members voted, so who had stopped before it has not left."""
        effects: list[Effect] = []
        for peer in [peer for peer, estate in self._estates.items() if estate.applied < applied]:
            del self._estates[peer]
            effects += self._forget(peer, "it took part in another step")
        return effects

    def _forget(self, peer: m.PeerId, why: str) -> list[Effect]:
        return [Forget(peer), Note("residual_void", {"of": peer.hex()[:8], "reason": why})]

    def _answer(self, seat: Seat, peer: m.PeerId, taken: bool, why: str) -> Post:
        return Post(peer, m.TakenOver(seat.term, seat.generation, taken, why))


def _check_heir(seat: Seat, peer: m.PeerId) -> None:
    rank = seat.rank_of(peer)
    if rank is None or seat.rank not in heirs(rank, seat.world_size, seat.stages):
        raise RemoteProtocolError(
            f"rank {rank} hands its residual over to rank {seat.rank} of {seat.world_size}; only its "
            "neighbours in the ring may be asked",
            remedy=_REMEDY,
        )
