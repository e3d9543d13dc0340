"""Installs the next generation with its members, its starting state and its messages (commit rules 6 and 7).

    outcome of the open step --+
    eligible workers ----------+--install--> JournalEntry, then for each member its pages of the member list
    the plan ------------------+             (`member_lists`) and the `MembershipView`

This module chooses the state from which an unpartitioned model continues; `PipelineRecovery` does so for a
pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY
from gridtrain.core.commit.verdict import Outcome, decide_outcome
from gridtrain.core.group.rank_layout import group_by_stage
from gridtrain.core.stages.rank_placement import RankPlacement
from gridtrain.quantities import format_count
from gridtrain_coordinator.membership.generation_reports import GenerationReports
from gridtrain_coordinator.membership.member_lists import MemberLists
from gridtrain_coordinator.membership.readiness import Readiness
from gridtrain_coordinator.membership.state_sources import StateSources
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergenceDetector
from gridtrain_coordinator.run.events import Effect, JournalEntry, LogEvent, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.journal_recovery import generation_entry
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState

_START_AT_0 = (
    "waiting for the run to start at step 0, because no connected worker has a checkpoint of its {0}; to "
    "continue from a checkpoint instead, stop this worker and first start one that has a checkpoint"
)


class InitialState:
    """Determines which workers have built the run's initial state themselves and need not receive it.

    Compares the digests in `Setup.initial_state_digest`, which cover all bits that a joining member receives:

        anna   3f..   the longest-serving: the run starts with her state
        bert   3f..   has the same state
        clara  77..   a different seed or kind of processor: receives the state
        dora   ""     was in the run before: receives the state

    After the first committed step, no worker holds the initial state any longer.
    """

    def __init__(self) -> None:
        self._digest = b""  # digest of the run's initial state; empty if not known

    def start_with(self, eldest: Worker, workers: Iterable[Worker]) -> frozenset[m.PeerId]:
        """Record the state of `eldest` as the initial state of the run; return the workers that hold it."""
        self._digest = _initial_digest(eldest)
        return self.holders(workers) | {eldest.peer}

    def holders(self, workers: Iterable[Worker]) -> frozenset[m.PeerId]:
        """Return the workers that have the run's initial state."""
        return frozenset(w.peer for w in workers if self._digest and _initial_digest(w) == self._digest)

    def clear(self, workers: Iterable[Worker]) -> None:
        """Discard the initial state.  Call when the run starts over, because training changed the models."""
        self._digest = b""
        for worker in workers:
            worker.clear_initial_state()


def _initial_digest(worker: Worker) -> bytes:
    setup = worker.setup
    return setup.initial_state_digest if setup is not None and setup.checkpoint is None else b""


