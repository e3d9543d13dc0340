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

from gridtrain.errors import RemoteProtocolError
from gridtrain.protocol import messages as m
from gridtrain.protocol.attempts import Seat
from gridtrain.protocol.entering import enter, seat_of
from gridtrain.protocol.following import OF_DONORS, OF_FOLLOWERS
from gridtrain.protocol.generation import Generation
from gridtrain.protocol.lasting import Lasting
from gridtrain.protocol.member_io import Donating, Effect, Note, Post, Probe


class Course:
    """See the module's text.

    Attributes:
        here: the generation that this worker is in.
        first_step: of the latest one that named it.
    """

    def __init__(self, lasting: Lasting) -> None:
        self.here: Generation | None = None
        self.first_step = 0
        self._lasting = lasting
        self._allegiance = lasting.allegiance
        self._coordinator = lasting.coordinator
        self._pages: dict[int, m.Roster] = {}  # of the VIEW to come
        self._early_requests: dict[m.PeerId, m.StateRequest | m.PieceAsk] = {}

    @property
    def seat(self) -> Seat | None:
        """This worker's place in the latest generation that named it."""
        return self.here.seat if self.here is not None else None

    @property
    def number(self) -> int:
        """Of that generation; 0: it is in none."""
        return self.here.seat.generation if self.here is not None else 0

    def heard(self, peer: m.PeerId, message: m.Message, nbytes: int, now_s: float) -> list[Effect]:
        """Raises `RemoteProtocolError`."""
        lasting, here = self._lasting, self.here
        if peer == self._coordinator:
            return self._from_coordinator(message, now_s)
        if peer in lasting.edges.offenders:
            return []  # read before it was hung up on
        if isinstance(message, (*OF_FOLLOWERS, *OF_DONORS)):
            return lasting.following.heard(peer, message)
        if isinstance(message, m.StateRequest | m.PieceAsk) and message.generation > self.number:
            self._early_requests[peer] = message  # the VIEW reached the joiner first
            return []
        if here is None or here.seat.rank_of(peer) is None:
            return [Note("ignored", {"peer": peer.hex()[:8], "message": type(message).__name__})]
        return here.heard(peer, message, nbytes, now_s)

    def _from_coordinator(self, message: m.Message, now_s: float) -> list[Effect]:
        edges = self._lasting.edges
        match message:
            case m.Welcome(term):
                return self._welcome(term)
            case _ if self._allegiance.is_over(message):
                return []
            case m.Rejoin(reason):
                return self._allegiance.rejoin(reason, self.number)
            case m.Refused() | m.Reach() | m.RunState():
                return self._allegiance.told(message)
            case m.Expect(peers):
                return edges.expect(peers, self.number)
            case m.Admitted(probe):
                return [*edges.expect(probe, self.number), Probe(probe)]
            case m.Fetch(term, donors):
                return self._follow(term, donors, now_s)
            case m.Donate(term, step, to):
                return self._donate(term, step, to)
            case m.Drifted():
                return self._drifted(message)
            case m.Freeze():
                return self._freeze(message)
            case m.Roster(term, generation):
                if term >= self._allegiance.term and generation > self.number:
                    self._pages[message.page] = message
                return []
            case m.View():
                return self._view(message, now_s)
            case m.Spared():
                return self._spared(message)
            case m.Start(term, generation):
                return self._start(term, generation, now_s)
            case m.BeatReply():
                return []
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} from the coordinator")

    # -- outside of any generation, or beside it -------------------------------------------------

    def _welcome(self, term: int) -> list[Effect]:
        """What it may have missed while the connection was broken."""
        lasting, here, ours = self._lasting, self.here, self._allegiance.term
        seated = self._allegiance.seated
        if not self._allegiance.welcome(term):
            return [Note("old_coordinator", {"term": term, "ours": ours}), *seated(self.seat)]
        if here is None:
            caught = lasting.following.caught
            return lasting.introduction() + ([Post(self._coordinator, caught)] if caught is not None else [])
        here.stalled = False
        effects = [*seated(here.seat), *lasting.introduction(), *here.ready_again(), *here.no_route_again()]
        return effects + (lasting.tell_finished() if here.is_running else [])

    def _follow(self, term: int, donors: Sequence[tuple[m.PeerId, str]], now_s: float) -> list[Effect]:
        """Take over the donors' state while they train on.  A member has no use for it."""
        lasting = self._lasting
        if term < self._allegiance.term:
            return []
        if self.here is not None:  # it was a member, and what it holds is replaced when it is one again
            return [Post(self._coordinator, m.Caught(*lasting.holding.at))]
        return lasting.following.follow(donors, lasting.edges, now_s)

    def _donate(self, term: int, step: int, to: tuple[m.PeerId, ...]) -> list[Effect]:
        if term < self._allegiance.term or self.here is None:
            return []
        self._lasting.following.followers = frozenset(to) - {self._lasting.me}
        return [*self._lasting.let_go(self.seat), Donating(step, to)]

    def _drifted(self, drifted: m.Drifted) -> list[Effect]:
        """What this worker holds is no state of this run any more; another generation gives it anew."""
        seat = self.seat
        if seat is None or (drifted.term, drifted.generation) != (seat.term, seat.generation):
            return []
        self._lasting.holding.synced = False
        return [Note("drifted", {"step": drifted.step})]

    # -- from generation to generation -----------------------------------------------------------

    def _freeze(self, freeze: m.Freeze) -> list[Effect]:
        if freeze.term < self._allegiance.term or freeze.generation < self.number:
            return []
        lasting, here = self._lasting, self.here
        lasting.edges.offenders |= set(freeze.without) - {lasting.me}
        gone = lasting.let_go(self.seat)
        given_up = here.freeze() if here is not None else []
        report = lasting.holding.report(freeze, here.voted if here is not None else None)
        note = Note("frozen", {"reason": freeze.reason})
        return [note, Post(self._coordinator, report), *gone, *given_up]

    def _view(self, view: m.View, now_s: float) -> list[Effect]:
        if view.term < self._allegiance.term or view.generation <= self.number:
            return []
        pages = [page for _, page in sorted(self._pages.items()) if page.generation == view.generation]
        self._pages.clear()
        seat = seat_of(self._lasting.me, view, pages, self._lasting.entered)
        here, effects = enter(view, seat, self._lasting, self.here, now_s)
        if here is None:
            return effects
        self.here, self.first_step = here, view.applied + 1
        early, self._early_requests = self._early_requests, {}
        for peer, request in early.items():
            effects += self.heard(peer, request, 0, now_s)
        return effects + here.state.ask() + here.maybe_ready()

    def _start(self, term: int, generation: int, now_s: float) -> list[Effect]:
        here = self.here
        if here is None or (term, generation) != (here.seat.term, here.seat.generation):
            return []
        return here.started(now_s) if term >= self._allegiance.term else []

    def _spared(self, view: m.Spared) -> list[Effect]:
        """In no seat of this generation: after the verdict this worker is as one that has just come."""
        lasting, before = self._lasting, self.here
        if view.term < self._allegiance.term or (before is not None and view.generation <= self.number):
            return []
        self._allegiance.term = view.term
        effects: list[Effect] = [Note("spare", {"generation": view.generation, "reason": view.reason})]
        if before is not None:
            # Told later, to one that comes with checkpoints of a life before, it may be behind these.
            effects += [*lasting.checkpoints.discard(view.applied), *before.end(view)]
            lasting.checkpoints.spared()
            lasting.holding.memory, lasting.holding.ledger = None, view.ledger
            if lasting.finished:  # nothing comes after it
                before.close(view.applied + 1)
                return effects + lasting.tell_finished()
            self.here, lasting.holding.synced, lasting.checkpoints.generation = None, False, 0
            lasting.edges.offenders.clear()
        return effects + lasting.let_go(self.seat)
