"""Follows the generations that the coordinator announces, and passes each message to its handler.

                     MembershipView                 synced and connected
APART ----------------------------> FORMING ----------------------> FORMING (Ready sent)
  ^                                    ^                                |  StartGeneration
  |                     MembershipView |                                v
  +--- StandbyNotice ------ FROZEN <---+----------- Freeze --------- RUNNING

A worker that the group has left behind goes from any phase to APART when it receives a CatchUpFrom.

A message from the coordinator is handled here, by `coordinator_link`, `peer_links` or `worker_catch_up`, or
by the generation; `generation_entry` handles a MembershipView.  A catch-up message from any other peer goes
to `worker_catch_up`, and any other message to the generation, provided that its sender is a member; otherwise
it is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.attempts import NO_VOTE
from gridtrain.core.group.member_events import LogEvent, MemberEffect, ProbePeers, Send, TakeStateSnapshot
from gridtrain.core.group.rank_layout import RankAssignment
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.generation import Generation
from gridtrain.core.member.generation_entry import enter_generation, make_rank_assignment
from gridtrain.core.member.worker_catch_up import CatchUpMessage
from gridtrain.errors import RemoteProtocolError


class ViewChanges:
    """Holds the worker's current generation and replaces it with the next one.

    Attributes:
        generation: the current generation; None if this worker belongs to none.
    """

    def __init__(self, context: MemberContext) -> None:
        self.generation: Generation | None = None
        self._context = context
        self._coordinator_link = context.coordinator_link
        self._coordinator = context.coordinator
        self._pages: dict[int, m.MemberListPage] = {}  # of the next member list
        self._listed: tuple[m.Member, ...] = ()  # the list of the generation, as it was received
        self._unlisted_generation = 0  # its list was sent as changes to a list that this worker does not have
        self._early_requests: dict[m.PeerId, m.StateRequest | m.CheckpointRequest] = {}

    @property
    def rank_assignment(self) -> RankAssignment | None:
        return self.generation.rank_assignment if self.generation is not None else None

    @property
    def generation_number(self) -> int:
        """Number of the current generation; 0 if this worker belongs to none."""
        return self.generation.rank_assignment.generation if self.generation is not None else 0

    def receive(self, peer: m.PeerId, message: m.Message, nbytes: int, now_s: float) -> list[MemberEffect]:
        """Pass a message to its handler.

        Raises:
            RemoteProtocolError: the message violates the protocol.
        """
        context, generation = self._context, self.generation
        if peer == self._coordinator:
            return self._receive_from_coordinator(message, now_s)
        if peer in context.peer_links.excluded:
            return []  # received before the peer was disconnected
        if isinstance(message, CatchUpMessage):
            return context.catch_up.receive(peer, message)
        if (
            isinstance(message, m.StateRequest | m.CheckpointRequest)
            and message.generation > self.generation_number
        ):
            self._early_requests[peer] = message  # the MembershipView reached the joining member first
            return []
        if generation is None or generation.rank_assignment.rank_of(peer) is None:
            return [LogEvent("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]
        return generation.receive(peer, message, nbytes, now_s)

    def receive_data(self, peer: m.PeerId, data: m.Data, nbytes: int, now_s: float) -> list[MemberEffect]:
        """Pass a payload to the current generation.

        Raises:
            RemoteProtocolError: the payload violates the protocol.
        """
        generation, excluded = self.generation, self._context.peer_links.excluded
        rank = generation.rank_assignment.rank_of(peer) if generation is not None else None
        if generation is None or rank is None or peer in excluded or peer == self._coordinator:
            return self.receive(peer, data, nbytes, now_s)
        return generation.receive_data(rank, data, nbytes, now_s)

    def _receive_from_coordinator(self, message: m.Message, now_s: float) -> list[MemberEffect]:
        links = self._context.peer_links
        match message:
            case m.Welcome(term):
                return self._welcomed(term)
            case _ if self._coordinator_link.is_outdated(message):
                return []
            case m.Rejoin(reason):
                return self._coordinator_link.rejoin(reason, self.generation_number)
            case m.Refused() | m.Reachability() | m.RunStateUpdate():
                return self._coordinator_link.receive(message)
            case m.ExpectProbes(peers):
                return links.expect(peers, self.generation_number)
            case m.Admitted(targets):
                probe = ProbePeers(targets, is_member=self.generation is not None)
                return [*links.expect(targets, self.generation_number), probe]
            case m.CatchUpFrom(term, sources):
                return self._begin_catch_up(term, sources, now_s)
            case m.ServeCatchUp(term, step, receivers):
                return self._serve_catch_up(term, step, receivers)
            case m.ReplicaDiverged():
                return self._replica_diverged(message)
            case m.Freeze():
                return self._freeze(message)
            case m.MemberListPage(term, generation):
                if term >= self._coordinator_link.term and generation > self.generation_number:
                    self._pages[message.page] = message
                return []
            case m.MemberListChanges():
                return self._change_list(message)
            case m.MembershipView():
                return self._enter_generation(message, now_s)
            case m.StandbyNotice():
                return self._enter_standby(message)
            case m.StartGeneration():
                return self._start_generation(message, now_s)
            case m.HeartbeatReply():
                return []
            case _:
                raise RemoteProtocolError(
                    f"the coordinator sent {type(message).__name__}, which coordinators must not send"
                )

    # -- outside of a generation, or beside it ---------------------------------------------------

    def _welcomed(self, term: int) -> list[MemberEffect]:
        """Handle a Welcome: repeat the messages that may have been lost while the connection was broken."""
        context, generation, link = self._context, self.generation, self._coordinator_link
        own_term = link.term
        if not link.accept_welcome(term):
            event = LogEvent("old_coordinator", {"term": term, "ours": own_term})
            return [event, *link.report_generation(self.rank_assignment)]
        if generation is None:
            report = context.catch_up.last_report
            return context.introduce() + ([Send(self._coordinator, report)] if report is not None else [])
        current = link.report_generation(generation.rank_assignment)
        return [*current, *context.introduce(), *generation.coordinator_returned()]

    def _begin_catch_up(
        self, term: int, sources: Sequence[tuple[m.PeerId, str]], now_s: float
    ) -> list[MemberEffect]:
        """Start catch-up from `sources`; a worker that the group left behind leaves its generation first.

        With a prepared update, the worker only reports its position, because the next MembershipView may
        commit the update.
        """
        if term < self._coordinator_link.term:
            return []
        context, effects = self._context, list[MemberEffect]()
        if self.generation is not None:
            if self.generation.attempts.prepared_attempt is not None:
                return [Send(self._coordinator, m.CatchUpReport(*context.replica_state.position))]
            told = LogEvent("left_behind", {"step": context.replica_state.step})
            effects = [told, *self.generation.abandon("the group continued"), TakeStateSnapshot(-1, ())]
            context.catch_up.serve(())
            self._leave_generation(has_state=context.replica_state.has_state)
        return effects + context.catch_up.start(sources, now_s)

    def _serve_catch_up(self, term: int, step: int, receivers: tuple[m.PeerId, ...]) -> list[MemberEffect]:
        if term < self._coordinator_link.term or self.generation is None:
            return []
        self._context.catch_up.serve(set(receivers) - {self._context.own_id})
        return [*self._context.disconnect_strangers(self.rank_assignment), TakeStateSnapshot(step, receivers)]

    def _replica_diverged(self, message: m.ReplicaDiverged) -> list[MemberEffect]:
        """Mark this worker's state as diverged from the run's, so that the next generation replaces it."""
        assignment = self.rank_assignment
        if assignment is None or not assignment.is_generation_of(message):
            return []
        if not self._context.replica_state.is_synced:
            return []  # the notice is repeated until the state is replaced
        self._context.replica_state.mark_unsynced()
        return [LogEvent("drifted", {"step": message.step + 1})]

    # -- from generation to generation -----------------------------------------------------------

    def _freeze(self, freeze: m.Freeze) -> list[MemberEffect]:
        if freeze.term < self._coordinator_link.term or freeze.generation < self.generation_number:
            return []
        context, generation = self._context, self.generation
        context.peer_links.exclude_removed(freeze.removed)
        disconnected = context.disconnect_strangers(self.rank_assignment)
        if generation is not None:
            generation.freeze()
        vote = generation.attempts.prepared_vote if generation is not None else NO_VOTE
        report = context.replica_state.make_freeze_report(freeze.term, freeze.generation, vote)
        event = LogEvent("frozen", {"reason": freeze.reason})
        return [event, Send(self._coordinator, report), *disconnected]

    def _change_list(self, changes: m.MemberListChanges) -> list[MemberEffect]:
        """Build the next member list from the current one or, if that fails, rejoin to receive it."""
        if changes.term < self._coordinator_link.term or changes.generation <= self.generation_number:
            return []
        members = changes.apply(self._listed) if changes.base == self.generation_number else None
        if members is None:
            self._unlisted_generation = changes.generation
            reason = f"changes to generation {changes.base}'s member list do not apply to this worker's list"
            return self._coordinator_link.rejoin(reason, self.generation_number)
        self._pages = {0: m.MemberListPage(changes.term, changes.generation, 0, 1, members)}
        return []

    def _enter_generation(self, view: m.MembershipView, now_s: float) -> list[MemberEffect]:
        if view.term < self._coordinator_link.term or view.generation <= self.generation_number:
            return []
        context = self._context
        pages = [page for _, page in sorted(self._pages.items()) if page.generation == view.generation]
        if not pages and view.generation == self._unlisted_generation:
            return []  # the coordinator sends the view again, with the list
        self._pages.clear()
        members = tuple(member for page in pages for member in page.members)
        assignment = make_rank_assignment(context.own_id, view, members, context.trainer)
        generation, effects = enter_generation(view, assignment, context, self.generation, now_s)
        if generation is None:
            return effects
        self.generation, self._listed = generation, members
        early, self._early_requests = self._early_requests, {}
        for peer, request in early.items():
            effects += self.receive(peer, request, 0, now_s)
        return effects + generation.incoming_state.request() + generation.check_ready()

    def _start_generation(self, message: m.StartGeneration, now_s: float) -> list[MemberEffect]:
        generation = self.generation
        if generation is None or not generation.rank_assignment.is_generation_of(message):
            return []
        return generation.start(now_s) if message.term >= self._coordinator_link.term else []

    def _enter_standby(self, notice: m.StandbyNotice) -> list[MemberEffect]:
        """Handle a StandbyNotice: execute the verdict and leave the generation, because the next one has no
        rank for this worker.

        Afterwards, this worker is in the same situation as a worker that has just joined, unless the run has
        ended; in that case it stays in the generation and reports the end.
        """
        context, before = self._context, self.generation
        is_old = before is not None and notice.generation <= self.generation_number
        if notice.term < self._coordinator_link.term or is_old:
            return []
        self._coordinator_link.term = notice.term
        fields = {"generation": notice.generation, "reason": notice.reason}
        effects: list[MemberEffect] = [LogEvent("spare", fields)]
        if before is not None:
            # Only for a former member: a newcomer may have checkpoints of later steps from an earlier run.
            effects += context.checkpoints.discard(notice.applied)
            has_state = context.replica_state.has_state  # now, because the notice may name another position
            setup = context.setup
            is_over = setup is not None and data_ledger.is_finished(setup.ledger, notice.ledger)
            effects += before.end(notice, must_know_round=not is_over)  # the state is needed only at the end
            context.checkpoints.enter_standby()
            context.replica_state.enter_standby(notice.ledger)
            if context.is_at_end:
                before.close(notice.applied + 1)
                return effects + context.report_finished()
            context.replica_state.mark_unsynced()
            self._leave_generation(has_state=has_state)
        return effects + context.disconnect_strangers(self.rank_assignment)

    def _leave_generation(self, *, has_state: bool) -> None:
        """Leave the generation; this worker is then in the same situation as one that has just joined.

        Args:
            has_state: whether this worker's position is its own, not that of a state not received yet.
        """
        context = self._context
        if not has_state:
            context.replica_state.forget_position()
        self.generation = None
        context.checkpoints.leave_generation()
        context.peer_links.readmit_all()
