"""Starts a generation once its members are ready, and limits the wait for late ones (commit rule 8).

MembershipView --> all members are ready with one history ---------> StartGeneration
                   time is up, and no transfer makes progress -----> another source, another generation
                   connections break, and no state arrives             or late members are dismissed
                   a member is lost, or its history differs -------> another generation
                   members cannot connect, and no state arrives ---> another generation
"""

from __future__ import annotations

import math
from collections.abc import Collection

from gridtrain.core import messages as m
from gridtrain.core.planning.batch_shares import seconds_per_sample
from gridtrain.errors import MTU_REMEDY
from gridtrain.quantities import format_count
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.membership.state_sources import StateSources
from gridtrain_coordinator.run.events import Effect, LogEvent, RunPhase, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState

MAX_FORMING_S = 900.0
"""The longest time that a generation may take to form, regardless of the progress that its members report.

The time needed to transfer the members' states over the slowest link is added.
"""

STATE_BYTES_PER_PARAMETER, MAX_STATE_BYTES_PER_PARAMETER = 16, 256
"""The bytes of the state per parameter, including optimizer moments and buffers: the assumed number, and the
largest number that is accepted."""

DEFAULT_RATE_Bps, MIN_RATE_Bps = 2.5e6, 125e3
"""The rate assumed for an unmeasured link, and the lowest rate that deadlines assume."""

MIN_RATE_SHARE = 1 / 16
"""The smallest fraction of the link's rate at which a state transfer is considered to make progress.

Without this limit, a member that sends or receives very slowly could delay the other members.
"""

LOADING_PERIODS = 6
"""How long a member may take to load a state once it has arrived, in multiples of `Deadlines.ready_s`."""

FAILURES_BEFORE_FUTILE = 2
"""How often a newcomer's connections may break before any of the state has arrived.

TCP gives up a connection after 6 s without an acknowledgement.  If that happens repeatedly, although the
connections can be opened, small packets arrive and large ones do not, so waiting any longer is futile.
"""


