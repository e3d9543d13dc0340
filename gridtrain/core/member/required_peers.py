"""Determines the connections that a member needs before and during training; reports unreachable peers.

    unpartitioned model   the neighbours in the exchange, the root and the state source; the root and the
                          state source are connected to all members
    model in stages       the neighbours in the exchange and the root, which is connected to all members; the
                          members of this replica in the previous and the next stage, where the last stage is
                          followed by the first; the sources of this member's state, and the members for which
                          this member is a source

Either both ends of a connection require it, or neither does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import ROOT
from gridtrain.core.group.io_loop_stalls import extend_start
from gridtrain.core.group.member_events import MemberEffect, Send, TrainerJoined
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.context import MemberContext

RECONNECT_SHARE = 0.5
"""The fraction of `Deadlines.route_s` after which missing peers are reported if all of them were connected
in an earlier generation."""


def choose_state_source(assignment: RankAssignment, is_pipelined: bool) -> int | None:
    """Return the rank of the state source for this member or, for an unpartitioned model, for all members.

    It is the rank that the coordinator chose, or else the lowest rank that holds the state (in a pipeline:
    the state of this member's stage).  The result is None if there is no state source.
    """
    members, world_size = assignment.members, assignment.world_size
    if is_pipelined:
        own = members[assignment.rank]
        if own.pieces:
            return None
        replicas = assignment.layout.stage_ranks(assignment.stage)
        lowest = next((rank for rank in replicas if not members[rank].joining), None)
        return own.donor if 0 <= own.donor < world_size else lowest
    chosen = (member.donor for member in members if member.joining)
    holders = (rank for rank, member in enumerate(members) if not member.joining)
    return next((rank for rank in chosen if 0 <= rank < world_size), next(holders, None))


def required_ranks(assignment: RankAssignment, trainer: TrainerJoined | None) -> frozenset[int]:
    """Return the ranks to which this member must be connected before it is ready, and in each step."""
    if trainer is not None and trainer.is_pipelined:
        return _required_in_pipeline(assignment, trainer)
    rank, world_size = assignment.rank, assignment.world_size
    source = choose_state_source(assignment, is_pipelined=False)
    centres = {ROOT} if source is None else {ROOT, source}
    if rank in centres:
        return frozenset(range(world_size)) - {rank}
    if trainer is None:
        return frozenset(centres)
    by_exchange: Mapping[str, Callable[..., frozenset[int]]] = trainer.neighbours_by_exchange
    neighbours = by_exchange.get(assignment.exchange, trainer.neighbours)
    return (neighbours(rank, world_size) | centres) - {rank}


def _required_in_pipeline(assignment: RankAssignment, trainer: TrainerJoined) -> frozenset[int]:
    """Return the required ranks for a model in stages.

    The stages form a ring: activations go to the next stage, and gradients come back from there.  The next
    stage also stores copies of checkpoints; the first stage stores those of the last stage.
    """
    rank, own, world_size = assignment.rank, assignment.members[assignment.rank], assignment.world_size
    if rank == ROOT:
        return frozenset(range(world_size)) - {ROOT}
    required = {ROOT, assignment.layout.backup_rank(rank), assignment.layout.backed_up_rank(rank)}
    source = choose_state_source(assignment, is_pipelined=True) if own.joining else None
    if source is not None:
        required.add(source)
    required |= {source for _, source in own.pieces if source < world_size}
    for other, member in enumerate(assignment.members):
        if member.donor == rank or any(source == rank for _, source in member.pieces):
            required.add(other)
    return (trainer.neighbours(rank, world_size, assignment.stage_bounds) | required) - {rank}


class RequiredPeers:
    """The required connections of one member in one generation."""

    def __init__(self, assignment: RankAssignment, context: MemberContext, now_s: float) -> None:
        self._rank_assignment = assignment
        self._context = context
        self._addresses = {member.peer: member.address for member in assignment.members}
        self._forming_since_s = now_s  # start of the wait for connections; infinite: reported as unreachable
        self._disconnected_since_s = now_s
        self._lost_before = set(context.peer_links.lost)  # peers that were lost in an earlier generation
        self._logged: set[m.PeerId] = set()  # peers whose absence was logged since a connection last broke
        self._ranks: frozenset[int] | None = None
        self._peers: tuple[m.PeerId, ...] | None = None  # the peers with these ranks

    @property
    def ranks(self) -> frozenset[int]:
        if self._ranks is None:  # cached, because it is used several times for each message
            self._ranks = required_ranks(self._rank_assignment, self._context.trainer)
        return self._ranks

    @property
    def missing(self) -> tuple[m.PeerId, ...]:
        """The required peers that are not connected."""
        if self._peers is None:  # cached, because this property is read in each iteration of the loop
            self._peers = tuple(self._rank_assignment.members[rank].peer for rank in sorted(self.ranks))
        connected = self._context.peer_links.connected
        if connected.issuperset(self._peers):
            return ()
        return tuple(peer for peer in self._peers if peer not in connected)

    def trainer_joined(self) -> None:
        """Compute the required ranks again, because the trainer's neighbours may have changed."""
        self._ranks = self._peers = None

    def dial(self, others: Collection[m.PeerId]) -> list[MemberEffect]:
        """Dial the required peers and `others`."""
        peers = {self._rank_assignment.members[rank].peer for rank in self.ranks}.union(others)
        return self._context.peer_links.dial_members(self._rank_assignment, peers)

    # -- peers that cannot be reached --------------------------------------------------------------

    @property
    def forming_deadline_s(self) -> float:
        """The time at which to call `report_late`; infinite if no peer is missing.

        It is earlier if every missing peer was connected in an earlier generation, because connecting again
        takes less time.
        """
        return self._forming_since_s + self._forming_timeout_s if self.missing else math.inf

    @property
    def _forming_timeout_s(self) -> float:
        share = RECONNECT_SHARE if self._lost_before.issuperset(self.missing) else 1.0
        return share * self._context.deadlines.route_s

    def report_late(self, now_s: float) -> list[MemberEffect]:
        """Report the missing peers if the deadline has passed."""
        return self.report_unreachable(self.missing) if now_s >= self.forming_deadline_s else []

    def repeat_unreachable(self) -> list[MemberEffect]:
        """Repeat the report of missing peers, if one was sent, because the coordinator may have missed it."""
        has_reported = math.isinf(self._forming_since_s) and self.missing
        return self.report_unreachable(self.missing) if has_reported else []

    def report_unreachable(self, missing: Sequence[m.PeerId]) -> list[MemberEffect]:
        """Report the peers in `missing` that this member dials; the coordinator may know their new addresses.

        A peer's absence is logged once; if this worker has no connection at all, that is logged instead.
        """
        self._forming_since_s = math.inf
        assignment, links = self._rank_assignment, self._context.peer_links
        dialled = tuple(peer for peer in missing if self._addresses[peer])
        effects: list[MemberEffect] = []
        if not self._logged.issuperset(missing) and (dialled or not links.connected):
            names = [f"{assignment.name_of(peer)} at {self._addresses[peer]}" for peer in dialled]
            effects = [links.log_unreachable(names)]
        self._logged.update(missing)
        if dialled:
            report = m.PeersUnreachable(assignment.term, assignment.generation, dialled)
            effects.append(Send(self._context.coordinator, report))
        return effects

    def disconnected_while_forming(self, peer: m.PeerId, now_s: float) -> None:
        """Restart the wait if the missing peers were already reported, or `peer` is the only one missing.

        The address of a peer that was connected is known to be reachable.
        """
        self._lost_before.discard(peer)
        self._logged.clear()
        if math.isinf(self._forming_since_s) or self.missing == (peer,):
            self._forming_since_s = now_s

    # -- RUNNING: connections that broke ---------------------------------------------------------

    @property
    def running_deadline_s(self) -> float:
        """The time at which to report a stall because of missing peers; valid only if a peer is missing."""
        return self._disconnected_since_s + 2 * self._context.deadlines.regreet_s

    def restart_running_wait(self, now_s: float) -> None:
        """Restart the wait for connections at the start of a generation, or after a connection broke."""
        self._disconnected_since_s = now_s
        self._logged.clear()

    def extend_timeouts(self, until_s: float) -> None:
        """After a stall of this worker's loop, postpone the deadlines to `until_s` or later."""
        self._forming_since_s = extend_start(self._forming_since_s, self._forming_timeout_s, until_s)
        regreet_s = self._context.deadlines.regreet_s
        self._disconnected_since_s = extend_start(self._disconnected_since_s, 2 * regreet_s, until_s)
