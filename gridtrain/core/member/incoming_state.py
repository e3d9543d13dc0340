"""Requests and sends the state while the group waits; decides which member to ask, and when to ask again.

    joining member         sends StateRequest to the state source, or to the member that forwards the state
                           stores each StateBlock that it receives (StoreStateBlock)
                           sends StateRequest to the source if no block arrives in time
    member with the state  answers StateRequest with SendState; in a pipeline, as soon as it is synced

The member list names the state sources (`required_peers`); joining members forward the state along a chain
(`state_forwarding`).
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.group.member_events import (
    ExpectStateDigest,
    ForwardState,
    LogEvent,
    MemberEffect,
    Send,
    SendState,
    StoreStateBlock,
)
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.required_peers import choose_state_source
from gridtrain.core.member.state_forwarding import StateForwarding


class IncomingState:
    """Both sides of the state transfer, for one member in one generation.

    Args:
        chained: whether joining members forward the state to one another.
    """

    def __init__(self, assignment: RankAssignment, context: MemberContext, *, chained: bool) -> None:
        self.forwarding = StateForwarding(assignment, chained=chained)
        self._rank_assignment = assignment
        self._context = context
        self._replica_state = context.replica_state
        self._pending_requests: dict[m.PeerId, m.StateRequest] = {}  # until this member is synced

    # -- the state that this member needs ---------------------------------------------------------

    @property
    def source(self) -> m.PeerId | None:
        """The member that sends the state, or the digest of a forwarded state.

        None if this member is synced or there is no state source.
        """
        if self._replica_state.is_synced:
            return None
        rank = choose_state_source(self._rank_assignment, self._context.is_pipelined)
        return self._rank_assignment.members[rank].peer if rank is not None else None

    @property
    def shared_position(self) -> tuple[int, bytes] | None:
        """The missing state's (applied, history) if all sources have the same shared part; otherwise None.

        The sources' shared parts (`training.checkpoint.serialization`) may differ before the first step,
        because each member may have built its own state, and in a pipeline, because a stage may be captured
        from memory or read from disk.
        """
        applied, history = self._replica_state.position
        return (applied, history) if applied >= 0 and not self._context.is_pipelined else None

    def request(self, of: m.PeerId | None = None) -> list[MemberEffect]:
        """Request the state and, if another member forwards it, its digest from the state source.

        Only connected peers are asked, and only the peer `of` if it is given.  The I/O loop fills in the
        number of blocks that have already been received.
        """
        if self._replica_state.is_synced or self._context.checkpoints.loading:
            return []
        at, source, upstream = self._rank_assignment, self.source, self.forwarding.upstream
        is_whole = not self._context.catch_up.sources  # catch-up transfers the rest
        only_digest = is_whole and upstream is not None
        requests = [(source, m.StateRequest(at.term, at.generation, is_whole, digest_only=only_digest))]
        if is_whole:
            requests.append((upstream, m.StateRequest(at.term, at.generation)))
        up = self._context.peer_links.connected
        return [Send(peer, x) for peer, x in requests if peer in up and of in (None, peer) and peer]

    def bypass_forwarder(self, reason: str) -> list[MemberEffect]:
        """Request the rest of the state from the source instead of the forwarding member."""
        upstream = self.forwarding.upstream
        self.forwarding.bypass_upstream()
        fields = {"peer": upstream.hex()[:8] if upstream is not None else "", "reason": reason}
        return [LogEvent("forwarder_bypassed", fields), *self.request()]

    def receive_block(self, peer: m.PeerId, block: m.StateBlock, now_s: float) -> list[MemberEffect]:
        if self._replica_state.is_synced or peer not in (self.source, self.forwarding.upstream):
            return []
        self.forwarding.record_block(peer, block.index, now_s)
        if block.index == block.total - 1:
            self._replica_state.state_received()
        return [StoreStateBlock(peer, block)]

    def receive_digest(self, peer: m.PeerId, message: m.StateDigest, now_s: float) -> list[MemberEffect]:
        if peer != self.source:
            return []
        self.forwarding.record_progress(now_s)
        return [ExpectStateDigest(message.generation, message.digest)]

    # -- the state that this member holds ----------------------------------------------------------

    def serve(self, peer: m.PeerId, request: m.StateRequest) -> list[MemberEffect]:
        """Answer another member's request for the state.

        If the peer holds a different stage, this member sends a stored checkpoint of that stage.  Otherwise,
        it sends its own state or, if it is not synced, stores the request until it is.  A joining member
        instead forwards the blocks of the state, as they arrive, to the next member of the chain.
        """
        at, checkpoints = self._rank_assignment, self._context.checkpoints
        rank = at.rank_of(peer)
        stage = at.layout.stage_of(rank) if rank is not None else 0
        stored = checkpoints.find(at.layers_of_stage(stage)) if stage != at.stage else None
        if stage != at.stage and stored is None:
            event = LogEvent("no_such_stage", {"stage": stage, "peer": peer.hex()[:8]})
            return [event, *checkpoints.report()]
        is_joining = at.members[at.rank].joining
        if peer == self.forwarding.downstream and not request.digest_only and is_joining:
            return [ForwardState(peer, at.term, at.generation, request.blocks_received)]
        if stored is None and not self._replica_state.is_synced:
            self._pending_requests[peer] = request
            return []
        whole, received = request.is_whole, request.blocks_received
        return [SendState(peer, at.term, at.generation, whole, stored, received, request.digest_only)]

    def serve_pending(self) -> list[MemberEffect]:
        """Answer the requests that arrived before this member was synced.

        If the model is not partitioned, they are discarded instead.
        """
        requests, self._pending_requests = self._pending_requests, {}
        if not self._context.is_pipelined:
            return []
        return [effect for peer, request in requests.items() for effect in self.serve(peer, request)]
