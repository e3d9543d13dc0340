"""Transfer of a leaving member's residual to a neighbour, so that no gradient is lost.

    leaving member, rank 2    recipient, rank 3 (or 1)   coordinator
      | takes part in no step    |                          |
      | -- ResidualBlock 0, 1 -> | complete, checked        |
      | <---- ResidualReply ---- | stored apart             |
      | -- Leave ------------------------------------------> |
      x                          | <- Freeze, .., VIEW ---- |  the sender is no member any more, and no step
                                 | adds it to its own       |  was committed since: once, between two steps

A step needs every member's vote.  As long as the sender is a member, no step is committed without it, so the
residual that it sent after step s is complete until a VIEW continues from s without it.  If it votes again
after all, or something else arrives from it, the recipient drops the residual.  The sender asks a second
recipient only where the first has declined.  So a residual is added once or not at all, whatever is lost on
the way.

A recipient that leaves itself accepts no further residual, waits until what it has accepted counts, and
transfers that with its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import (
    AddResidual,
    DropResidual,
    LogEvent,
    MemberEffect,
    ResidualTransferEnded,
    Send,
    StoreResidualBlock,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.errors import RemoteProtocolError

_REMEDY = "drop that peer; an honest one of the same version never sends this"


def residual_recipients(rank: int, world_size: int, stages: int = 1) -> tuple[int, ...]:
    """Ranks that a leaving member may ask, in this order: its neighbours in the ring of its stage's
    replicas."""
    size = world_size // stages
    first, at = rank - rank % size, rank % size
    ring = (first + (at + 1) % size, first + (at - 1) % size)
    return tuple(dict.fromkeys(other for other in ring if other != rank))


@dataclass(slots=True)
class _ReceivedResidual:
    """The residual of one leaving member, as it was after step `applied`."""

    applied: int
    history: bytes
    is_complete: bool = False


class ResidualTransfer:
    """Both sides of the transfer, of one member.

    Attributes:
        is_leaving: this member transfers its residual, and takes part in no further step.
        is_refusing: it accepts no further residual, as it is about to leave.
    """

    def __init__(self) -> None:
        self.is_leaving = False
        self.is_refusing = False
        self._recipient: m.PeerId | None = None
        self._asked_peers: set[m.PeerId] = set()
        self._blocks: tuple[Any, ...] = ()
        self._received: dict[m.PeerId, _ReceivedResidual] = {}

    # -- the leaving member ------------------------------------------------------------------------

    def begin(
        self,
        blocks: Sequence[Any],
        assignment: RankAssignment | None,
        connected: Collection[m.PeerId],
        applied: int,
        history: bytes,
    ) -> list[MemberEffect]:
        """Ask the first recipient; `ResidualTransferEnded` follows.  This member may have no part in a
        round."""
        self.is_leaving, self.is_refusing, self._blocks = True, True, tuple(blocks)
        reason = "no generation is running" if assignment is None else "no neighbour is connected"
        return self._ask(assignment, connected, applied, history, reason)

    def receive_reply(
        self,
        peer: m.PeerId,
        reply: m.ResidualReply,
        assignment: RankAssignment,
        connected: Collection[m.PeerId],
        position: tuple[int, bytes],
    ) -> list[MemberEffect]:
        """The recipient has accepted, or has declined; then the next one is asked."""
        if peer != self._recipient:
            return []
        self._recipient = None
        if reply.is_accepted:
            return [ResidualTransferEnded(True, peer.hex()[:8])]
        return self._ask(assignment, connected, *position, f"{peer.hex()[:8]} declined: {reply.reason}")

    def recipient_lost(self, peer: m.PeerId) -> list[MemberEffect]:
        """The recipient is gone before it replied: whether it has everything cannot be known."""
        if peer != self._recipient:
            return []
        self._recipient = None
        return [ResidualTransferEnded(None, f"{peer.hex()[:8]} was lost before it answered")]

    def _ask(
        self,
        assignment: RankAssignment | None,
        connected: Collection[m.PeerId],
        applied: int,
        history: bytes,
        reason: str,
    ) -> list[MemberEffect]:
        """Send the residual to the next recipient; `reason`: why it was not transferred, if there is none."""
        if assignment is None:
            return [ResidualTransferEnded(False, reason)]
        ranks = residual_recipients(assignment.rank, assignment.world_size, assignment.stages)
        peers = [assignment.members[rank].peer for rank in ranks]
        recipient = next((p for p in peers if p in connected and p not in self._asked_peers), None)
        if recipient is None:
            return [ResidualTransferEnded(False, reason)]
        self._recipient = recipient
        self._asked_peers.add(recipient)
        term, generation, total = assignment.term, assignment.generation, len(self._blocks)
        return [
            Send(recipient, m.ResidualBlock(term, generation, applied, history, index, total, block))
            for index, block in enumerate(self._blocks)
        ]

    # -- the recipient -----------------------------------------------------------------------------

    def refuse(self) -> None:
        """Accept no further residual."""
        self.is_refusing = True

    def receive_block(
        self,
        assignment: RankAssignment,
        peer: m.PeerId,
        block: m.ResidualBlock,
        applied: int,
        is_synced: bool,
    ) -> list[MemberEffect]:
        """Store a block, or decline.  Raises `RemoteProtocolError` where an honest member would not send
        it."""
        if (block.term, block.generation) != (assignment.term, assignment.generation):
            return []
        _check_recipient(assignment, peer)
        received = self._received.get(peer)
        if received is not None and received.is_complete:
            raise RemoteProtocolError(
                f"peer {peer.hex()[:8]} sends its residual of generation {assignment.generation} twice",
                remedy=_REMEDY,
            )
        reason = self._rejection_reason(block, applied, is_synced)
        if reason:
            is_last = block.index + 1 == block.total
            return [_make_reply(assignment, peer, False, reason)] if is_last else []
        if block.index == 0:
            self._received[peer] = _ReceivedResidual(block.applied, block.history)
        return [StoreResidualBlock(peer, block, assignment.world_size)]

    def _rejection_reason(self, block: m.ResidualBlock, applied: int, is_synced: bool) -> str:
        """Why this member cannot use an honest block; empty: it can."""
        if self.is_refusing:
            return "it leaves, too"
        # The commit of the step after which the sender stopped may not have been received here yet.
        if not is_synced or block.applied not in (applied, applied + 1):
            return f"it is at step {applied + 1}, the residual at step {block.applied + 1}"
        return ""

    def mark_complete(self, assignment: RankAssignment | None, peer: m.PeerId) -> list[MemberEffect]:
        """All blocks have arrived and passed their checks: accept."""
        received = self._received.get(peer)
        if received is None or assignment is None:
            return [DropResidual(peer)]
        if self.is_refusing:
            del self._received[peer]
            return [DropResidual(peer), _make_reply(assignment, peer, False, "it leaves, too")]
        received.is_complete = True
        return [_make_reply(assignment, peer, True, "")]

    def begin_generation(
        self, assignment: RankAssignment, applied: int, history: bytes, is_synced: bool
    ) -> list[MemberEffect]:
        """Add the residuals of members that are gone, or drop what does not belong to this state."""
        effects: list[MemberEffect] = []
        for peer, received in list(self._received.items()):
            fits = (received.applied, received.history) == (applied, history)
            is_usable = received.is_complete and is_synced and fits
            if is_usable and assignment.rank_of(peer) is not None:
                continue  # it has not left yet
            del self._received[peer]
            effects += [AddResidual(peer)] if is_usable else _drop_residual(peer, "the group went on with it")
        return effects

    def step_committed(self, applied: int) -> list[MemberEffect]:
        """All members voted on this step, so a sender that had stopped before it has not left."""
        effects: list[MemberEffect] = []
        for peer in [peer for peer, received in self._received.items() if received.applied < applied]:
            del self._received[peer]
            effects += _drop_residual(peer, "it took part in another step")
        return effects


def _drop_residual(peer: m.PeerId, reason: str) -> list[MemberEffect]:
    return [DropResidual(peer), LogEvent("residual_void", {"of": peer.hex()[:8], "reason": reason})]


def _make_reply(assignment: RankAssignment, peer: m.PeerId, is_accepted: bool, reason: str) -> Send:
    return Send(peer, m.ResidualReply(assignment.term, assignment.generation, is_accepted, reason))


def _check_recipient(assignment: RankAssignment, peer: m.PeerId) -> None:
    rank = assignment.rank_of(peer)
    allowed = residual_recipients(rank, assignment.world_size, assignment.stages) if rank is not None else ()
    if assignment.rank not in allowed:
        raise RemoteProtocolError(
            f"rank {rank} sends its residual to rank {assignment.rank} of {assignment.world_size}; only its "
            "neighbours in the ring may receive it",
            remedy=_REMEDY,
        )
