"""Decides who gets a leaving worker's residual (unsent gradient), and when the recipient adds or drops it.

    leaving member, rank 2    recipient, rank 3 (or 1)   coordinator
      | votes on no more steps   |                          |
      | -- ResidualBlock 0, 1 -> | checks and stores them   |
      | <---- ResidualReply ---- |                          |
      | -- Leave ------------------------------------------> |
      x                          | <- Freeze, ... --------- |
                                 | <---- MembershipView --- |  the sender is no longer a member, and no step
                                 | adds it to its residual  |  was committed in the meantime

A step requires every member's vote.  As long as the sender is a member, no step is committed without it, so a
residual that it sent after step s stays complete until a MembershipView continues from s without the sender.
If the sender nevertheless takes part in another step, the recipient drops the residual.  The sender asks a
second recipient only if the first has declined.  Therefore, a residual is added once or not at all,
regardless of which messages are lost.

A recipient that is about to leave accepts no more residuals.  It waits until those that it has already
accepted are added to its own residual, which it then transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from gridtrain.core.member.peer_links import PeerLinks
from gridtrain.core.member.replica_state import ReplicaState
from gridtrain.errors import RemoteProtocolError


def residual_recipients(rank: int, world_size: int, stages: int = 1) -> tuple[int, ...]:
    """Return the ranks that a leaving member asks to accept its residual, in the order of the requests.

    They are the member's neighbours in the ring of its stage's replicas.
    """
    size = world_size // stages
    first, at = rank - rank % size, rank % size
    ring = (first + (at + 1) % size, first + (at - 1) % size)
    return tuple(dict.fromkeys(other for other in ring if other != rank))


@dataclass(slots=True)
class _ReceivedResidual:
    """The residual of one leaving member, `name`, as it was after step `applied`."""

    applied: int
    history: bytes
    name: str
    is_complete: bool = False


class ResidualTransfer:
    """Both sides of residual transfers, for one member.

    Args:
        replica_state: this member's state, whose position determines which residuals fit it.
        peer_links: this member's connections.

    Attributes:
        is_leaving: whether this member is transferring its residual and takes part in no more steps.
        is_refusing: whether this member declines all residuals, because it is about to leave.
    """

    def __init__(self, replica_state: ReplicaState, peer_links: PeerLinks) -> None:
        self._replica_state, self._peer_links = replica_state, peer_links
        self.is_leaving = False
        self.is_refusing = False
        self._recipient: m.Member | None = None
        self._asked_peers: set[m.PeerId] = set()
        self._blocks: tuple[Any, ...] = ()
        self._received: dict[m.PeerId, _ReceivedResidual] = {}

    # -- the leaving member ------------------------------------------------------------------------

    def begin(self, blocks: Sequence[Any], assignment: RankAssignment | None) -> list[MemberEffect]:
        """Send the residual, given as `blocks`, to the first recipient; `ResidualTransferEnded` follows.

        This member must not have contributed to the open round.  If `assignment` is None, the transfer fails.
        """
        self.is_leaving, self.is_refusing, self._blocks = True, True, tuple(blocks)
        reason = "no generation is running" if assignment is None else "no neighbour is connected"
        return self._ask(assignment, reason)

    def receive_reply(
        self, assignment: RankAssignment, peer: m.PeerId, reply: m.ResidualReply
    ) -> list[MemberEffect]:
        """Handle the recipient's reply: end the transfer or, if it declined, ask the next recipient."""
        recipient = self._recipient
        if recipient is None or peer != recipient.peer:
            return []
        self._recipient = None
        if reply.is_accepted:
            return [ResidualTransferEnded(True, recipient.name)]
        return self._ask(assignment, f"{recipient.name} declined: {reply.reason}")

    def recipient_lost(self, peer: m.PeerId) -> list[MemberEffect]:
        """End the transfer if `peer` is the recipient, although it may have received the whole residual."""
        recipient = self._recipient
        if recipient is None or peer != recipient.peer:
            return []
        self._recipient = None
        return [ResidualTransferEnded(None, f"{recipient.name} was disconnected before it replied")]

    def _ask(self, assignment: RankAssignment | None, reason: str) -> list[MemberEffect]:
        """Send the residual to the next recipient that is connected; end the transfer if there is none.

        Args:
            reason: the reason to state if the transfer ends.
        """
        if assignment is None:
            return [ResidualTransferEnded(False, reason)]
        ranks = residual_recipients(assignment.rank, assignment.world_size, assignment.stages)
        members = [assignment.members[rank] for rank in ranks]
        candidates = self._peer_links.connected - self._asked_peers
        able = (member for member in members if member.peer in candidates)
        recipient = next(able, None)
        if recipient is None:
            return [ResidualTransferEnded(False, reason)]
        self._recipient = recipient
        self._asked_peers.add(recipient.peer)
        common = assignment.term, assignment.generation, *self._replica_state.position
        total = len(self._blocks)
        return [
            Send(recipient.peer, m.ResidualBlock(*common, index, total, block))
            for index, block in enumerate(self._blocks)
        ]

    # -- the recipient -----------------------------------------------------------------------------

    def receive_block(
        self, assignment: RankAssignment, peer: m.PeerId, block: m.ResidualBlock
    ) -> list[MemberEffect]:
        """Store a block or, if this member cannot use it, decline the residual when its last block arrives.

        Raises:
            RemoteProtocolError: the sender must not send its residual to this member, or has already sent it.
        """
        if not assignment.is_generation_of(block):
            return []
        sender = _check_recipient(assignment, peer)
        received = self._received.get(peer)
        if received is not None and received.is_complete:
            raise RemoteProtocolError(
                f"peer {peer.hex()[:8]} sent its residual of generation {assignment.generation} twice",
            )
        reason = self._rejection_reason(block)
        if reason:
            is_last = block.index + 1 == block.total
            return [_make_reply(assignment, peer, False, reason)] if is_last else []
        if block.index == 0:
            self._received[peer] = _ReceivedResidual(block.applied, block.history, sender.name)
        return [StoreResidualBlock(peer, block, assignment.world_size)]

    def _rejection_reason(self, block: m.ResidualBlock) -> str:
        """Return the reason why this member cannot use a valid block, or an empty string if it can."""
        if self.is_refusing:
            return "it is also leaving"
        applied = self._replica_state.applied
        # This member may not yet have received the commit of the step after which the sender stopped.
        if not self._replica_state.is_synced or block.applied not in (applied, applied + 1):
            return f"it is at step {applied + 1}; the residual is of step {block.applied + 1}"
        return ""

    def mark_complete(self, assignment: RankAssignment | None, peer: m.PeerId) -> list[MemberEffect]:
        """Accept a residual whose blocks have all arrived and are valid.

        It is dropped if it is no longer expected or this member is outside a generation, and dropped and
        declined if this member is about to leave.
        """
        received = self._received.get(peer)
        if received is None or assignment is None:
            return [DropResidual(peer)]
        if self.is_refusing:
            del self._received[peer]
            return [DropResidual(peer), _make_reply(assignment, peer, False, "it is also leaving")]
        received.is_complete = True
        return [_make_reply(assignment, peer, True, "")]

    def begin_generation(self, assignment: RankAssignment) -> list[MemberEffect]:
        """Add the complete residuals of members that have left; drop incomplete and outdated residuals."""
        effects: list[MemberEffect] = []
        for peer, received in list(self._received.items()):
            fits = (received.applied, received.history) == self._replica_state.position
            is_usable = received.is_complete and self._replica_state.is_synced and fits
            if is_usable and assignment.rank_of(peer) is not None:
                continue  # it has not left yet
            del self._received[peer]
            if is_usable:
                effects.append(AddResidual(peer, received.name))
            else:
                effects += _drop_residual(peer, "it is incomplete or outdated")
        return effects

    def step_committed(self) -> list[MemberEffect]:
        """Drop residuals of steps before the committed one, because their senders have voted on that step."""
        effects: list[MemberEffect] = []
        applied = self._replica_state.applied
        for peer in [peer for peer, received in self._received.items() if received.applied < applied]:
            del self._received[peer]
            effects += _drop_residual(peer, "its sender has taken part in another step")
        return effects


def _drop_residual(peer: m.PeerId, reason: str) -> list[MemberEffect]:
    return [DropResidual(peer), LogEvent("residual_void", {"of": peer.hex()[:8], "reason": reason})]


def _make_reply(assignment: RankAssignment, peer: m.PeerId, is_accepted: bool, reason: str) -> Send:
    return Send(peer, m.ResidualReply(assignment.term, assignment.generation, is_accepted, reason))


def _check_recipient(assignment: RankAssignment, peer: m.PeerId) -> m.Member:
    """Return the member `peer`; raise `RemoteProtocolError` if it must not send this member its residual."""
    rank = assignment.rank_of(peer)
    allowed = residual_recipients(rank, assignment.world_size, assignment.stages) if rank is not None else ()
    if rank is None or assignment.rank not in allowed:
        raise RemoteProtocolError(
            f"rank {rank} sent its residual to rank {assignment.rank} of {assignment.world_size}; only the "
            "sender's neighbours in the ring may receive a residual",
        )
    return assignment.members[rank]
