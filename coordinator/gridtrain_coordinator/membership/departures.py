"""How workers go: off the roll, for a while or for good, and what that means for the others.

Decides what is forgotten of whom, what the one who goes is told, and that the others want another generation.
Never decides that somebody has to go: silence, stalls, bad lines and the operator do.

                            off the roll   its address   not waited for   is told
    silent, or cut off           x                                        Rejoin, if it says something
    another process came         x                             x          (that one is let in)
    left                         x              x              x
    dismissed                    x              x              x          Refused, with a reason
    refused                      x                             x          Refused, with a reason
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergedMembers
from gridtrain_coordinator.run.events import Disconnect, Effect, LogEvent, RunPhase, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import Worker, worker_count_text
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange

RESTART = "restart this worker to join again; `gridtrain worker --restarts N` does so by itself"


class Departures:
    """See the module's text."""

    def __init__(
        self,
        run: RunState,
        making: ViewChange,
        plans: GenerationPlanner,
        whereabouts: AddressBook,
        drifted: DivergedMembers,
    ) -> None:
        self._run, self._view_change, self._planner = run, making, plans
        self._addresses, self._diverged = whereabouts, drifted

    def remove_lost(self, peer: m.PeerId, reason: str) -> list[Effect]:
        """It may come back: its next message is answered by Rejoin."""
        worker = self._run.workers.get(peer)
        if worker is None:
            return []
        return [self._unregister(worker, reason, f"{worker.name} {reason}", for_good=False)]

    def remove(self, peer: m.PeerId, reason: str, *, told: bool = False) -> list[Effect]:
        """For good.  `told`: why it has to go."""
        worker = self._run.workers.get(peer)
        if worker is None:
            return [Disconnect(peer)]
        effects: list[Effect] = [self._unregister(worker, reason, f"{worker.name} {reason}", for_good=True)]
        self._addresses.forget(peer)
        self._diverged.forget(peer)
        if not (self._is_voluntary(reason) or told):
            effects.append(Send(peer, m.Refused("dismissed", reason, RESTART)))
        return [*effects, Disconnect(peer)]

    def replace_process(self, peer: m.PeerId, name: str) -> list[Effect]:
        """Another process has come with its key: the one that was known is lost, with all that it held."""
        self._diverged.forget(peer)
        reason = "its process has ended, and another one came with its key"
        worker = self._run.workers.get(peer)
        if worker is not None:
            return [self._unregister(worker, reason, f"{worker.name} is lost: {reason}", for_good=True)]
        self._record_departure(peer, f"{name} is lost: {reason}", for_good=True)
        return []

    def refuse(self, peer: m.PeerId, code: str, reason: str, remedy: str) -> list[Effect]:
        """It would do harm, or nothing for the run."""
        worker = self._run.workers.pop(peer, None)
        name = worker.name if worker is not None else "a worker"
        self._record_departure(peer, f"{name} was refused: {reason}", for_good=True)
        note = LogEvent("warning", "refused", {"peer": peer.hex()[:12], "code": code, "reason": reason})
        return [note, Send(peer, m.Refused(code, reason, remedy))]

    def refuse_late(self, peer: m.PeerId) -> list[Effect]:
        reason = f'the run "{self._run.name}" is finished'
        return self.refuse(peer, "finished", reason, "ask the run's owner for the result")

    def finish_run(self) -> list[Effect]:
        """The run is over, for all."""
        run = self._run
        reason = f"{worker_count_text(len(run.member_list))} reached the end of the run"
        effects: list[Effect] = [
            run.enter_phase(RunPhase.FINISHED, reason),
            LogEvent("info", "finished", {"reason": reason}),
        ]
        for peer in list(run.workers):
            effects += [run.phase_message(peer)] if peer in run.members else self.refuse_late(peer)
        return effects

    def _unregister(self, worker: Worker, reason: str, why: str, *, for_good: bool) -> LogEvent:
        """`why`: there is another generation, where it was a member."""
        run, peer = self._run, worker.peer
        del run.workers[peer]
        if peer in run.members:
            run.highest_step = max(run.highest_step, worker.step)  # what a rollback is counted from
        self._record_departure(peer, why, for_good=for_good)
        level, event = ("info", "left") if self._is_voluntary(reason) else ("warning", "lost")
        return LogEvent(level, event, {"name": worker.name, "reason": reason})

    def _record_departure(self, peer: m.PeerId, why: str, *, for_good: bool) -> None:
        """A member is gone: the others need another generation."""
        self._planner.forget(peer)
        self._view_change.reports.pop(peer, None)
        if peer in self._run.members:
            self._view_change.reason = why
            if for_good:
                self._run.departed_members.add(peer)

    def _is_voluntary(self, reason: str) -> bool:
        return reason.startswith("left") or self._run.is_finished
