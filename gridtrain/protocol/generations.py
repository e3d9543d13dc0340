"""The next generation: its members, what each of them is given, what all of them are told (rules 6, 7).

Decides with which state a run in one piece goes on or begins (of one in stages `protocol.in_stages` does),
writes the generation down, and tells it.  Never decides when one is made, nor the order in it (`Plans`).

    outcome of the open step --+
    who may take part ---------+--make--> Journal, then to each member: Roster (with ways for it), VIEW
    the plan ------------------+
                                                                      VIEW, FREEZE or START once more to one
                                                                      whose connection is back: `repeat`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.alike import Alike
from gridtrain.protocol.drift import Drifted, Drifts
from gridtrain.protocol.making import Making
from gridtrain.protocol.membership_io import Effect, Journal, Note, Send
from gridtrain.protocol.plans import Plans
from gridtrain.protocol.readying import Readying
from gridtrain.protocol.recall import Recall
from gridtrain.protocol.recovery import generation_entry
from gridtrain.protocol.round import HISTORY_START
from gridtrain.protocol.run import Run
from gridtrain.protocol.seating import Seating
from gridtrain.protocol.seats import groups
from gridtrain.protocol.verdict import Outcome, judge
from gridtrain.protocol.whereabouts import Whereabouts

ROSTER_PAGE = 128


class Generations:
    """See the module's text."""

    def __init__(
        self,
        run: Run,
        making: Making,
        plans: Plans,
        readying: Readying,
        whereabouts: Whereabouts,
        drifts: Drifts,
        drifted: Drifted,
        recall: Recall,
    ) -> None:
        self._run, self._making, self._plans, self._readying = run, making, plans, readying
        self._whereabouts, self._drifts, self._drifted = whereabouts, drifts, drifted
        self._recall, self._alike = recall, Alike()

    # -- the state with which it begins ------------------------------------------------------------

    def next(self, reports: Mapping[m.PeerId, m.Report], now_s: float) -> list[Effect]:
        """The members' REPORTs, of those who hold a state, say what became of the open step."""
        run = self._run
        assert run.reference is not None
        held = [(member.peer, member.share) for member in run.roster]
        eldest_first = {peer: reports[peer] for peer in run.eldest_first(reports.keys())}
        outcome = judge(eldest_first, run.reference.ledger, held)
        if outcome.applied >= 0:
            return self.make(outcome, now_s)
        # A follower may have loaded something since.
        fresh = [w for w in run.workers.values() if w.setup and not (w.setup.follows and run.started)]
        giver = min(outcome.holders, key=run.seniority)
        outcome = replace(outcome, holders=outcome.holders | self._alike.holders(fresh))
        return self.make(outcome, now_s, giver=giver)

    def first(self, now_s: float) -> list[Effect]:
        """Nobody is a member: go on from the latest checkpoint, or begin (rule 13)."""
        run = self._run
        admitted = run.eldest_first([w.peer for w in run.workers.values() if w.admitted])
        begin, giver = self._from_checkpoints(admitted), None
        if begin is None:
            giver = admitted[0]
            holders = self._alike.first(run.workers[giver], [run.workers[peer] for peer in admitted])
            begin = replace(beginning(), holders=holders)
        effects: list[Effect] = []
        if run.reached > begin.applied + 1:
            lost = {"from": run.reached, "to": begin.applied + 1}
            reason = f"nobody holds step {run.reached} any more; back to step {begin.applied + 1}"
            effects = [run.entry(run.phase, reason, rollback=lost), Note("error", "rollback", lost)]
            run.reached = begin.applied + 1
        return effects + self.make(begin, now_s, giver=giver)

    def forget(self) -> None:
        """Nobody is left who holds the model."""
        self._alike.forget(self._run.workers.values())

    def _from_checkpoints(self, eldest_first: list[m.PeerId]) -> Outcome | None:
        """Where the latest checkpoint that somebody holds left off; None: nobody holds one."""
        run = self._run
        held = {
            peer: setup.held
            for peer in eldest_first
            if (setup := run.workers[peer].setup) is not None and setup.held is not None
        }
        if not held:
            return None
        applied = max(state.applied for state in held.values())
        first = next(state for state in held.values() if state.applied == applied)
        holders = frozenset(
            p for p, state in held.items() if (state.applied, state.history) == (applied, first.history)
        )
        assert run.reference is not None
        state = ledger.released(run.reference.ledger, first.ledger)
        return Outcome(m.Verdict.ABORT, None, applied, first.history, state, holders)

    # -- making it ---------------------------------------------------------------------------------

    def make(
        self, outcome: Outcome, now_s: float, *, seated: Seating | None = None, giver: m.PeerId | None = None
    ) -> list[Effect]:
        """Journal the next generation, then tell its members.

        Args:
            seated: of a model in stages, who sits where.
            giver: who alone gives the state to those who lack it, as others only say that they hold it.
        """
        run = self._run
        order, shares = self._plans.plan(run.taking_part(), outcome.holders, now_s, seated)
        self._whereabouts.plan(order)
        if seated is None:
            seated = _in_one_piece(order, outcome, giver)
            lacking = set(order) - outcome.holders
        else:
            lacking = set(seated.donors)
        run.roster = tuple(
            self._member(p, n, seated, p in lacking) for p, n in zip(order, shares, strict=True)
        )
        run.generation = max(run.generation, self._recall.floor) + 1
        reason = self._making.form(now_s + run.limits.ready_s, now_s)
        run.view = m.View(
            term=run.term,
            generation=run.generation,
            world_size=len(order),
            verdict=outcome.verdict,
            decided=outcome.decided,
            applied=outcome.applied,
            history=outcome.history,
            ledger=outcome.ledger,
            reason=reason,
            exchange=self._plans.exchanging.named,
            cuts=run.cuts,
        )
        run.reached = max(run.reached, outcome.applied + 1)
        run.finished.clear()
        run.departed.clear()
        for worker in run.workers.values():
            worker.loading = worker.peer in lacking
        self._drifts.begin(groups(run.order, run.stages))
        self._readying.begin(now_s)
        told: list[Effect] = []
        for peer in run.order:
            told += self._drifted.again(peer)  # before it, as it names another generation
            told += self.view_for(peer)
        return [Journal("generation", generation_entry(run.view, run.roster)), self._note(run.view), *told]

    def _member(self, peer: m.PeerId, share: int, seated: Seating, joining: bool) -> m.Member:
        worker = self._run.workers[peer]
        return m.Member(
            peer, worker.name, worker.address, share, joining,
            seated.donors.get(peer, -1), seated.pieces.get(peer, ()), seated.digests.get(peer, b""),
            seated.piece_digests.get(peer, ()),
        )  # fmt: skip

    def _note(self, view: m.View) -> Note:
        exchanging = self._plans.exchanging
        fields = {
            "generation": view.generation,
            "workers": view.world_size,
            "step": view.applied + 1,
            "verdict": view.verdict.name,
            "reason": view.reason,
            "plan": self._plans.reason,
            **({"exchange": exchanging.text} if exchanging.is_auto else {}),
        }
        return Note("info", "generation", fields)

    # -- telling it --------------------------------------------------------------------------------

    def view_for(self, viewer: m.PeerId) -> list[Send]:
        """The Roster with each member's address as `viewer` is to use it, and the View; nothing of a
        generation that only members know."""
        run = self._run
        if run.view is None:
            return []
        told = self._whereabouts.told(viewer, run.roster)
        size = ROSTER_PAGE if not any(member.pieces for member in told) else ROSTER_PAGE // 8
        pages = [told[i : i + size] for i in range(0, len(told), size)]
        rosters = [
            m.Roster(run.term, run.generation, page, len(pages), members)
            for page, members in enumerate(pages)
        ]
        return [*(Send(viewer, page) for page in rosters), Send(viewer, run.view)]

    def repeat(self, peer: m.PeerId) -> list[Effect]:
        """What a member may have missed while its connection was broken; it ignores what it knows."""
        run, making = self._run, self._making
        if peer in run.departed:
            return []  # it left for good, or is lost: whoever comes back with its key knows nothing
        view = self.view_for(peer)
        if making.freezing:
            return [*view, Send(peer, making.freeze_message())]
        return [*view] if making.forming else [*view, Send(peer, m.Start(run.term, run.generation))]


def beginning() -> Outcome:
    """Of a run of which nobody holds anything."""
    return Outcome(m.Verdict.ABORT, None, -1, HISTORY_START, m.LedgerState(), frozenset())


def _in_one_piece(order: tuple[m.PeerId, ...], outcome: Outcome, giver: m.PeerId | None) -> Seating:
    """Whoever lacks the state gets it from `giver`, or from whoever is near and holds it."""
    joiners = set(order) - outcome.holders if giver is not None else set()
    return Seating(order, {peer: order.index(giver) for peer in joiners if giver is not None}, (), "")
