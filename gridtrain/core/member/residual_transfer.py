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

from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.member_events import (
    AddResidual,
    DropResidual,
    LogEvent,
    MemberEffect,
    ResidualTransferEnded,
    Send,
    StoreResidualBlock,
)
from gridtrain.errors import RemoteProtocolError

_REMEDY = "drop that peer; an honest one of the same version never sends this"


def residual_recipients(rank: int, world_size: int, stages: int = 1) -> tuple[int, ...]:
    """Ranks that a leaver may ask, in this order: its neighbours in the ring, to whom it is connected.

    Of a model in stages: in the ring of those who hold the same stage.
    """
    size = world_size // stages
    first, at = rank - rank % size, rank % size
    ring = (first + (at + 1) % size, first + (at - 1) % size)
    return tuple(dict.fromkeys(other for other in ring if other != rank))


@dataclass(slots=True)
class _ReceivedResidual:
    """What one leaver handed over to us."""

    applied: int
    history: bytes
    is_complete: bool = False


class ResidualTransfer:
    """Both sides of it, of one member.

    Attributes:
        leaving: this member hands over its residual, and takes part in no step any more.
        refusing: it takes nothing over any more, since it is about to leave.
    """

    def __init__(self) -> None:
        self.is_leaving = False
        self.is_refusing = False
        self._recipient: m.PeerId | None = None
        self._asked_peers: set[m.PeerId] = set()
        self._blocks: tuple[Any, ...] = ()
        self._received: dict[m.PeerId, _ReceivedResidual] = {}

    # -- the leaver --------------------------------------------------------------------------------

    def begin(
        self,
        pieces: Sequence[Any],
        seat: RankAssignment | None,
        up: Collection[m.PeerId],
        applied: int,
        history: bytes,
    ) -> list[MemberEffect]:
        """Ask the first heir; `Handed` answers.  No part in a round may be open."""
        self.is_leaving, self.is_refusing, self._blocks = True, True, tuple(pieces)
        why = "no generation is running" if seat is None else "no neighbour is connected"
        return self._ask(seat, up, applied, history, why)

    def receive_reply(
        self,
        peer: m.PeerId,
        answer: m.ResidualReply,
        seat: RankAssignment,
        up: Collection[m.PeerId],
        at: tuple[int, bytes],
    ) -> list[MemberEffect]:
        """The heir has it, or does not want it: then the next one is asked."""
        if peer != self._recipient:
            return []
        self._recipient = None
        if answer.is_accepted:
            return [ResidualTransferEnded(True, peer.hex()[:8])]
        return self._ask(seat, up, *at, f"{peer.hex()[:8]} declined: {answer.reason}")

    def recipient_lost(self, peer: m.PeerId) -> list[MemberEffect]:
        """The heir is gone before it answered: whether it has everything cannot be known."""
        if peer != self._recipient:
            return []
        self._recipient = None
        return [ResidualTransferEnded(None, f"{peer.hex()[:8]} was lost before it answered")]

    def _ask(
        self, seat: RankAssignment | None, up: Collection[m.PeerId], applied: int, history: bytes, why: str
    ) -> list[MemberEffect]:
        ranks = residual_recipients(seat.rank, seat.world_size, seat.stages) if seat is not None else ()
        peers = [seat.members[rank].peer for rank in ranks] if seat is not None else []
        heir = next((peer for peer in peers if peer in up and peer not in self._asked_peers), None)
        if seat is None or heir is None:
            return [ResidualTransferEnded(False, why)]
        self._recipient = heir
        self._asked_peers.add(heir)
        total = len(self._blocks)
        return [
            Send(heir, m.ResidualBlock(seat.term, seat.generation, applied, history, index, total, piece))
            for index, piece in enumerate(self._blocks)
        ]

    # -- the heir ----------------------------------------------------------------------------------

    def receive_block(
        self, seat: RankAssignment, peer: m.PeerId, piece: m.ResidualBlock, applied: int, synced: bool
    ) -> list[MemberEffect]:
        """Raises `RemoteProtocolError` where an honest leaver would not have sent it here."""
        if (piece.term, piece.generation) != (seat.term, seat.generation):
            return []
        _check_recipient(seat, peer)
        known = self._received.get(peer)
        if known is not None and known.is_complete:
            raise RemoteProtocolError(
                f"peer {peer.hex()[:8]} hands over its residual of generation {seat.generation} twice",
                remedy=_REMEDY,
            )
        why = self._rejection_reason(piece, applied, synced)
        if why:
            return [self._make_reply(seat, peer, False, why)] if piece.index + 1 == piece.total else []
        if piece.index == 0:
            self._received[peer] = _ReceivedResidual(piece.applied, piece.history)
        return [StoreResidualBlock(peer, piece, seat.world_size)]

    def _rejection_reason(self, piece: m.ResidualBlock, applied: int, synced: bool) -> str:
        """Why an honest piece is of no use here; empty: it is."""
        if self.is_refusing:
            return "it leaves, too"
        # We may not have heard yet that the step was committed after which the leaver stopped.
        if not synced or piece.applied not in (applied, applied + 1):
            return f"it is at step {applied + 1}, the residual at step {piece.applied + 1}"
        return ""

    def mark_complete(self, seat: RankAssignment | None, peer: m.PeerId) -> list[MemberEffect]:
        """All pieces are there and hold what they may."""
        estate = self._received.get(peer)
        if estate is None or seat is None:
            return [DropResidual(peer)]
        if self.is_refusing:
            del self._received[peer]
            return [DropResidual(peer), self._make_reply(seat, peer, False, "it leaves, too")]
        estate.is_complete = True
        return [self._make_reply(seat, peer, True, "")]

    def begin_generation(
        self, seat: RankAssignment, applied: int, history: bytes, synced: bool
    ) -> list[MemberEffect]:
        """A generation begins: what its leavers left is ours now, or nobody's."""
        effects: list[MemberEffect] = []
        for peer, estate in list(self._received.items()):
            whole = estate.is_complete and synced and (estate.applied, estate.history) == (applied, history)
            if whole and seat.rank_of(peer) is not None:
                continue  # it has not left yet
            del self._received[peer]
            effects += (
                [AddResidual(peer)] if whole else self._drop_residual(peer, "the group went on with it")
            )
        return effects

    def step_committed(self, applied: int) -> list[MemberEffect]:
        """A step was committed: all members voted, so who had stopped before it has not left."""
        effects: list[MemberEffect] = []
        for peer in [peer for peer, estate in self._received.items() if estate.applied < applied]:
            del self._received[peer]
            effects += self._drop_residual(peer, "it took part in another step")
        return effects

    def _drop_residual(self, peer: m.PeerId, why: str) -> list[MemberEffect]:
        return [DropResidual(peer), LogEvent("residual_void", {"of": peer.hex()[:8], "reason": why})]

    def _make_reply(self, seat: RankAssignment, peer: m.PeerId, taken: bool, why: str) -> Send:
        return Send(peer, m.ResidualReply(seat.term, seat.generation, taken, why))


def _check_recipient(seat: RankAssignment, peer: m.PeerId) -> None:
    rank = seat.rank_of(peer)
    if rank is None or seat.rank not in residual_recipients(rank, seat.world_size, seat.stages):
        raise RemoteProtocolError(
            f"rank {rank} hands its residual over to rank {seat.rank} of {seat.world_size}; only its "
            "neighbours in the ring may be asked",
            remedy=_REMEDY,
        )
