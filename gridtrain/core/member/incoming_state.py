"""How the state comes to a member that joins a generation, and what a member gives to those that join.

Decides whom a member asks, what it takes of what comes, and with what it answers others that ask.  Never
opens a block: the loop sends and takes them.  Who gives to whom is the VIEW's plan (`protocol.neighbours`),
or goes from one newcomer to the next (`protocol.passing_on`).

    joins     StateRequest --> donor (or who passes on)  --StateBlock ..-->  TakeBlock ..  Restored
                                                         nothing comes:      the donor is asked itself
    holds     <-- StateRequest      GiveState, at once or when it has a state itself
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.member_events import (
    ExpectStateDigest,
    ForwardState,
    LogEvent,
    MemberEffect,
    Send,
    SendState,
    StoreStateBlock,
)
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.required_peers import choose_state_source
from gridtrain.core.member.state_forwarding import StateForwarding


class IncomingState:
    """Both sides of it, of one member in one generation.

    Args:
        chained: newcomers pass on to each other what comes.
    """

    def __init__(self, seat: RankAssignment, lasting: MemberContext, *, chained: bool) -> None:
        self.forwarding = StateForwarding(seat, chained=chained)
        self._rank_assignment = seat
        self._context = lasting
        self._replica_state = lasting.replica_state
        self._pending_requests: dict[m.PeerId, m.StateRequest] = {}  # to be answered once it is synced

    # -- of the state that is lacking here ---------------------------------------------------------

    @property
    def source(self) -> m.PeerId | None:
        """Who gives this member the state that it lacks."""
        rank = (
            choose_state_source(self._rank_assignment, self._context.is_pipelined)
            if not self._replica_state.is_synced
            else None
        )
        return self._rank_assignment.members[rank].peer if rank is not None else None

    def request(self, of: m.PeerId | None = None) -> list[MemberEffect]:
        """`of`: this one alone has just been connected.  The loop says how much is here already."""
        seat, donor, giver = self._rank_assignment, self.source, self.forwarding.upstream
        if self._replica_state.is_synced or self._context.checkpoints.loading:
            return []
        whole = not self._context.catch_up.sources  # a follower has the rest, or will have it
        asks: list[tuple[m.PeerId | None, m.StateRequest]] = [
            (
                donor,
                m.StateRequest(seat.term, seat.generation, whole, digest_only=whole and giver is not None),
            )
        ]
        asks += [(giver, m.StateRequest(seat.term, seat.generation))] if whole else []
        up = self._context.peer_links.connected
        return [Send(peer, ask) for peer, ask in asks if peer in up and of in (None, peer) and peer]

    def bypass_forwarder(self, reason: str) -> list[MemberEffect]:
        """Whoever was to pass the state on to this member does not: the donor gives it."""
        giver = self.forwarding.upstream
        self.forwarding.bypass_upstream()
        fields = {"peer": giver.hex()[:8] if giver is not None else "", "reason": reason}
        return [LogEvent("not_passed_on", fields), *self.request()]

    def receive_block(self, peer: m.PeerId, block: m.StateBlock, now_s: float) -> list[MemberEffect]:
        if self._replica_state.is_synced or peer not in (self.source, self.forwarding.upstream):
            return []
        if not self.forwarding.accept_block(peer, block.index, now_s):
            return []
        if block.index == block.total - 1:
            self._replica_state.state_loading()
        return [StoreStateBlock(peer, block)]

    def receive_digest(self, peer: m.PeerId, told: m.StateDigest, now_s: float) -> list[MemberEffect]:
        if peer != self.source:
            return []
        self.forwarding.record_progress(now_s)
        return [ExpectStateDigest(told.generation, told.digest)]

    # -- of the state that is here -----------------------------------------------------------------

    def serve(self, peer: m.PeerId, asked: m.StateRequest) -> list[MemberEffect]:
        """What a joining member needs: our state, later if we have none yet, or a checkpoint of its stage."""
        seat, checkpoints = self._rank_assignment, self._context.checkpoints
        rank = seat.rank_of(peer)
        stage = seat.layout.stage_of(rank) if rank is not None else 0
        kept = checkpoints.find(seat.layers_of_stage(stage)) if stage != seat.stage else None
        if stage != seat.stage and kept is None:
            note = LogEvent("no_such_stage", {"stage": stage, "peer": peer.hex()[:8]})
            return [note, *checkpoints.report()]
        if peer == self.forwarding.downstream and not asked.digest_only and seat.members[seat.rank].joining:
            return [ForwardState(peer, seat.term, seat.generation, asked.blocks_received)]
        if kept is None and not self._replica_state.is_synced:
            self._pending_requests[peer] = asked
            return []
        return [
            SendState(
                peer,
                seat.term,
                seat.generation,
                asked.is_whole,
                kept,
                asked.blocks_received,
                asked.digest_only,
            )
        ]

    def serve_pending(self) -> list[MemberEffect]:
        """To whom it was not given, as it was not here yet."""
        asked, self._pending_requests = self._pending_requests, {}
        if not self._context.is_pipelined:
            return []
        return [effect for peer, request in asked.items() for effect in self.serve(peer, request)]
