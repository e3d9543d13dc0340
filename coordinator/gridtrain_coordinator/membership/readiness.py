"""While a generation forms: which members are ready, and how long the others are waited for (commit rule 8).

MembershipView --> all members are ready with one history ---------> StartGeneration
                   time is up, and no state makes progress --------> late members are dismissed
                   a member is lost, or has another history -------> another generation
                   members cannot connect, and no state comes -----> another generation
"""

from __future__ import annotations

import math
from collections.abc import Collection

from gridtrain.core import messages as m
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.run.events import Effect, LogEvent, RunPhase, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import worker_count_text
from gridtrain_coordinator.run.run_state import RunState

MAX_FORMING_S = 900.0
"""Longest time for a generation to form, whatever progress its members report; the time that the bytes of
their states need on the slowest link is added."""

STATE_BYTES_PER_PARAMETER = 16
"""A parameter with the moments of its optimizer, and buffers."""

DEFAULT_RATE_Bps, MIN_RATE_Bps = 2.5e6, 125e3
"""Rate of a link that is not measured; and the slowest rate that is waited for."""


class Readiness:
    """Waits for the members' `Ready` messages."""

    def __init__(self, run: RunState, planner: GenerationPlanner, departures: Departures) -> None:
        self._run, self._planner, self._departures = run, planner, departures
        self._forming_limit_s = -math.inf  # whatever progress is reported

    def begin(self, now_s: float) -> None:
        """A generation was installed."""
        joining = [member.peer for member in self._run.member_list if member.joining]
        holders = [member.peer for member in self._run.member_list if not member.joining]
        workload = self._planner.exchange_choice.workload
        parameters = workload.parameters if workload is not None else None
        rate_Bps = self._planner.min_rate_Bps(holders, joining)
        self._forming_limit_s = now_s + max_forming_s(len(joining), parameters, rate_Bps)

    def advance(self, now_s: float) -> tuple[list[Effect], bool]:
        """Start the generation once all members are ready; True: it is abandoned for another one."""
        run, view_change = self._run, self._run.view_change
        assert run.view is not None
        effects: list[Effect] = []
        histories = view_change.ready_histories
        wrong = [p for p, history in histories.items() if history != run.view.history and p in run.workers]
        for peer in wrong:
            effects += self._departures.remove_lost(peer, "is ready with another history of updates")
        late = [peer for peer in run.present_members if peer not in histories]
        if late and view_change.unrouted_reason and now_s >= self.state_transfer_deadline_s():
            view_change.request(view_change.unrouted_reason)
            view_change.reset()
            return effects, True
        if late and now_s >= view_change.deadline_s:
            effects += self._handle_late(late, now_s)
        if wrong or len(run.present_members) < len(run.member_order):
            view_change.reset()
            return effects, True
        return ([], False) if late else (self._start(), False)

    def _start(self) -> list[Effect]:
        run = self._run
        assert run.view is not None
        run.view_change.reset()
        size, step = len(run.member_order), run.view.applied + 1
        entry = run.enter_phase(RunPhase.TRAINING, f"{worker_count_text(size)} since step {step}")
        fields = {"generation": run.generation, "workers": size, "step": step}
        start = m.StartGeneration(run.term, run.generation)
        return [entry, LogEvent("info", "training", fields), *(Send(p, start) for p in run.member_order)]

    def _handle_late(self, late: Collection[m.PeerId], now_s: float) -> list[Effect]:
        """Time is up: wait on, or dismiss members.

        The longest-serving member that holds the model always stays.  If it waits for parts of its stage, the
        members that were to send them are dismissed.
        """
        run, ready_s = self._run, self._run.limits.ready_s
        progressed_s = max(run.workers[p].progressed_s for p in late)
        if progressed_s + ready_s > now_s < self._forming_limit_s:  # a large state is being received
            run.view_change.wait_until(progressed_s + ready_s)
            return []
        run.view_change.wait_until(now_s + ready_s)
        holders = [member.peer for member in run.member_list if not member.joining]
        if self._is_source_computing(holders, late, now_s):
            return []
        eldest = min((p for p in holders if p in run.workers), key=run.workers.seniority, default=None)
        reasons = dict.fromkeys((p for p in late if p != eldest), f"was not ready within {ready_s:.0f} s")
        if eldest in late:
            pieces = next(member.pieces for member in run.member_list if member.peer == eldest)
            sources = {run.member_order[rank] for _, rank in pieces} - {eldest}
            text = f"did not send a checkpoint within {ready_s:.0f} s"
            reasons |= dict.fromkeys((p for p in sources if p in run.workers), text)
        effects: list[Effect] = []
        for peer, reason in reasons.items():
            effects += self._departures.dismiss(peer, reason)
        return effects

    def _is_source_computing(
        self, holders: Collection[m.PeerId], late: Collection[m.PeerId], now_s: float
    ) -> bool:
        """The state source is in a long first step, after which it sends its state."""
        run, installed_s = self._run, self._run.view_change.last_installed_s
        if not holders or set(late) & set(holders) or now_s >= installed_s + run.limits.first_step_s:
            return False
        named = next((x.donor for x in run.member_list if x.joining and not run.partition.is_pipeline), -1)
        source = run.workers.get(run.member_order[named] if named >= 0 else next(iter(holders)))
        return source is not None and source.progressed_s < installed_s

    def state_transfer_deadline_s(self) -> float:
        """Until when a state counts as on its way; another generation would start its transfer over."""
        run = self._run
        awaited = [run.workers[p] for p in run.present_members if p not in run.view_change.ready_histories]
        deadlines_s = [worker.state_progress.deadline_s(run.limits.ready_s) for worker in awaited]
        return min(max(deadlines_s, default=-math.inf), self._forming_limit_s)


def max_forming_s(receivers: int, parameters: int | None, rate_Bps: float | None) -> float:
    """The longest time for a generation to form.

    Args:
        receivers: members that lack the state.
        parameters: of the model; None: not known.
        rate_Bps: of the slowest measured link from a member that holds the state; None: not measured.
    """
    slowest_Bps = max(MIN_RATE_Bps, rate_Bps if rate_Bps is not None else DEFAULT_RATE_Bps)
    return MAX_FORMING_S + receivers * STATE_BYTES_PER_PARAMETER * (parameters or 0) / slowest_Bps
