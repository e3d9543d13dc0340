"""A worker's course through the generations, by what the coordinator says; and who is listened to at all.

Decides when a generation begins, is frozen or ends for this worker, and to which part of it a message goes.
Never decides what a member does within one (`protocol.generation`).

                              View: verdict, roster        state and edges are there
    APART ----------------------------> FORMING ----------------------> FORMING (READY sent)
      ^                                    ^                                |  Start
      |                          View      |                                v
      +--- Spared ------------- FROZEN <---+----------- Freeze --------- RUNNING

    the coordinator    in which term it speaks: `allegiance`;  a View: `entering`
    a peer             its followers, its donors: `following`;  a member: `generation`;  else: ignored
"""

from __future__ import annotations

from collections.abc import Sequence

from gridtrain.core import messages as m
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group.member_events import LogEvent, MemberEffect, ProbePeers, Send, TakeSnapshot
from gridtrain.core.member.context import MemberContext
from gridtrain.core.member.generation import Generation
from gridtrain.core.member.generation_entry import enter_generation, make_rank_assignment
from gridtrain.core.member.worker_catch_up import RECEIVER_MESSAGES, SOURCE_MESSAGES
from gridtrain.errors import RemoteProtocolError


class ViewChanges:
    """See the module's text.

    Attributes:
        here: the generation that this worker is in.
        first_step: of the latest one that named it.
    """

    def __init__(self, lasting: MemberContext) -> None:
        self.generation: Generation | None = None
        self.first_step = 0
        self._context = lasting
        self._coordinator_link = lasting.coordinator_link
        self._coordinator = lasting.coordinator
        self._pages: dict[int, m.MemberListPage] = {}  # of the VIEW to come
        self._early_requests: dict[m.PeerId, m.StateRequest | m.CheckpointRequest] = {}

    @property
    def rank_assignment(self) -> RankAssignment | None:
        """This worker's place in the latest generation that named it."""
        return self.generation.rank_assignment if self.generation is not None else None

    @property
    def generation_number(self) -> int:
        """Of that generation; 0: it is in none."""
        return self.generation.rank_assignment.generation if self.generation is not None else 0

    def receive(self, peer: m.PeerId, message: m.Message, nbytes: int, now_s: float) -> list[MemberEffect]:
        """Raises `RemoteProtocolError`."""
        lasting, here = self._context, self.generation
        if peer == self._coordinator:
            return self._receive_from_coordinator(message, now_s)
        if peer in lasting.peer_links.excluded:
            return []  # read before it was hung up on
        if isinstance(message, (*RECEIVER_MESSAGES, *SOURCE_MESSAGES)):
            return lasting.catch_up.receive(peer, message)
        if (
            isinstance(message, m.StateRequest | m.CheckpointRequest)
            and message.generation > self.generation_number
        ):
            self._early_requests[peer] = message  # the VIEW reached the joiner first
            return []
        if here is None or here.rank_assignment.rank_of(peer) is None:
            return [LogEvent("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]
        return here.receive(peer, message, nbytes, now_s)

    def _receive_from_coordinator(self, message: m.Message, now_s: float) -> list[MemberEffect]:
        edges = self._context.peer_links
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
                return edges.expect(peers, self.generation_number)
            case m.Admitted(probe):
                return [*edges.expect(probe, self.generation_number), ProbePeers(probe)]
            case m.CatchUpFrom(term, donors):
                return self._begin_catch_up(term, donors, now_s)
            case m.ServeCatchUp(term, step, to):
                return self._serve_catch_up(term, step, to)
            case m.ReplicaDiverged():
                return self._replica_diverged(message)
            case m.Freeze():
                return self._freeze(message)
            case m.MemberListPage(term, generation):
                if term >= self._coordinator_link.term and generation > self.generation_number:
                    self._pages[message.page] = message
                return []
            case m.MembershipView():
                return self._enter_generation(message, now_s)
            case m.StandbyNotice():
                return self._enter_standby(message)
            case m.StartGeneration(term, generation):
                return self._start_generation(term, generation, now_s)
            case m.HeartbeatReply():
                return []
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} from the coordinator")

    # -- outside of any generation, or beside it -------------------------------------------------

    def _welcomed(self, term: int) -> list[MemberEffect]:
        """What it may have missed while the connection was broken."""
        lasting, here, ours = self._context, self.generation, self._coordinator_link.term
        seated = self._coordinator_link.report_generation
        if not self._coordinator_link.accept_welcome(term):
            return [LogEvent("old_coordinator", {"term": term, "ours": ours}), *seated(self.rank_assignment)]
        if here is None:
            caught = lasting.catch_up.last_report
            return lasting.introduce() + ([Send(self._coordinator, caught)] if caught is not None else [])
        here.is_stall_reported = False
        effects = [
            *seated(here.rank_assignment),
            *lasting.introduce(),
            *here.resend_ready(),
            *here.resend_unreachable(),
        ]
        return effects + (lasting.report_finished() if here.is_running else [])

    def _begin_catch_up(
        self, term: int, donors: Sequence[tuple[m.PeerId, str]], now_s: float
    ) -> list[MemberEffect]:
        """Take over the donors' state while they train on.  A member has no use for it."""
        lasting = self._context
        if term < self._coordinator_link.term:
            return []
        if self.generation is not None:  # it was a member, and what it holds is replaced when it is one again
            return [Send(self._coordinator, m.CatchUpReport(*lasting.replica_state.position))]
        return lasting.catch_up.start(donors, lasting.peer_links, now_s)

    def _serve_catch_up(self, term: int, step: int, to: tuple[m.PeerId, ...]) -> list[MemberEffect]:
        if term < self._coordinator_link.term or self.generation is None:
            return []
        self._context.catch_up.receivers = frozenset(to) - {self._context.own_id}
        return [*self._context.disconnect_strangers(self.rank_assignment), TakeSnapshot(step, to)]

    def _replica_diverged(self, drifted: m.ReplicaDiverged) -> list[MemberEffect]:
        """What this worker holds is no state of this run any more; another generation gives it anew."""
        seat = self.rank_assignment
        if seat is None or (drifted.term, drifted.generation) != (seat.term, seat.generation):
            return []
        self._context.replica_state.is_synced = False
        return [LogEvent("drifted", {"step": drifted.step})]

    # -- from generation to generation -----------------------------------------------------------

    def _freeze(self, freeze: m.Freeze) -> list[MemberEffect]:
        if freeze.term < self._coordinator_link.term or freeze.generation < self.generation_number:
            return []
        lasting, here = self._context, self.generation
        lasting.peer_links.excluded |= set(freeze.removed) - {lasting.own_id}
        gone = lasting.disconnect_strangers(self.rank_assignment)
        given_up = here.freeze() if here is not None else []
        vote = here.prepared_vote if here is not None else None
        report = lasting.replica_state.make_report(freeze.term, freeze.generation, vote)
        note = LogEvent("frozen", {"reason": freeze.reason})
        return [note, Send(self._coordinator, report), *gone, *given_up]

    def _enter_generation(self, view: m.MembershipView, now_s: float) -> list[MemberEffect]:
        if view.term < self._coordinator_link.term or view.generation <= self.generation_number:
            return []
        pages = [page for _, page in sorted(self._pages.items()) if page.generation == view.generation]
        self._pages.clear()
        seat = make_rank_assignment(self._context.own_id, view, pages, self._context.trainer)
        here, effects = enter_generation(view, seat, self._context, self.generation, now_s)
        if here is None:
            return effects
        self.generation, self.first_step = here, view.applied + 1
        early, self._early_requests = self._early_requests, {}
        for peer, request in early.items():
            effects += self.receive(peer, request, 0, now_s)
        return effects + here.state_transfer.request() + here.check_ready()

    def _start_generation(self, term: int, generation: int, now_s: float) -> list[MemberEffect]:
        here = self.generation
        if here is None or (term, generation) != (here.rank_assignment.term, here.rank_assignment.generation):
            return []
        return here.start(now_s) if term >= self._coordinator_link.term else []

    def _enter_standby(self, view: m.StandbyNotice) -> list[MemberEffect]:
        """In no seat of this generation: after the verdict this worker is as one that has just come."""
        lasting, before = self._context, self.generation
        if view.term < self._coordinator_link.term or (
            before is not None and view.generation <= self.generation_number
        ):
            return []
        self._coordinator_link.term = view.term
        effects: list[MemberEffect] = [
            LogEvent("spare", {"generation": view.generation, "reason": view.reason})
        ]
        if before is not None:
            # Told later, to one that comes with checkpoints of a life before, it may be behind these.
            effects += [*lasting.checkpoints.discard(view.applied), *before.end(view)]
            lasting.checkpoints.enter_standby()
            lasting.replica_state.memory_layers, lasting.replica_state.ledger = None, view.ledger
            if lasting.is_finished:  # nothing comes after it
                before.close(view.applied + 1)
                return effects + lasting.report_finished()
            self.generation, lasting.replica_state.is_synced, lasting.checkpoints.generation = None, False, 0
            lasting.peer_links.excluded.clear()
        return effects + lasting.disconnect_strangers(self.rank_assignment)