@dataclass(slots=True, eq=False)
class ViewInstaller:
    """Makes the next generation and sends it to its members."""

    _run: RunState
    _planner: GenerationPlanner
    _readiness: Readiness
    _addresses: AddressBook
    _divergence: DivergenceDetector
    _generation_reports: GenerationReports
    _sources: StateSources
    _member_lists: MemberLists
    _initial_state: InitialState = field(default_factory=InitialState)

    # -- initial state -----------------------------------------------------------------------------

    def install_next(self, reports: Mapping[m.PeerId, m.FreezeReport], now_s: float) -> list[Effect]:
        """Decide the open step's outcome from the reports of state holders, and install a generation."""
        run, outcome = self._run, decide_open_step(self._run, reports)
        if outcome.applied >= 0:
            return self.install(outcome, now_s)
        # A worker that was catching up may have loaded another state in the meantime.
        unchanged = [
            w for w in run.workers.values() if w.setup and not (w.setup.can_catch_up and run.has_started)
        ]
        source = min(outcome.state_holders, key=run.workers.seniority)
        state_holders = outcome.state_holders | self._initial_state.holders(unchanged)
        outcome = replace(outcome, state_holders=state_holders)
        return self.install(outcome, now_s, source=source)

    def install_first(self, now_s: float) -> list[Effect]:
        """Install a generation of new members, from the latest checkpoint or at step 0 (commit rule 13)."""
        run = self._run
        admitted = run.workers.sort_by_seniority([w.peer for w in run.workers.values() if w.is_admitted])
        effects: list[Effect] = []
        workers = [run.workers[peer] for peer in admitted]
        believed = [worker for worker in workers if run.is_checkpoint_credible(worker, workers)]
        if all((worker.checkpoint_step or 0) < run.highest_step for worker in believed):
            believed = workers  # a worker that returns with a new key may have unreported steps
        for worker in workers:
            if worker not in believed:
                fields = {"name": worker.name, "step": worker.checkpoint_step, "reached": run.highest_step}
                effects.append(LogEvent("warning", "checkpoint_ignored", fields))
        outcome, source = self._latest_checkpoint([worker.peer for worker in believed]), None
        if outcome is None:
            source = admitted[0]
            holders = self._initial_state.start_with(run.workers[source], workers)
            again = self._next_generation if self._next_generation > 1 else 0
            ledger = m.LedgerState(restart_generation=again)
            outcome = replace(initial_outcome(), state_holders=holders, ledger=ledger)
        step = outcome.applied + 1
        if run.highest_step > step:
            lost = {"from": run.highest_step, "to": step}
            reason = f"the state of step {run.highest_step} is lost, so the run returns to step {step}"
            effects.append(run.phase_entry(run.phase, reason, rollback=lost))
            effects.append(LogEvent("error", "rollback", lost))
            if not step:
                notice = _START_AT_0.format(format_count(run.highest_step, "step"))
                update = m.RunStateUpdate(str(run.phase), notice)
                effects += [Send(peer, update) for peer in admitted]
            run.roll_back(outcome.applied)
        return effects + self.install(outcome, now_s, source=source)

    def clear_initial_state(self) -> None:
        """Discard the initial state.  Call when no remaining worker holds the model."""
        self._initial_state.clear(self._run.workers.values())

    def _latest_checkpoint(self, eldest_first: list[m.PeerId]) -> Outcome | None:
        """Return the state in these workers' latest checkpoint; None if they have no checkpoint."""
        run = self._run
        setups = ((peer, run.workers[peer].setup) for peer in eldest_first)
        checkpoints = {peer: x.checkpoint for peer, x in setups if x is not None and x.checkpoint is not None}
        if not checkpoints:
            return None
        applied = max(state.applied for state in checkpoints.values())
        first = next(state for state in checkpoints.values() if state.applied == applied)
        at = (applied, first.history)
        holders = frozenset(p for p, state in checkpoints.items() if (state.applied, state.history) == at)
        ledger = data_ledger.release_holders(run.defined_setup.ledger, first.ledger)
        return Outcome(m.Verdict.ABORT, None, applied, first.history, ledger, holders)

    # -- creation ----------------------------------------------------------------------------------

    def install(
        self,
        outcome: Outcome,
        now_s: float,
        *,
        placement: RankPlacement | None = None,
        source: m.PeerId | None = None,
    ) -> list[Effect]:
        """Make the next generation; return its journal entry and the messages to its members, in order.

        Args:
            placement: the ranks of a pipeline; None for an unpartitioned model.
            source: the only member that may send the state, because the other holders may not really have it;
                None if all holders may send it.
        """
        run = self._run
        self._member_lists.end_generation()
        order, shares = self._planner.plan(run.eligible_workers(), outcome.state_holders, now_s, placement)
        self._addresses.begin_generation(order, run.workers)
        if placement is None:
            lacking = set(order) - outcome.state_holders
            holders = [peer for peer in order if peer in outcome.state_holders]
            stalled = {batch.peer for batch in outcome.ledger.late}
            source = source or self._sources.choose(holders, lacking, stalled)
            # Without a source, each member that lacks the state receives it from a nearby holder.
            sources = {} if source is None else {peer: order.index(source) for peer in lacking}
            placement = RankPlacement(order, sources, (), "")
        else:
            lacking = set(placement.state_sources)
        members = tuple(
            self._member(p, n, placement, p in lacking) for p, n in zip(order, shares, strict=True)
        )
        view = m.MembershipView(
            term=run.term,
            generation=self._next_generation,
            world_size=len(order),
            verdict=outcome.verdict,
            decided_round=outcome.decided_round,
            applied=outcome.applied,
            history=outcome.history,
            ledger=data_ledger.release_deferred(run.defined_setup.ledger, outcome.ledger, order),
            reason=run.view_change.begin_forming(now_s + run.limits.ready_s, now_s),
            exchange=self._planner.exchange_choice.view_exchange,
            stage_bounds=run.partition.recorded_bounds,
        )
        run.install(view, members)
        for worker in run.workers.values():
            worker.liveness.mark_loading(worker.peer in lacking)
        self._divergence.begin_generation(group_by_stage(run.member_order, run.partition.stage_count))
        self._readiness.begin(now_s)
        self._member_lists.begin_generation()
        messages: list[Effect] = []
        for peer in run.member_order:
            messages += self._divergence.resend(peer)  # first, because it names an earlier generation
            messages += [Send(peer, part) for part in self._member_lists.messages_for(peer)]
            messages.append(Send(peer, view))
        entry = JournalEntry("generation", generation_entry(view, members))
        return [entry, self._log_event(view), *messages]

    @property
    def _next_generation(self) -> int:
        return max(self._run.generation, self._generation_reports.highest_generation) + 1

    def _member(self, peer: m.PeerId, share: int, placement: RankPlacement, joining: bool) -> m.Member:
        worker = self._run.workers[peer]
        return m.Member(
            peer, worker.name, worker.address, share, joining, placement.state_sources.get(peer, -1),
            placement.pieces.get(peer, ()), placement.digests.get(peer, b""),
            placement.piece_digests.get(peer, ()), self._planner.entry_shares.share_of(peer),
        )  # fmt: skip

    def _log_event(self, view: m.MembershipView) -> LogEvent:
        choice = self._planner.exchange_choice
        fields = {
            "generation": view.generation,
            "workers": view.world_size,
            "step": view.applied + 1,
            **({"verdict": view.verdict.name} if self._run.has_started else {}),  # otherwise no step was open
            "reason": view.reason,
            "plan": self._planner.plan_reason,
            **({"exchange": choice.description} if choice.is_auto else {}),
        }
        return LogEvent("info", "generation", fields)

    # -- messages ----------------------------------------------------------------------------------

    def resend_view(self, peer: m.PeerId) -> list[Effect]:
        """Return the messages that a member may have missed while its connection was broken.

        A member ignores messages that it has already received.
        """
        run = self._run
        if peer in run.departed_members:
            return []  # a new process with the member's key has no record of the generation
        view: list[Effect] = []
        if run.view is not None:  # otherwise only the members know this generation
            view = [Send(peer, page) for page in self._member_lists.repeat_for(peer)]
            view.append(Send(peer, run.view))
        if run.view_change.is_freezing:
            return [*view, Send(peer, run.freeze_message())]
        if not run.view_change.is_started:
            return view
        return [*view, Send(peer, m.StartGeneration(run.term, run.generation))]


def decide_open_step(run: RunState, reports: Mapping[m.PeerId, m.FreezeReport]) -> Outcome:
    """Decide the outcome of the open step from the reports of members that hold a state."""
    shares = [(member.peer, member.share) for member in run.member_list]
    eldest_first = {peer: reports[peer] for peer in run.workers.sort_by_seniority(reports.keys())}
    spec, in_stages = run.defined_setup.ledger, run.partition.is_pipeline
    return decide_outcome(eldest_first, spec, shares, view=run.view, in_stages=in_stages)


def initial_outcome() -> Outcome:
    """Return the outcome of a run in which no step was committed."""
    return Outcome(m.Verdict.ABORT, None, -1, EMPTY_HISTORY, m.LedgerState(), frozenset())
