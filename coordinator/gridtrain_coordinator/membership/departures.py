"""Removes a worker that is lost, leaves, or is replaced, dismissed or refused, and informs it if necessary.

               still registered   address kept   awaited   message to the worker
    lost             no               yes          yes     Rejoin, in reply to its next message
    replaced         no               yes          no      none; the new process joins
    left             no               no           no      none
    dismissed        no               no           no      Refused, with the reason
    refused          no               yes          no      Refused, with the reason

An awaited worker may come back with its state: if no other member has a state, `FreezePhase` waits for it.
The new process of a pipeline's member may have a checkpoint, so `FreezePhase` also waits for its `Setup`.
Other modules decide when to remove a worker, because of a timeout, stall, bad link or command, for example.
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.errors import DISMISSED
from gridtrain.quantities import format_count
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergenceDetector
from gridtrain_coordinator.run.events import Disconnect, Effect, LogEvent, RunPhase, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.stages.whole_state import EXPORT_LATEST

RESTART = "restart this worker to rejoin, or let `gridtrain worker --restarts N` restart it"

MODEL_REMEDY = "gridtrain export writes it from any worker's latest checkpoint, if there is one"


@dataclass(slots=True, eq=False)
class Departures:
    """Removes workers, and requests another generation whenever a removed worker was a member."""

    _run: RunState
    _planner: GenerationPlanner
    _addresses: AddressBook
    _divergence: DivergenceDetector

    def remove_lost(self, peer: m.PeerId, reason: str) -> list[Effect]:
        """Remove a worker that does not respond.

        If the worker comes back, its next message is answered with `Rejoin`.
        """
        worker = self._run.workers.get(peer)
        return [self._unregister(worker, reason, is_final=False)] if worker is not None else []

    def leave(self, peer: m.PeerId, reason: str) -> list[Effect]:
        """Remove a worker that has announced that it is leaving."""
        worker = self._run.workers.get(peer)
        if worker is None:
            return [Disconnect(peer)]
        effects = self._record_missing_model(worker, reason)
        effects += self._run.record_leave(worker)
        return [*effects, self._remove(worker, f"left: {reason}", "left"), Disconnect(peer)]

    def _record_missing_model(self, worker: Worker, reason: str) -> list[Effect]:
        """Record that no final model is written if the leaving worker was to write it but could not."""
        run, (what, _, why) = self._run, reason.partition(": ")
        has_finished = worker.peer in (run.members if run.is_finished else run.finished_members)
        if what != m.MODEL_NOT_WRITTEN or not has_finished or not run.writes_model(worker.peer):
            return []
        remedy = EXPORT_LATEST if run.partition.is_pipeline else MODEL_REMEDY
        text = f"{worker.name}: {why}; {remedy}"
        fields = {"name": worker.name, "reason": why, "remedy": remedy}
        return [*run.record_missing_model(text), LogEvent("error", "model_not_written", fields)]

    def dismiss(
        self,
        peer: m.PeerId,
        reason: str,
        event: str = "lost",
        *,
        code: str = DISMISSED,
        remedy: str = RESTART,
        notify: bool = True,
    ) -> list[Effect]:
        """Remove and disconnect a worker.

        Args:
            event: the event's name in the log, "lost" or "removed".
            code, remedy: the code and the remedy of the `Refused` for the worker.
            notify: whether to send `reason` to the worker; False if it has already been sent.
        """
        worker = self._run.workers.get(peer)
        if worker is None:
            return [Disconnect(peer)]
        effects: list[Effect] = [self._remove(worker, reason, event)]
        if notify and not self._run.is_finished:
            effects.append(Send(peer, m.Refused(code, reason, remedy)))
        return [*effects, Disconnect(peer)]

    def replace_process(self, peer: m.PeerId, name: str) -> list[Effect]:
        """Remove the earlier process of a worker when another process joins with the worker's key.

        The state of the earlier process is lost.

        Args:
            name: the worker's name, used if the worker is no longer registered.
        """
        self._divergence.forget(peer)
        reason = "its process has ended, and another process joined with its key"
        worker = self._run.workers.get(peer)
        if worker is not None:
            return [self._unregister(worker, reason, cause=f"{worker.name} is lost: {reason}")]
        self._record_departure(peer, f"{name} is lost: {reason}")
        return []

    def refuse(self, peer: m.PeerId, refusal: m.Refused) -> list[Effect]:
        """Refuse a worker that does not fit the run, or that joins when the run is full or finished."""
        worker = self._run.workers.pop(peer, None)
        name = worker.name if worker is not None else "a worker"
        self._record_departure(peer, f"{name} was refused: {refusal.reason}")
        fields = {"name": name, "peer": peer.hex()[:12], "code": refusal.code, "reason": refusal.reason}
        return [LogEvent("warning", "refused", fields), Send(peer, refusal)]

    def refuse_late(self, peer: m.PeerId) -> list[Effect]:
        missing = f"; {self._run.missing_model}" if self._run.missing_model else ""
        reason = f'the run "{self._run.name}" is finished{missing}'
        return self.refuse(peer, m.Refused("finished", reason, "ask the run's owner for the result"))

    def finish_run(self, incomplete: str = "") -> list[Effect]:
        """Finish the run: notify the members, and refuse all other workers.

        Args:
            incomplete: the reason why no worker can write the model; all workers are then refused.  "" if
                the first member of each stage can write its part.
        """
        run = self._run
        reason = f"{format_count(len(run.member_list), 'worker')} reached the end of the run"
        if run.is_ending and not (run.members and run.members <= run.finished_members):
            reason = f"its owner has ended it after {format_count(run.highest_step, 'step')}"
        reason += run.skipped_steps.ending(run.highest_step)
        if incomplete:
            run.record_missing_model(incomplete)
        note = LogEvent("info", "finished", {"reason": reason})
        effects: list[Effect] = [run.enter_phase(RunPhase.FINISHED, reason), note]
        ending = run.members if not incomplete else frozenset()
        for peer in list(run.workers):
            effects += [run.phase_message(peer)] if peer in ending else self.refuse_late(peer)
        return effects

    def _remove(self, worker: Worker, reason: str, event: str) -> LogEvent:
        note = self._unregister(worker, reason, event)
        self._addresses.route_table.forget(worker.peer)
        self._divergence.forget(worker.peer)
        return note

    def _unregister(
        self, worker: Worker, reason: str, event: str = "lost", *, cause: str = "", is_final: bool = True
    ) -> LogEvent:
        """Remove a worker from the registry; return the event for the log.

        Args:
            event: the event's name; once the run is finished, "lost" is replaced by "left".
            cause: the reason for the next generation, if the worker was a member; by default its name and
                `reason`.
        """
        run, peer = self._run, worker.peer
        run.unregister(worker)
        self._record_departure(peer, cause or f"{worker.name} {reason}", is_final=is_final)
        fields = {"name": worker.name, "reason": reason.removeprefix("left: ")}
        if event == "removed":
            return LogEvent("info", "removed", fields)
        if event == "left" or run.is_finished:
            return LogEvent("info", "left", fields)
        return LogEvent("warning", "lost", fields)

    def _record_departure(self, peer: m.PeerId, cause: str, *, is_final: bool = True) -> None:
        """Discard a worker's measurements; if it was a member, request another generation."""
        run = self._run
        self._planner.forget(peer)
        run.view_change.discard_freeze_report(peer)
        if peer in run.members:
            run.view_change.replace_reason(cause)
            if is_final:
                run.record_departure(peer)