class Readiness:
    """Waits for the members' `Ready` messages."""

    def __init__(
        self, run: RunState, planner: GenerationPlanner, departures: Departures, sources: StateSources
    ) -> None:
        self._run, self._planner, self._departures, self._sources = run, planner, departures, sources
        self._forming_limit_s = -math.inf  # the latest deadline, regardless of progress

    def begin(self, now_s: float) -> None:
        """Start waiting for the members of a generation that was just installed."""
        joining = [member.peer for member in self._run.member_list if member.joining]
        workload = self._planner.exchange_choice.workload
        parameters = workload.parameters if workload is not None else None
        rate_Bps = self._planner.measured_links.min_rate_Bps(self._run.members, frozenset(joining))
        self._forming_limit_s = now_s + max_forming_s(len(joining), parameters, rate_Bps)
        step_bytes = MIN_RATE_SHARE * waited_rate_Bps(rate_Bps) * self._run.limits.ready_s
        max_bytes = MAX_STATE_BYTES_PER_PARAMETER * parameters if parameters else math.inf
        for peer in joining:
            self._run.workers[peer].state_progress.begin(step_bytes, max_bytes, now_s)

    def advance(self, now_s: float) -> list[Effect]:
        """Start the generation once all members are ready, or handle members that are late.

        If the generation is abandoned, the view change ends without having started it.
        """
        run, view_change = self._run, self._run.view_change
        assert run.view is not None
        effects: list[Effect] = []
        histories = view_change.ready_histories
        if (
            len(histories) < len(run.member_order)
            and now_s < view_change.deadline_s
            and not view_change.reason  # if there is one, a member may be lost
            and not view_change.unrouted_reason
            and set(histories.values()) <= {run.view.history}
        ):
            return []  # the usual case; avoids a pass over all members for each `Ready`
        wrong = [p for p, history in histories.items() if history != run.view.history and p in run.workers]
        for peer in wrong:
            effects += self._departures.remove_lost(peer, "is ready with a different history of updates")
        late = [peer for peer in run.present_members if peer not in histories]
        if late and view_change.unrouted_reason and now_s >= self.replacement_due_s():
            view_change.request(view_change.unrouted_reason)
            view_change.reset()
            return effects
        if late and now_s >= view_change.deadline_s:
            effects += self._handle_late(late, now_s)
        if wrong or len(run.present_members) < len(run.member_order):
            view_change.reset()
        elif not late:
            effects = self._start()
        return effects

    def _start(self) -> list[Effect]:
        run = self._run
        assert run.view is not None
        if (source := self._state_source()) is not None:
            self._sources.record_success(source, self._joining())
        run.view_change.start()
        start = m.StartGeneration(run.term, run.generation)
        starts = [Send(peer, start) for peer in run.member_order]
        if run.is_ending:  # the end is announced first, so that no member begins a round
            return [*self._departures.finish_run(), *starts]
        size, step = len(run.member_order), run.view.applied + 1
        was_paused = run.phase is RunPhase.PAUSED  # all workers know this, some from their Welcome
        entry = run.enter_phase(RunPhase.TRAINING, f"{format_count(size, 'worker')} since step {step}")
        fields = {"generation": run.generation, "workers": size, "step": step}
        told = [run.phase_message(peer) for peer in run.workers] if was_paused else []
        return [entry, LogEvent("info", "training", fields), *starts, *told]

    def _handle_late(self, late: Collection[m.PeerId], now_s: float) -> list[Effect]:
        """Handle members that are not ready in time: keep waiting, use another source, or dismiss members.

        The longest-serving member that holds the model stays, unless it sends a checkpoint to none of several
        others before the training begins.  If it waits for parts of its stage, the members that should have
        sent them are dismissed.  If another source is needed, the generation is abandoned.
        """
        run, ready_s = self._run, self._run.limits.ready_s
        futile = self._futile(late, now_s)
        late = futile or late
        progressed_s = max(self._progressed_s(run.workers[p]) for p in late)
        is_receiving = progressed_s + ready_s > now_s < self._forming_limit_s  # a large state
        if is_receiving and not futile:
            run.view_change.wait_until(progressed_s + ready_s)
            return []
        run.view_change.wait_until(now_s + ready_s)
        holders = [member.peer for member in run.member_list if not member.joining]
        if self._is_source_computing(holders, late, now_s):
            return []
        staying = self._record_failure(holders, late, futile, now_s)
        if staying:
            return self._replace_source(late, staying)
        if self._is_checkpoint_unsent(holders, late, now_s):
            text = f"sent its checkpoint to no other worker within {ready_s:.0f} s"
            return [x for peer in holders for x in self._departures.dismiss(peer, text)]
        eldest = min((p for p in holders if p in run.workers), key=run.workers.seniority, default=None)
        reasons = dict.fromkeys((p for p in late if p != eldest), f"was not ready within {ready_s:.0f} s")
        if eldest in late:
            pieces = next(member.pieces for member in run.member_list if member.peer == eldest)
            sources = {run.member_order[rank] for _, rank in pieces} - {eldest}
            text = f"did not send a checkpoint within {ready_s:.0f} s"
            reasons |= dict.fromkeys((p for p in sources if p in run.workers), text)
        effects: list[Effect] = []
        for peer, reason in reasons.items():
            source = run.workers.get(self._state_source() or b"") if peer in self._joining() else None
            if peer in futile:
                text = "received no part of the state, because its connections to the members break"
                effects += self._departures.dismiss(peer, text, remedy=MTU_REMEDY)
            elif source is not None and source.progressed_s < run.view_change.last_installed_s:
                effects += self._dismiss_waiting(peer, run.workers.display_name(source.peer))
            else:
                effects += self._departures.dismiss(peer, reason)
        return effects

    def end_futile_wait(self, now_s: float) -> None:
        """When a connection has broken, let `advance` handle newcomers to which no state can be sent."""
        run = self._run
        if run.view_change.is_forming and self._futile(run.present_members, now_s):
            run.view_change.shorten_deadline(now_s)

    def _futile(self, late: Collection[m.PeerId], now_s: float) -> list[m.PeerId]:
        """Return the newcomers whose connections broke repeatedly before any of the state arrived.

        One of these connections must lead to a member that may send the state, so that no other member can
        deny a newcomer its place.
        """
        run, failures, source = self._run, self._planner.link_failures, self._state_source()
        senders = run.members if source is None else self._joining() | {source}
        root, size, ready = run.member_order[0], len(run.member_order), run.view_change.ready_histories
        waiting = self._joining().intersection(late).difference(ready)
        return [
            peer
            for peer in sorted(waiting)
            if not run.workers[peer].state_progress.has_received
            and failures.failure_count(peer, now_s) >= FAILURES_BEFORE_FUTILE
            and any(failures.has_broken(peer, sender, now_s) for sender in senders - {peer})
            and peer in failures.suspected_ends(peer, root, size, now_s)
        ]

    def _dismiss_waiting(self, peer: m.PeerId, holder: str) -> list[Effect]:
        """Dismiss a member that waits for the state of another one, whose training loop does not run."""
        return self._departures.dismiss(
            peer,
            f"did not receive the model within {self._run.limits.ready_s:.0f} s from {holder}, the worker "
            "that holds it, whose training loop makes no progress",
            remedy=f"ask the owner of {holder} to continue its loop (in a notebook, to run the cell again) "
            "or to stop that worker (grid.close()), then restart this worker",
        )

    def _is_checkpoint_unsent(
        self, holders: Collection[m.PeerId], late: Collection[m.PeerId], now_s: float
    ) -> bool:
        """Return whether the members that await a checkpoint outnumber its holders, and none has received it.

        False once training has begun; before that, only the holders claim to have the checkpoint.  Also
        False if the run had reached its step and a holder was a member: the holder may be unable to send the
        checkpoint, and without it the run would lose its steps.
        """
        run, joining = self._run, self._joining()
        applied = run.view.applied if run.view is not None else -1
        if run.has_started or applied < 0 or run.partition.is_pipeline or len(joining) <= len(holders):
            return False
        if applied < run.step_before and not run.latest_members.isdisjoint(holders):
            return False
        return joining <= set(late) and not any(self._is_busy(run.workers[peer], now_s) for peer in joining)

    def _progressed_s(self, worker: Worker) -> float:
        """Return the time at which a late member last made progress towards being ready.

        While a member receives the state of an unpartitioned model, only received bytes are progress.  Before
        and after, an increase of its progress counter is accepted as progress for a limited time, because it
        proves only that the member is alive.  For other members, and in a pipeline, it is always accepted.
        """
        transfer, ready_s = worker.state_progress, self._run.limits.ready_s
        if self._run.partition.is_pipeline or worker.peer not in self._joining():
            return worker.progressed_s
        if transfer.left_bytes > 0:
            return transfer.progressed_s
        alive_s = min(worker.progressed_s, transfer.progressed_s + LOADING_PERIODS * ready_s)
        return max(transfer.progressed_s, alive_s) if transfer.has_begun else alive_s

    def _joining(self) -> frozenset[m.PeerId]:
        return frozenset(member.peer for member in self._run.member_list if member.joining)

    def _state_source(self) -> m.PeerId | None:
        """Return the member that sends the state of an unpartitioned model; None if no member does."""
        run = self._run
        holders = [rank for rank, member in enumerate(run.member_list) if not member.joining]
        if run.partition.is_pipeline or not holders or not self._joining():
            return None
        named = next(x.donor for x in run.member_list if x.joining)
        return run.member_order[named if named >= 0 else holders[0]]

    def _is_source_computing(
        self, holders: Collection[m.PeerId], late: Collection[m.PeerId], now_s: float
    ) -> bool:
        """Return whether the state source is still in a long step, after which it will send its state."""
        run, installed_s = self._run, self._run.view_change.last_installed_s
        if not holders or set(late) & set(holders):
            return False
        source = run.workers.get(self._state_source() or next(iter(holders)))
        if source is None or source.progressed_s >= installed_s:
            return False
        return now_s < installed_s + self._longest_step_s(source)

    def _longest_step_s(self, worker: Worker) -> float:
        """Return how long a step of this worker may take, in seconds.

        If no step was measured, this is the limit for a first step, which may compile the model.
        """
        limits = self._run.limits
        share = self._run.share_of(worker.peer)
        step_s = share * seconds_per_sample(worker.figures)
        if not 0 < step_s < math.inf:
            return limits.first_step_s
        return min(limits.first_step_s, limits.patience_floor_s + limits.patience_factor * step_s)

    # -- sources that do not send ------------------------------------------------------------------

    def _record_failure(
        self,
        holders: Collection[m.PeerId],
        late: Collection[m.PeerId],
        futile: Collection[m.PeerId],
        now_s: float,
    ) -> list[m.PeerId]:
        """Record that the source has not served the late members that still wait for the state.

        Returns the members for which another source is to be tried.
        """
        run, source = self._run, self._state_source()
        # Before the first step, the state is one member's own.
        is_shared = run.view is not None and run.view.applied >= 0
        if source is None or not is_shared or set(late) & set(holders):
            return []
        self._sources.record_success(source, [peer for peer in self._joining() if peer not in late])
        waiting = [peer for peer in late if peer in futile or not self._is_busy(run.workers[peer], now_s)]
        if not waiting:
            return []
        self._sources.record_failure(source, waiting)
        present = [peer for peer in holders if peer in run.workers]
        sources = self._sources
        return [peer for peer in waiting if not sources.is_at_fault(peer) and sources.untried(peer, present)]

    def _is_busy(self, worker: Worker, now_s: float) -> bool:
        """Return whether the worker is alive and has received all of the state; if so, the source is not at
        fault for the delay."""
        is_alive = worker.progressed_s + self._run.limits.ready_s > now_s
        return is_alive and worker.state_progress.left_bytes == 0

    def _replace_source(self, late: Collection[m.PeerId], staying: Collection[m.PeerId]) -> list[Effect]:
        run, ready_s, source = self._run, self._run.limits.ready_s, self._state_source()
        assert source is not None
        effects: list[Effect] = []
        for peer in late:
            if peer not in staying:
                effects += self._departures.dismiss(peer, f"was not ready within {ready_s:.0f} s")
        name = run.workers.display_name
        fields = {"source": name(source), "names": ", ".join(map(name, staying))}
        effects.append(LogEvent("warning", "source_replaced", fields))
        run.view_change.replace_reason(
            f"the state did not arrive from {name(source)}, so another member sends it"
        )
        run.view_change.reset()
        return effects

    def replacement_due_s(self) -> float:
        """Return the time from which a generation whose members cannot connect may be replaced.

        While a state transfer is considered to be in progress, it is not, because another generation would
        restart the transfer.
        """
        run = self._run
        awaited = [run.workers[p] for p in run.present_members if p not in run.view_change.ready_histories]
        deadlines_s = [worker.state_progress.deadline_s(run.limits.ready_s) for worker in awaited]
        transfer_s = min(max(deadlines_s, default=-math.inf), self._forming_limit_s)
        return max(transfer_s, run.view_change.unrouted_s)


def max_forming_s(receivers: int, parameters: int | None, rate_Bps: float | None) -> float:
    """Return the longest time that a generation may take to form, in seconds.

    Args:
        receivers: the number of members that do not have the state.
        parameters: the number of parameters of the model; None if it is not known.
        rate_Bps: the rate of the slowest measured link to a member without the state; None if no link has
            been measured.
    """
    sent_bytes = receivers * STATE_BYTES_PER_PARAMETER * (parameters or 0)
    return MAX_FORMING_S + sent_bytes / waited_rate_Bps(rate_Bps)


def waited_rate_Bps(rate_Bps: float | None) -> float:
    """Return the rate that deadlines assume for the slowest link, in bytes per second.

    Args:
        rate_Bps: the measured rate; None if the link has not been measured.
    """
    return max(MIN_RATE_Bps, rate_Bps if rate_Bps is not None else DEFAULT_RATE_Bps)
