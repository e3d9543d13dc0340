"""How workers leave the registry, and what that means for the others.

               registered   address known   waited for   is told
    lost           no            yes            yes      Rejoin, when it sends something
    replaced       no            yes            no       (the new process is let in)
    left           no            no             no
    dismissed      no            no             no       Refused, with the reason
    refused        no            yes            no       Refused, with the reason

Other parts decide that a worker has to go: heartbeat timeouts, stalls, bad links, the operator.
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergenceDetector
from gridtrain_coordinator.run.events import Disconnect, Effect, LogEvent, RunPhase, Send
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import Worker, worker_count_text
from gridtrain_coordinator.run.run_state import RunState

RESTART = "restart this worker to join again; `gridtrain worker --restarts N` does so by itself"


class Departures:
    """Removes workers, and requests another generation where a member is removed."""

    def __init__(
        self,
        run: RunState,
        planner: GenerationPlanner,
        addresses: AddressBook,
        divergence: DivergenceDetector,
    ) -> None:
        self._run, self._planner = run, planner
        self._addresses, self._divergence = addresses, divergence

    def remove_lost(self, peer: m.PeerId, reason: str) -> list[Effect]:
        """The worker does not answer.  It may come back: its next message is answered with `Rejoin`."""
        worker = self._run.workers.get(peer)
        return [self._unregister(worker, reason, is_final=False)] if worker is not None else []

    def leave(self, peer: m.PeerId, reason: str) -> list[Effect]:
        """The worker leaves of its own accord."""
        worker = self._run.workers.get(peer)
        if worker is None:
            return [Disconnect(peer)]
        return [*self._remove(worker, f"left: {reason}", is_voluntary=True), Disconnect(peer)]

    def dismiss(self, peer: m.PeerId, reason: str, *, notify: bool = True) -> list[Effect]:
        """Exclude a worker.  `notify`: tell it why; False: it has been told."""
        worker = self._run.workers.get(peer)
        if worker is None:
            return [Disconnect(peer)]
        effects = self._remove(worker, reason)
        if notify and not self._run.is_finished:
            effects.append(Send(peer, m.Refused("dismissed", reason, RESTART)))
        return [*effects, Disconnect(peer)]

    def replace_process(self, peer: m.PeerId, name: str) -> list[Effect]:
        """Another process joins with the worker's key: the earlier one is lost, with all that it held."""
        self._divergence.forget(peer)
        reason = "its process has ended, and another one came with its key"
        worker = self._run.workers.get(peer)
        if worker is not None:
            return [self._unregister(worker, reason, cause=f"{worker.name} is lost: {reason}")]
        self._record_departure(peer, f"{name} is lost: {reason}")
        return []

    def refuse(self, peer: m.PeerId, code: str, reason: str, remedy: str) -> list[Effect]:
        """The worker does not fit into the run, or comes too late."""
        worker = self._run.workers.pop(peer, None)
        name = worker.name if worker is not None else "a worker"
        self._record_departure(peer, f"{name} was refused: {reason}")
        note = LogEvent("warning", "refused", {"peer": peer.hex()[:12], "code": code, "reason": reason})
        return [note, Send(peer, m.Refused(code, reason, remedy))]

    def refuse_late(self, peer: m.PeerId) -> list[Effect]:
        reason = f'the run "{self._run.name}" is finished'
        return self.refuse(peer, "finished", reason, "ask the run's owner for the result")

    def finish_run(self) -> list[Effect]:
        """The run is over: tell the members, and refuse all other workers."""
        run = self._run
        reason = f"{worker_count_text(len(run.member_list))} reached the end of the run"
        effects: list[Effect] = [
            run.enter_phase(RunPhase.FINISHED, reason),
            LogEvent("info", "finished", {"reason": reason}),
        ]
        for peer in list(run.workers):
            effects += [run.phase_message(peer)] if peer in run.members else self.refuse_late(peer)
        return effects

    def _remove(self, worker: Worker, reason: str, *, is_voluntary: bool = False) -> list[Effect]:
        note = self._unregister(worker, reason, is_voluntary=is_voluntary)
        self._addresses.forget(worker.peer)
        self._divergence.forget(worker.peer)
        return [note]

    def _unregister(
        self,
        worker: Worker,
        reason: str,
        *,
        cause: str = "",
        is_voluntary: bool = False,
        is_final: bool = True,
    ) -> LogEvent:
        """`cause`: why there is another generation, if the worker was a member; default: name and reason."""
        run, peer = self._run, worker.peer
        del run.workers[peer]
        if peer in run.members:
            run.record_step(worker.step)  # so that a rollback is counted from there
        self._record_departure(peer, cause or f"{worker.name} {reason}", is_final=is_final)
        is_normal = is_voluntary or run.is_finished
        level, event = ("info", "left") if is_normal else ("warning", "lost")
        return LogEvent(level, event, {"name": worker.name, "reason": reason})

    def _record_departure(self, peer: m.PeerId, cause: str, *, is_final: bool = True) -> None:
        """If a member is gone, the others need another generation."""
        run = self._run
        self._planner.forget(peer)
        run.view_change.discard_report(peer)
        if peer in run.members:
            run.view_change.replace_reason(cause)
            if is_final:
                run.record_departure(peer)
