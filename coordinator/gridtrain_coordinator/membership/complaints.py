"""What members say of each other: a line that broke, a step that hangs, a peer out of reach, another state.

Decides what comes of it: somebody goes, or another generation is wanted with other ways, or another ring.
Never takes one member's word against another one's where that alone would remove it.

    Broken        again and again ---------> the end that all have in common goes (`protocol.breaks`)
    Stalled       a round hangs -----------> who holds it up again and again goes (`protocol.stalls`)
    NoRoute       no way as planned -------> another way (`protocol.whereabouts`)
    Fingerprint   another state than most -> it is told, and gets it anew (`protocol.drift`)
    Accuse        it broke the protocol ---> Strike, counted elsewhere
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.membership.stalls import StalledStep
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.divergence import DivergedMembers, DivergenceDetector
from gridtrain_coordinator.run.events import Effect, LogEvent, RecordViolation
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.link_failures import FAILURES_BEFORE_AVOIDING, WINDOW_S
from gridtrain_coordinator.run.registry import Worker
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange


class Complaints:
    """See the module's text.

    Attributes:
        drift_count: states that were found to differ, and replaced.
    """

    def __init__(
        self,
        run: RunState,
        making: ViewChange,
        plans: GenerationPlanner,
        partings: Departures,
        whereabouts: AddressBook,
        drifts: DivergenceDetector,
        drifted: DivergedMembers,
    ) -> None:
        self._run, self._view_change, self._planner, self._departures = run, making, plans, partings
        self._addresses, self._divergence, self._diverged = whereabouts, drifts, drifted
        self._stalled_step = StalledStep(run.limits.patience_floor_s)
        self.divergence_count = 0

    def handle_no_route(self, worker: Worker, message: m.PeersUnreachable) -> list[Effect]:
        """Members that cannot connect: the next generation takes another way between them."""
        run, making = self._run, self._view_change
        now = run.is_current(message.term, message.generation)
        if not now or making.is_freezing or worker.peer not in run.members:
            return []
        others = sorted(run.members & set(message.peers) - {worker.peer})
        if not others:
            return []
        tried = self._addresses.block_routes(worker.peer, others)
        names = ", ".join(run.display_name(peer) for peer in others)
        reason = f"{worker.name} cannot reach {names} as planned"
        if making.is_forming:
            making.unrouted_reason = making.unrouted_reason or reason
        else:
            making.request(reason)
        return [LogEvent("warning", "no_route", {"name": worker.name, "to": names, "tried": tried})]

    def handle_broken_link(self, worker: Worker, message: m.ConnectionLost, now_s: float) -> list[Effect]:
        """A connection broke; the member that all such connections have in common goes."""
        run, breaks, size = self._run, self._planner.link_failures, len(self._run.members)
        now = run.is_current(message.term, message.generation)
        if not now or not {worker.peer, message.peer} <= run.members or worker.peer == message.peer:
            return []
        breaks.record(worker.peer, message.peer, now_s)
        if message.peer in run.workers:
            run.workers[message.peer].link_broken_s = now_s
        centre = run.member_order[0] if self._planner.exchange_choice.is_star else None
        flapping = breaks.common_endpoint(now_s, size, centre)
        if flapping is not None:
            text = f"its connections broke {FAILURES_BEFORE_AVOIDING} times within {WINDOW_S:.0f} s"
            return self._departures.remove(flapping, text)
        if not self._view_change.reason and (common := breaks.next_to_avoid(now_s, size)) is not None:
            name = run.display_name(common)
            self._view_change.request(
                f"connections of {name} broke again and again: the next ring goes round them"
            )
        return []

    def handle_stall(self, worker: Worker, stalled: m.RoundStalled, now_s: float) -> list[Effect]:
        """A round hangs: the rest start anew, without those at fault."""
        run, making = self._run, self._view_change
        now = run.is_current(stalled.round.term, stalled.round.generation)
        if not now or not making.is_idle or worker.peer not in run.members or run.view is None:
            return []
        # Where the generation began, not where the sender says that it is: its word is not needed here.
        step, reason = run.view.applied + 1, stalled.reason
        times = self._stalled_step.record(step, run.members, stalled)
        fields = {"name": worker.name, "step": step, "times": times, "reason": reason}
        effects: list[Effect] = [LogEvent("warning", "stalled", fields)]
        gone = self._stalled_step.find_at_fault(stalled, run.members, run.workers, run.seniority, now_s)
        for peer, why in gone.items():
            effects += self._departures.remove(peer, why)
        making.request(f"{worker.name} reports a stall: {reason}")
        return effects

    def compare_digest(self, peer: m.PeerId, told: m.ReplicaDigest) -> list[Effect]:
        """States are compared beside the training; who has another one than most gets it anew."""
        run = self._run
        if not run.is_current(told.term, told.generation) or not self._view_change.is_idle:
            return []
        effects: list[Effect] = []
        for wrong in self._divergence.add(peer, told.step, told.digest):
            if (worker := run.workers.get(wrong)) is None:
                continue
            self.divergence_count += 1
            self._view_change.request(f"{worker.name} holds another state than most")
            fields = {"name": worker.name, "step": told.step, "so_far": self.divergence_count}
            effects.append(LogEvent("warning", "drifted", fields))
            effects.append(
                self._diverged.notify(wrong, m.ReplicaDiverged(run.term, run.generation, told.step))
            )
        return effects

    def handle_accusation(self, peer: m.PeerId, message: m.ViolationReport) -> list[Effect]:
        """Of a breach of the protocol."""
        both = {peer, message.peer} <= self._run.members and peer != message.peer
        return [RecordViolation(message.peer, message.reason, accuser=peer)] if both else []
