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

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY
from gridtrain.core.commit.verdict import Outcome, decide_outcome
from gridtrain.core.group.rank_layout import group_by_stage
from gridtrain.core.stages.rank_placement import RankPlacement
from gridtrain_coordinator.membership.generation_reports import GenerationReports
from gridtrain_coordinator.membership.initial_state import InitialState
from gridtrain_coordinator.membership.readiness import Readiness
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergedMembers, DivergenceDetector
from gridtrain_coordinator.run.events import Effect, JournalEntry, LogEvent, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.journal_recovery import generation_entry
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange

ROSTER_PAGE = 128


class ViewInstaller:
    """See the module's text."""

    def __init__(
        self,
        run: RunState,
        making: ViewChange,
        plans: GenerationPlanner,
        readying: Readiness,
        whereabouts: AddressBook,
        drifts: DivergenceDetector,
        drifted: DivergedMembers,
        recall: GenerationReports,
    ) -> None:
        self._run, self._view_change, self._planner, self._readiness = run, making, plans, readying
        self._addresses, self._divergence, self._diverged = whereabouts, drifts, drifted
        self._generation_reports, self._initial_state = recall, InitialState()

    # -- the state with which it begins ------------------------------------------------------------

    def install_next(self, reports: Mapping[m.PeerId, m.FreezeReport], now_s: float) -> list[Effect]:
        """The members' REPORTs, of those who hold a state, say what became of the open step."""
        run = self._run
        assert run.definition is not None
        held = [(member.peer, member.share) for member in run.member_list]
        eldest_first = {peer: reports[peer] for peer in run.sort_by_seniority(reports.keys())}
        outcome = decide_outcome(eldest_first, run.definition.ledger, held)
        if outcome.applied >= 0:
            return self.install(outcome, now_s)
        # A follower may have loaded something since.
        fresh = [
            w for w in run.workers.values() if w.setup and not (w.setup.can_catch_up and run.has_started)
        ]
        giver = min(outcome.holders, key=run.seniority)
        outcome = replace(outcome, holders=outcome.holders | self._initial_state.holders(fresh))
        return self.install(outcome, now_s, giver=giver)

    def install_first(self, now_s: float) -> list[Effect]:
        """Nobody is a member: go on from the latest checkpoint, or begin (rule 13)."""
        run = self._run
        admitted = run.sort_by_seniority([w.peer for w in run.workers.values() if w.is_admitted])
        begin, giver = self._latest_checkpoint(admitted), None
        if begin is None:
            giver = admitted[0]
            holders = self._initial_state.begin_with(
                run.workers[giver], [run.workers[peer] for peer in admitted]
            )
            begin = replace(initial_outcome(), holders=holders)
        effects: list[Effect] = []
        if run.highest_step > begin.applied + 1:
            lost = {"from": run.highest_step, "to": begin.applied + 1}
            reason = f"nobody holds step {run.highest_step} any more; back to step {begin.applied + 1}"
            effects = [run.phase_entry(run.phase, reason, rollback=lost), LogEvent("error", "rollback", lost)]
            run.highest_step = begin.applied + 1
        return effects + self.install(begin, now_s, giver=giver)

    def clear_initial_state(self) -> None:
        """Nobody is left who holds the model."""
        self._initial_state.clear(self._run.workers.values())

    def _latest_checkpoint(self, eldest_first: list[m.PeerId]) -> Outcome | None:
        """Where the latest checkpoint that somebody holds left off; None: nobody holds one."""
        run = self._run
        held = {
            peer: setup.checkpoint
            for peer in eldest_first
            if (setup := run.workers[peer].setup) is not None and setup.checkpoint is not None
        }
        if not held:
            return None
        applied = max(state.applied for state in held.values())
        first = next(state for state in held.values() if state.applied == applied)
        holders = frozenset(
            p for p, state in held.items() if (state.applied, state.history) == (applied, first.history)
        )
        assert run.definition is not None
        state = data_ledger.release_holders(run.definition.ledger, first.ledger)
        return Outcome(m.Verdict.ABORT, None, applied, first.history, state, holders)

    # -- making it ---------------------------------------------------------------------------------

    def install(
        self,
        outcome: Outcome,
        now_s: float,
        *,
        seated: RankPlacement | None = None,
        giver: m.PeerId | None = None,
    ) -> list[Effect]:
        """Journal the next generation, then tell its members.

        Args:
            seated: of a model in stages, who sits where.
            giver: who alone gives the state to those who lack it, as others only say that they hold it.
        """
        run = self._run
        order, shares = self._planner.plan(run.eligible_workers(), outcome.holders, now_s, seated)
        self._addresses.begin_generation(order)
        if seated is None:
            seated = _replicated_placement(order, outcome, giver)
            lacking = set(order) - outcome.holders
        else:
            lacking = set(seated.state_sources)
        run.member_list = tuple(
            self._member(p, n, seated, p in lacking) for p, n in zip(order, shares, strict=True)
        )
        run.generation = max(run.generation, self._generation_reports.highest_generation) + 1
        reason = self._view_change.begin_forming(now_s + run.limits.ready_s, now_s)
        run.view = m.MembershipView(
            term=run.term,
            generation=run.generation,
            world_size=len(order),
            verdict=outcome.verdict,
            decided_round=outcome.decided_round,
            applied=outcome.applied,
            history=outcome.history,
            ledger=outcome.ledger,
            reason=reason,
            exchange=self._planner.exchange_choice.view_exchange,
            stage_bounds=run.partition,
        )
        run.highest_step = max(run.highest_step, outcome.applied + 1)
        run.finished_members.clear()
        run.departed_members.clear()
        for worker in run.workers.values():
            worker.is_loading_state = worker.peer in lacking
        self._divergence.begin_generation(group_by_stage(run.member_order, run.stage_count))
        self._readiness.begin(now_s)
        told: list[Effect] = []
        for peer in run.member_order:
            told += self._diverged.resend(peer)  # before it, as it names another generation
            told += self.view_messages(peer)
        return [
            JournalEntry("generation", generation_entry(run.view, run.member_list)),
            self._note(run.view),
            *told,
        ]

    def _member(self, peer: m.PeerId, share: int, seated: RankPlacement, joining: bool) -> m.Member:
        worker = self._run.workers[peer]
        return m.Member(
            peer, worker.name, worker.address, share, joining,
            seated.state_sources.get(peer, -1), seated.pieces.get(peer, ()), seated.digests.get(peer, b""),
            seated.piece_digests.get(peer, ()),
        )  # fmt: skip

    def _note(self, view: m.MembershipView) -> LogEvent:
        exchanging = self._planner.exchange_choice
        fields = {
            "generation": view.generation,
            "workers": view.world_size,
            "step": view.applied + 1,
            "verdict": view.verdict.name,
            "reason": view.reason,
            "plan": self._planner.plan_reason,
            **({"exchange": exchanging.description} if exchanging.is_auto else {}),
        }
        return LogEvent("info", "generation", fields)

    # -- telling it --------------------------------------------------------------------------------

    def view_messages(self, viewer: m.PeerId) -> list[Send]:
        """The Roster with each member's address as `viewer` is to use it, and the View; nothing of a
        generation that only members know."""
        run = self._run
        if run.view is None:
            return []
        told = self._addresses.members_for(viewer, run.member_list)
        size = ROSTER_PAGE if not any(member.pieces for member in told) else ROSTER_PAGE // 8
        pages = [told[i : i + size] for i in range(0, len(told), size)]
        rosters = [
            m.MemberListPage(run.term, run.generation, page, len(pages), members)
            for page, members in enumerate(pages)
        ]
        return [*(Send(viewer, page) for page in rosters), Send(viewer, run.view)]

    def resend_view(self, peer: m.PeerId) -> list[Effect]:
        """What a member may have missed while its connection was broken; it ignores what it knows."""
        run, making = self._run, self._view_change
        if peer in run.departed_members:
            return []  # it left for good, or is lost: whoever comes back with its key knows nothing
        view = self.view_messages(peer)
        if making.is_freezing:
            return [*view, Send(peer, making.freeze_message())]
        return (
            [*view] if making.is_forming else [*view, Send(peer, m.StartGeneration(run.term, run.generation))]
        )


def initial_outcome() -> Outcome:
    """Of a run of which nobody holds anything."""
    return Outcome(m.Verdict.ABORT, None, -1, EMPTY_HISTORY, m.LedgerState(), frozenset())


def _replicated_placement(
    order: tuple[m.PeerId, ...], outcome: Outcome, giver: m.PeerId | None
) -> RankPlacement:
    """Whoever lacks the state gets it from `giver`, or from whoever is near and holds it."""
    joiners = set(order) - outcome.holders if giver is not None else set()
    return RankPlacement(order, {peer: order.index(giver) for peer in joiners if giver is not None}, (), "")
