"""While a generation forms: who is READY, who is waited for and how long, and whom to go on without (rule 8).

Decides when it starts, and when it is given up for another one.  Never makes that one.

    VIEW --> all READY with one history ------------------------> START
             time is up, and no state is visibly on its way ----> who is late goes, and another one is made
             a member is lost, or has another history ----------> another one without it
             some cannot reach each other, no state comes ------> another one with other ways
"""

from __future__ import annotations

import math

from gridtrain.core import messages as m
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.run import forming_deadline
from gridtrain_coordinator.run.events import Effect, LogEvent, RunPhase, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import worker_count_text
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange


class Readiness:
    """See the module's text."""

    def __init__(
        self, run: RunState, making: ViewChange, plans: GenerationPlanner, partings: Departures
    ) -> None:
        self._run, self._view_change, self._planner, self._departures = run, making, plans, partings
        self._forming_limit_s = -math.inf  # however much of a state is still on its way

    def begin(self, now_s: float) -> None:
        """A generation was made."""
        joining = [member.peer for member in self._run.member_list if member.joining]
        holders = [member.peer for member in self._run.member_list if not member.joining]
        load = self._planner.exchange_choice.workload
        parameters = load.parameters if load is not None else None
        most_s = forming_deadline.max_forming_s(
            len(joining), parameters, self._planner.min_rate_Bps(holders, joining)
        )
        self._forming_limit_s = now_s + most_s

    def advance(self, now_s: float) -> tuple[list[Effect], bool]:
        """START, or nothing; and whether the generation is given up: another one is wanted then."""
        run, making = self._run, self._view_change
        assert run.view is not None
        effects: list[Effect] = []
        wrong = [p for p, h in making.ready_histories.items() if h != run.view.history and p in run.workers]
        lost = len(run.present_members) < len(run.member_order) or bool(wrong)
        for peer in wrong:
            effects += self._departures.remove_lost(peer, "is READY with another history of updates")
        late = [peer for peer in run.present_members if peer not in making.ready_histories]
        if late and making.unrouted_reason and now_s >= self.state_transfer_deadline_s():
            making.request(making.unrouted_reason)
            making.reset()
            return effects, True
        if late and now_s >= making.deadline_s:
            making.deadline_s, removed = self._late(late, now_s)
            effects += removed
            lost = lost or len(run.present_members) < len(run.member_order)
        if lost:
            making.reset()
            return effects, True
        return ([], False) if late else (self._start(), False)

    def _start(self) -> list[Effect]:
        run = self._run
        assert run.view is not None
        self._view_change.reset()
        run.has_started, step = True, run.view.applied + 1
        journal = run.enter_phase(
            RunPhase.TRAINING, f"{worker_count_text(len(run.member_order))} since step {step}"
        )
        note = LogEvent(
            "info", "training", {"generation": run.generation, "workers": len(run.member_order), "step": step}
        )
        start = m.StartGeneration(run.term, run.generation)
        return [journal, note, *(Send(peer, start) for peer in run.member_order)]

    def _late(self, late: list[m.PeerId], now_s: float) -> tuple[float, list[Effect]]:
        """Time for READY is up: until when to wait on, or whom to go on without.

        The longest-serving holder of the model always stays: if it waits for pieces of its stage, those who
        were to give them go.
        """
        run, ready_s = self._run, self._run.limits.ready_s
        holders = [member.peer for member in run.member_list if not member.joining]
        eldest = min((p for p in holders if p in run.workers), key=run.seniority, default=None)
        moved_s = max(run.workers[p].progressed_s for p in late)
        if moved_s + ready_s > now_s < self._forming_limit_s:  # a big state comes
            return moved_s + ready_s, []
        named = next((x.donor for x in run.member_list if x.joining and not run.is_pipeline), -1)
        donor = run.workers.get(run.member_order[named] if named >= 0 else holders[0]) if holders else None
        computes = donor is not None and donor.progressed_s < self._view_change.last_installed_s
        first_step_s = self._view_change.last_installed_s + self._run.limits.first_step_s
        if computes and not set(late) & set(holders) and now_s < first_step_s:
            return now_s + ready_s, []  # its trainer is in a long step, and gives its state after it
        why = dict.fromkeys((p for p in late if p != eldest), f"was not ready within {ready_s:.0f} s")
        if eldest in late:
            pieces = next(member.pieces for member in run.member_list if member.peer == eldest)
            givers = {run.member_order[rank] for _, rank in pieces} - {eldest}
            text = f"did not give a checkpoint within {ready_s:.0f} s"
            why |= dict.fromkeys((p for p in givers if p in run.workers), text)
        gone: list[Effect] = []
        for peer, reason in why.items():
            gone += self._departures.remove(peer, reason)
        return now_s + ready_s, gone

    def state_transfer_deadline_s(self) -> float:
        """A state is visibly on its way to one that is not READY: another generation would begin it anew."""
        awaited = [
            self._run.workers[p]
            for p in self._run.present_members
            if p not in self._view_change.ready_histories
        ]
        feeds_s = [worker.state_progress.deadline_s(self._run.limits.ready_s) for worker in awaited]
        return min(max(feeds_s, default=-math.inf), self._forming_limit_s)
