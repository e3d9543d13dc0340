"""The part of the coordinator's core that only a model in stages needs: seats, spares, whole steps.

Decides when a run in stages goes on, goes back or waits, once it is known who is here and what they hold.
Never makes a generation: that is `protocol.membership`, whose other half this is.

    all REPORTs are here --> every stage in somebody's hands --------------> the next generation
                             no, but of an earlier step on disks ----------> ROLLBACK, the next generation
                             neither --------------------------------------> PAUSED, until somebody comes
    fewer workers than stages: PAUSED for `recut_s`, then a new cut over those who are here, if the model fits
    generation made -------> who has no seat is a spare, and is told why

See `protocol.copies` for which step, `protocol.recutting` for where the model is cut, `protocol.seating` for
who sits where.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gridtrain.config import Deadlines
from gridtrain.errors import ConfigError
from gridtrain.protocol import assigning, ledger, recutting, topology
from gridtrain.protocol import messages as m
from gridtrain.protocol.breaks import Breaks
from gridtrain.protocol.copies import Begin, held_by, too_few, where, workers
from gridtrain.protocol.membership_io import Effect, Journal, Note, RunPhase, Send, Strike
from gridtrain.protocol.recovery import checkpoint_entry
from gridtrain.protocol.recutter import Recutter
from gridtrain.protocol.recutting import Recut, cuts_of, spans_of
from gridtrain.protocol.roll import Worker, latencies
from gridtrain.protocol.round import HISTORY_START
from gridtrain.protocol.seating import Cost, Hands, Seating, pair_cost, seat
from gridtrain.protocol.seats import Seats
from gridtrain.protocol.stage_costs import Card
from gridtrain.protocol.unwritten import cut_of, leans_on, not_written
from gridtrain.protocol.verdict import Outcome, judge
from gridtrain.protocol.witnesses import Witnesses


class InStages:
    """See the module's text.  What is declared here is `Membership`'s."""

    term: int
    generation: int
    phase: RunPhase
    reason: str
    _reference: m.Setup | None
    _workers: dict[m.PeerId, Worker]
    _roster: tuple[m.Member, ...]
    _view: m.View | None
    _reports: dict[m.PeerId, m.Report]
    _ready: dict[m.PeerId, bytes]
    _finished: set[m.PeerId]
    _links: topology.Measured
    _breaks: Breaks
    _plans: bool
    _min_workers: int
    _started: bool
    _regathering: bool
    _regather_until_s: float
    _making_until_s: float
    _reached: int
    _change: str
    _witnesses: Witnesses
    _deadlines: Deadlines
    _cuts: tuple[int, ...]
    _cuts_before: tuple[int, ...] = ()  # of the generation before, where the model was cut otherwise
    _short_since_s: float | None
    _recutter: Recutter
    _without: tuple[frozenset[m.PeerId], tuple[int, ...]] | None

    def _seniority(self, peer: m.PeerId) -> tuple[float, m.PeerId]:
        raise NotImplementedError

    def _taking_part(self) -> list[m.PeerId]:
        raise NotImplementedError

    def _make(
        self, outcome: Outcome, now_s: float, seated: Seating | None = None, cuts: tuple[int, ...] = ()
    ) -> list[Effect]:
        raise NotImplementedError

    def _finish(self, now_s: float) -> list[Effect]:
        raise NotImplementedError

    def _made_up_its_mind(self) -> None:
        raise NotImplementedError

    @property
    def _is_pipeline(self) -> bool:
        return self._reference is not None and self._reference.stages > 1

    @property
    def _stages(self) -> int:
        """Of the generation; before there is one, and in one piece, as the run is defined."""
        return len(self._cut) - 1

    @property
    def _cut(self) -> tuple[int, ...]:
        """Of the generation: where its stages begin, and the number of blocks."""
        if self._cuts or self._reference is None:
            return self._cuts or (0, 1)
        return cuts_of(self._reference)

    def _may_be_cut(self, cuts: tuple[int, ...]) -> bool:
        """As a member tells; before the run is defined here nobody can know."""
        if self._reference is None or not cuts:
            return True
        return self._is_pipeline and cuts[-1] == cuts_of(self._reference)[-1]

    @property
    def _least_workers(self) -> int:
        """To begin with; a run that has begun may be cut anew."""
        defined = self._reference.stages if self._reference is not None else 1
        begun = self._is_pipeline and self._reached > 0
        return max(self._min_workers, 1 if begun else defined)

    def _may_hold(self, blocks: m.Span) -> bool:
        """Of its seat's stage or, where the model was cut anew and that is not done, of another cut's."""
        return blocks.start < blocks.stop <= self._cut[-1] if self._is_pipeline else blocks == m.Span(0, 1)

    def _stage_of(self, peer: m.PeerId) -> int:
        """That a member holds by its rank; 0 where that says nothing."""
        peers = [member.peer for member in self._roster]
        if len(peers) % self._stages or peer not in peers:
            return 0
        return Seats.of(self._stages, len(peers)).stage_of(peers.index(peer))

    def _keeps(self, worker: Worker, states: tuple[m.Held, ...]) -> list[Effect]:
        """What is on its disk; what cannot be so is an offence, as it may decide where the run goes on."""
        for held in states:
            if self._impossible(held):
                return [
                    Strike(worker.peer, f"tells of a checkpoint of step {held.applied + 1} that cannot be")
                ]
        if set(states) - set(worker.kept):
            worker.unwritten = False  # its disk takes something again
        worker.kept = states
        return self._hear()

    def _mind_unwritten(self, worker: Worker) -> None:
        if self._view is not None:
            report = self._reports.get(worker.peer)
            failed = not_written(self._view, self._roster, worker.peer, report, worker.kept)
            worker.unwritten = worker.unwritten or failed

    def _lacks(self, worker: Worker) -> m.Span | None:
        """Of what members of the generation that forms, itself among them, are to get from this one: what it
        has not."""
        if self._view is None or worker.peer not in (order := [member.peer for member in self._roster]):
            return None
        at, mine = (self._view.applied, self._view.history), order.index(worker.peer)
        has = {held.blocks for held in worker.kept if (held.applied, held.history) == at}
        report = self._reports.get(worker.peer)
        if report is not None and report.synced and not worker.unwritten:
            has.add(report.blocks)  # in memory: it comes to the disk for those who need it
        seats, spans = Seats.of(self._stages, len(order)), spans_of(self._cut)
        wanted = [blocks for member in self._roster for blocks, rank in member.pieces if rank == mine]
        here = self._roster[mine]
        if self._view.applied >= 0 and not (here.joining or here.pieces or worker.peer in self._ready):
            wanted.append(spans[seats.stage_of(mine)])
        for rank, member in enumerate(self._roster):
            if member.donor == mine and seats.stage_of(rank) != seats.stage_of(mine):
                wanted.append(spans[seats.stage_of(rank)])
        return next((blocks for blocks in wanted if blocks not in has), None)

    def _hear(self) -> list[Effect]:
        """Of what most members tell the run has come by: that is journalled, for when they are gone."""
        if self._reference is None or not self._is_pipeline:
            return []
        disks, spans = {peer: worker.kept for peer, worker in self._workers.items()}, spans_of(self._cut)
        seated = {member.peer: spans[self._stage_of(member.peer)] for member in self._roster}
        new = self._witnesses.hear(self._reference.ledger, self.generation, seated, disks)
        here = {"state": str(self.phase), "reason": self.reason}
        return [
            Journal("state", here | {"checkpoint": checkpoint_entry(state, digests)})
            for state, digests in new
        ]

    def _disks(self) -> dict[m.PeerId, tuple[m.Held, ...]]:
        """Of all who may be members what they keep, but for what is known to be something else."""
        return {
            peer: tuple(held for held in self._workers[peer].kept if self._witnesses.trust(held))
            for peer in self._taking_part()
        }

    def _given(self, seated: Seating, outcome: Outcome) -> dict[m.PeerId, bytes]:
        """Digests of the checkpoints that members are given; a state in memory has none."""
        order, disks, spans = seated.order, self._disks(), spans_of(self._cut)
        seats, found = Seats.of(self._stages, len(seated.order)), dict[m.PeerId, bytes]()
        for peer, donor in seated.donors.items():
            giver, blocks = order[donor], spans[seats.stage_of(order.index(peer))]
            report = self._reports.get(giver)
            live = giver in outcome.holders and report is not None and report.blocks == blocks
            at = (outcome.applied, outcome.history, blocks)
            theirs = [h.digest for h in disks.get(giver, ()) if (h.applied, h.history, h.blocks) == at]
            if theirs and not live and peer not in seated.pieces:
                found[peer] = theirs[0]
        return found

    def _piece_digests(self, seated: Seating, outcome: Outcome) -> dict[m.PeerId, tuple[bytes, ...]]:
        """Of the checkpoints that members put their stages together from, as who has them tells of them."""
        at = outcome.applied, outcome.history
        disks = {
            (peer, held.blocks): held.digest
            for peer, states in self._disks().items()
            for held in states
            if (held.applied, held.history) == at
        }
        return {
            peer: tuple(disks.get((seated.order[rank], blocks), b"") for blocks, rank in pieces)
            for peer, pieces in seated.pieces.items()
        }

    def _impossible(self, held: m.Held) -> bool:
        if self._reference is None or not ledger.balances(held.ledger):
            return True
        sound = ledger.is_sound(ledger.released(self._reference.ledger, held.ledger), ())
        return not sound or held.ledger.step != held.applied + 1 or held.blocks.stop > self._cut[-1]

    def _makes_a_replica(self, newcomers: list[Worker]) -> bool:
        """Or a further stage, where there are fewer than the run is defined with."""
        if self._without == (frozenset(self._taking_part()), self._cut):
            return False  # these have no room for the seats that are left
        here = sum(member.peer in self._workers for member in self._roster) + len(newcomers)
        if newcomers and self._is_short and here > self._stages:
            return self._pays(here)
        return here // self._stages > len(self._roster) // self._stages

    @property
    def _is_short(self) -> bool:
        return self._reference is not None and self._stages < self._reference.stages

    def _pays(self, here: int) -> bool:
        """Whether more stages are noticeably faster, by the costs in the run's definition."""
        assert self._reference is not None
        return self._recutter.pays(self._reference, self._cut, here)

    def _spare(self, newcomers: list[Worker]) -> list[Effect]:
        """They are told once why they have no seat yet."""
        return self._spare_in([w.peer for w in newcomers if not w.spare])

    def _spare_in(self, peers: Sequence[m.PeerId]) -> list[Effect]:
        if self._view is None:
            return []
        seats = Seats.of(self._stages, len(self._roster))
        reason = (
            f"spare: {seats.stages} stages x {seats.replicas} are {workers(seats.world_size)}; it takes the "
            f"seat of whoever leaves, or one of a further replica when {seats.stages} are spare"
        )
        view = self._view
        told = m.Spared(self.term, self.generation, view.applied, view.history, view.ledger, reason)
        for member in self._roster:
            if member.peer in self._workers:
                self._workers[member.peer].spare = ""
        for peer in peers:
            self._workers[peer].spare = reason
        return [Send(peer, told) for peer in peers]

    def _cost_s(self, peers: Sequence[m.PeerId], now_s: float) -> Cost | None:
        """Of the links between these; None: too few to matter, or not to be minded."""
        if not self._plans or len(peers) < 3:
            return None
        self._links.rtt_s = latencies([self._workers[peer] for peer in peers], self._breaks.avoided(now_s))
        network = self._links.network(peers)
        at = {peer: place for place, peer in enumerate(peers)}
        return None if network is None else pair_cost(network, at)

    def _seat(self, recut: Recut, hands: Hands, now_s: float) -> Seating:
        """`hands`: of the new cut.  Raises `ConfigError` where a memory is too small for its seat."""
        assert self._reference is not None
        peers, hands = recut.members, recutting.within(hands, recut.members)
        if recut.cuts == self._cut:
            hands = replace(hands, stood={x.peer: self._stage_of(x.peer) for x in self._roster})

        def name(peer: m.PeerId) -> str:
            return self._workers[peer].name

        cards = self._cards(peers)
        seated = seat(
            len(recut.cuts) - 1,
            peers,
            recutting.pinned(hands, recut),
            speed=lambda peer: cards[peer].speed,
            cost_s=self._cost_s(peers, now_s),
            name=name,
        )
        assigning.refuse_overfull(self._reference, recut.cuts, seated.order, cards, name)
        spares = tuple(peer for peer in self._taking_part() if peer not in peers)
        reason = f"{seated.reason}; {recut.reason}" if recut.reason else seated.reason
        pieces = recutting.pieces(recut, seated.order, hands)
        return replace(seated, spares=(*seated.spares, *spares), pieces=pieces, reason=reason)

    def _recut(
        self, begin: Begin, blocks_of: Mapping[m.PeerId, m.Span], now_s: float
    ) -> tuple[Seating, tuple[int, ...]] | str:
        """Who sits where in the next generation, and how its model is cut; else why nobody can go on."""
        assert self._reference is not None
        setup, self._making_until_s = self._reference, math.inf
        peers = self._taking_part()
        enough = len(peers) >= setup.stages
        if enough or not peers:
            self._short_since_s = None
        reason = "" if enough else too_few(self._stages, len(peers), begin.latest)
        if begin.outcome is None:
            return reason if len(peers) < self._stages else begin.reason
        if begin.outcome.applied < 0 and not enough:
            return reason  # nothing is lost by waiting for all
        try:
            if enough:
                return self._defined_seats(begin, blocks_of, now_s)
            recut = self._fewer_stages(begin)
            if len(recut.cuts) - 1 >= self._stages:
                self._short_since_s = None
            elif self._waits(now_s):
                wait = f"{self._deadlines.recut_s:g} s"
                return f"{reason}, or {wait} later over {workers(len(recut.cuts) - 1)}, cut anew"
            return self._seat(recut, self._hands(begin, recut.cuts, blocks_of), now_s), recut.cuts
        except ConfigError as error:
            why = recutting.said(error)
            if not reason:
                return f"{workers(len(peers))} are here, but their memory is too small: {why}"
            return f"{reason}; cut anew it does not fit: {why}" if why else reason

    def _waits(self, now_s: float) -> bool:
        """For a quick rejoiner, who saves the new cut."""
        since_s = self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
        if now_s >= since_s + self._deadlines.recut_s:
            return False
        self._making_until_s = since_s + self._deadlines.recut_s
        return True

    def _defined_seats(
        self, begin: Begin, blocks_of: Mapping[m.PeerId, m.Span], now_s: float
    ) -> tuple[Seating, tuple[int, ...]]:
        """There are workers for all stages; where one's memory is too small it is cut as it fits."""
        assert begin.outcome is not None
        try:
            recut = self._defined_cut(begin, blocks_of, now_s)
            return self._seat(recut, self._hands(begin, recut.cuts, blocks_of), now_s), recut.cuts
        except ConfigError:
            if begin.outcome.applied < 0:
                raise
        as_they_were = self._as_they_were(begin, blocks_of)
        if as_they_were is not None:
            self._without = frozenset(self._taking_part()), as_they_were.cuts
        recut = as_they_were or self._fewer_stages(begin)
        return self._seat(recut, self._hands(begin, recut.cuts, blocks_of), now_s), recut.cuts

    def _defined_cut(self, begin: Begin, blocks_of: Mapping[m.PeerId, m.Span], now_s: float) -> Recut:
        """There are workers for all stages."""
        assert self._reference is not None and begin.outcome is not None
        setup, peers = self._reference, self._taking_part()
        cuts = cuts_of(setup) if self._is_short else self._cut
        cards = self._cards(peers)
        free = setup.model is not None and not setup.model.fixed
        if begin.outcome.applied < 0 and free and not assigning.is_even(setup, cuts, cards):
            return self._recutter.assign(setup, peers, cards, self._cost_s(peers, now_s))
        peers = assigning.without_misfits(setup, cuts, peers, cards)
        if len(peers) < setup.stages:
            raise ConfigError(f"{workers(len(peers))} have memory for a stage", remedy="wait")
        return recutting.at_cuts(cuts, peers, self._hands(begin, cuts, blocks_of))

    def _as_they_were(self, begin: Begin, blocks_of: Mapping[m.PeerId, m.Span]) -> Recut | None:
        """Those who hold a stage in memory, so have room for it: where newcomers' memory is too small for a
        seat, nobody stops for them.  None: a stage is in nobody's memory."""
        stage_of = self._hands(begin, self._cut, blocks_of).live
        holders = [[p for p in self._taking_part() if stage_of.get(p) == n] for n in range(self._stages)]
        replicas = min(map(len, holders))
        chosen = {peer for stage in holders for peer in stage[:replicas]}
        members = tuple(peer for peer in self._taking_part() if peer in chosen)
        return Recut(self._cut, members, reason="the others' memory is too small") if replicas else None

    def _fewer_stages(self, begin: Begin) -> Recut:
        assert self._reference is not None
        peers = self._taking_part()
        return self._recutter.fewer(self._reference, peers, self._cards(peers), begin.hands.holds)

    def _cards(self, peers: Sequence[m.PeerId]) -> dict[m.PeerId, Card]:
        """Memory as they declared it, speed as they measured it, compared with each other."""
        setups = {peer: self._workers[peer].setup for peer in peers}
        speeds = assigning.speeds({p: s.flops if s is not None else 0.0 for p, s in setups.items()})
        return {
            peer: Card(speeds[peer], (setup.memory_bytes if setup is not None else 0) or math.inf)
            for peer, setup in setups.items()
        }

    def _hands(self, begin: Begin, cuts: Sequence[int], blocks_of: Mapping[m.PeerId, m.Span]) -> Hands:
        """What they have of the stages of this cut."""
        assert begin.outcome is not None
        return held_by(begin.outcome, blocks_of, self._disks(), cuts)

    def _collected_in_stages(self, reports: dict[m.PeerId, m.Report], now_s: float) -> list[Effect]:
        """All who live have reported: go on where every stage is in somebody's hands, else pause."""
        assert self._reference is not None
        outcome: Outcome | None = None
        if reports:
            held = [(member.peer, member.share) for member in self._roster]
            eldest_first = {peer: reports[peer] for peer in sorted(reports, key=self._seniority)}
            outcome = judge(eldest_first, self._reference.ledger, held, in_stages=True)
            if self._is_over(outcome):
                return self._finish_frozen(outcome, now_s)
        elif not self._started:
            outcome = self._beginning()
        blocks_of = {peer: report.blocks for peer, report in reports.items()}
        disks = self._disks()
        last = outcome.applied if outcome is not None else self._reached - 1
        begin = where(self._reference.ledger, outcome, last, blocks_of, disks, self._cut, self._witnesses)
        enough = len(disks) >= self._stages
        certain = outcome is not None and begin.outcome is outcome and enough
        if not certain and self._regathering and now_s < self._regather_until_s:
            self._making_until_s = self._regather_until_s  # whoever has it may be on the way back
            return []
        as_it_is = outcome is not None and begin.outcome is outcome
        live = blocks_of if as_it_is else {}
        found = self._recut(begin, live, now_s)
        if self._leans_on_full_disks(found, begin, live):
            found = self._as_before(begin, live, now_s)
            if found == "" or self._leans_on_full_disks(found, begin, live):
                live = {p: span for p, span in blocks_of.items() if not self._workers[p].unwritten}
                spec = self._reference.ledger
                begin = where(spec, outcome, last, live, disks, self._cut, self._witnesses)
                as_it_is = begin.outcome is outcome
                found = self._recut(begin, live if as_it_is else {}, now_s)
        if isinstance(found, str) or begin.outcome is None:
            return self._block(str(found))
        self._cuts_before = self._cut if found[1] != self._cut else self._cuts_before
        back = [] if as_it_is else self._roll_back(last, begin.outcome.applied, known=outcome is not None)
        self._regathering = False
        self._made_up_its_mind()
        return [*back, *self._make(begin.outcome, now_s, *found)]

    def _leans_on_full_disks(
        self, found: tuple[Seating, tuple[int, ...]] | str, begin: Begin, live: Mapping[m.PeerId, m.Span]
    ) -> bool:
        full = {peer for peer, worker in self._workers.items() if worker.unwritten}
        if isinstance(found, str) or begin.outcome is None or not full:
            return False
        return leans_on(found[0], begin.outcome, full, live, self._disks())

    def _as_before(
        self, begin: Begin, live: Mapping[m.PeerId, m.Span], now_s: float
    ) -> tuple[Seating, tuple[int, ...]] | str:
        """In the cut in which those are whose disks are full; "": that cannot be."""
        here = [span for peer, span in live.items() if self._workers[peer].unwritten]
        cuts, peers = cut_of(here, self._cut, self._cuts_before), self._taking_part()
        if not cuts or len(peers) < len(cuts) - 1:
            return ""
        try:
            hands = self._hands(begin, cuts, live)
            found = self._seat(recutting.at_cuts(cuts, peers, hands), hands, now_s), cuts
        except ConfigError:
            return ""
        self._without = frozenset(peers), cuts
        return found

    def _first_in_stages(self, now_s: float) -> list[Effect]:
        """Nobody is a member.  Where steps were committed only checkpoints of all stages bring them back."""
        assert self._reference is not None
        disks = self._disks()
        known = self._witnesses if self._reached else None
        begin = where(self._reference.ledger, None, self._reached - 1, {}, disks, self._cut, known)
        if begin.outcome is None and not self._reached:
            begin = Begin(self._beginning(), Hands())
        found = self._recut(begin, {}, now_s)
        if isinstance(found, str) or begin.outcome is None:
            self._change = ""
            return self._block(str(found))
        back = self._roll_back(self._reached - 1, begin.outcome.applied, known=False)
        return back + self._make(begin.outcome, now_s, *found)

    def _beginning(self) -> Outcome:
        return Outcome(m.Verdict.ABORT, None, -1, HISTORY_START, m.LedgerState(), frozenset())

    def _roll_back(self, last: int, applied: int, *, known: bool) -> list[Effect]:
        """Model and ledger together, journalled and shown; `known`: members have told what `last` is."""
        self._reached = applied + 1
        self._witnesses.back_to(applied)
        for worker in self._workers.values():
            worker.step = min(worker.step, applied + 1)
            worker.kept = tuple(held for held in worker.kept if held.applied <= applied)
        if last <= applied:  # who could say how far it had come is gone, or it is the beginning
            return [Note("warning", "restored", {"step": applied + 1})] if applied >= 0 else []
        lost = {"from": last + 1, "to": applied + 1, "at_least": not known}
        reason = f"a stage of step {last + 1} is in nobody's hands any more; back to step {applied + 1}"
        self._change = f"{self._change}; {reason}" if self._change else reason
        return [
            Journal("state", {"state": str(self.phase), "reason": reason, "rollback": lost}),
            Note("error", "rollback", lost),
        ]

    def _block(self, reason: str) -> list[Effect]:
        """The run is paused until somebody comes; each message asks anew whether it can go on."""
        if (self.phase, self.reason) == (RunPhase.PAUSED, reason):
            return []
        self.phase, self.reason = RunPhase.PAUSED, reason
        # Without members the journal says that it waits: then nobody is there who could come back to a seat.
        state = RunPhase.PAUSED if self._roster else RunPhase.WAITING
        return [
            Journal("state", {"state": str(state), "reason": reason, "reached": self._reached}),
            Note("error", "paused", {"reason": reason}),
            *(Send(peer, m.RunState(str(self.phase), reason)) for peer in self._workers),
        ]

    def _is_over(self, outcome: Outcome) -> bool:
        """The last step is committed, and of each stage somebody has it, or had it when it said so."""
        assert self._reference is not None
        if not ledger.finished(self._reference.ledger, outcome.ledger):
            return False
        done = {self._stage_of(peer) for peer in outcome.holders | self._finished}
        return done >= set(range(self._stages))

    def _finish_frozen(self, outcome: Outcome, now_s: float) -> list[Effect]:
        """Some have left at the end already, and the others need no generation any more to hear of it."""
        reason = "the run is over"
        told = m.Spared(
            self.term, self.generation + 1, outcome.applied, outcome.history, outcome.ledger, reason
        )
        self._made_up_its_mind()
        return [*(Send(peer, told) for peer in self._reports if peer in self._workers), *self._finish(now_s)]
