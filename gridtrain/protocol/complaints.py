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

from gridtrain.protocol import messages as m
from gridtrain.protocol import topology
from gridtrain.protocol.breaks import MOST_BREAKS, WINDOW_S
from gridtrain.protocol.drift import Drifted, Drifts
from gridtrain.protocol.making import Making
from gridtrain.protocol.membership_io import Effect, Note, Strike
from gridtrain.protocol.partings import Partings
from gridtrain.protocol.plans import Plans
from gridtrain.protocol.roll import Worker
from gridtrain.protocol.run import Run
from gridtrain.protocol.stalls import Stalls
from gridtrain.protocol.whereabouts import Whereabouts


class Complaints:
    """See the module's text.

    Attributes:
        drift_count: states that were found to differ, and replaced.
    """

    def __init__(
        self,
        run: Run,
        making: Making,
        plans: Plans,
        partings: Partings,
        whereabouts: Whereabouts,
        drifts: Drifts,
        drifted: Drifted,
    ) -> None:
        self._run, self._making, self._plans, self._partings = run, making, plans, partings
        self._whereabouts, self._drifts, self._drifted = whereabouts, drifts, drifted
        self._stalls = Stalls(run.limits.patience_floor_s)
        self.drift_count = 0

    def no_route(self, worker: Worker, message: m.NoRoute) -> list[Effect]:
        """Members that cannot connect: the next generation takes another way between them."""
        run, making = self._run, self._making
        now = run.is_now(message.term, message.generation)
        if not now or making.freezing or worker.peer not in run.members:
            return []
        others = sorted(run.members & set(message.peers) - {worker.peer})
        if not others:
            return []
        tried = self._whereabouts.give_up(worker.peer, others)
        names = ", ".join(run.named(peer) for peer in others)
        reason = f"{worker.name} cannot reach {names} as planned"
        if making.forming:
            making.unrouted = making.unrouted or reason
        else:
            making.want(reason)
        return [Note("warning", "no_route", {"name": worker.name, "to": names, "tried": tried})]

    def broken(self, worker: Worker, message: m.Broken, now_s: float) -> list[Effect]:
        """A connection broke; the member that all such connections have in common goes."""
        run, breaks, size = self._run, self._plans.breaks, len(self._run.members)
        now = run.is_now(message.term, message.generation)
        if not now or not {worker.peer, message.peer} <= run.members or worker.peer == message.peer:
            return []
        breaks.note(worker.peer, message.peer, now_s)
        if message.peer in run.workers:
            run.workers[message.peer].missed_s = now_s
        centre = run.order[0] if topology.is_star(self._plans.exchanging.setup) else None
        flapping = breaks.common_end(now_s, size, centre)
        if flapping is not None:
            text = f"its connections broke {MOST_BREAKS} times within {WINDOW_S:.0f} s"
            return self._partings.dismiss(flapping, text)
        if not self._making.change and (common := breaks.worth_avoiding(now_s, size)) is not None:
            name = run.named(common)
            self._making.want(f"connections of {name} broke again and again: the next ring goes round them")
        return []

    def stalled(self, worker: Worker, stalled: m.Stalled, now_s: float) -> list[Effect]:
        """A round hangs: the rest start anew, without those at fault."""
        run, making = self._run, self._making
        now = run.is_now(stalled.round.term, stalled.round.generation)
        if not now or not making.resting or worker.peer not in run.members or run.view is None:
            return []
        # Where the generation began, not where the sender says that it is: its word is not needed here.
        step, reason = run.view.applied + 1, stalled.reason
        times = self._stalls.told(step, run.members, stalled)
        fields = {"name": worker.name, "step": step, "times": times, "reason": reason}
        effects: list[Effect] = [Note("warning", "stalled", fields)]
        gone = self._stalls.at_fault(stalled, run.members, run.workers, run.seniority, now_s)
        for peer, why in gone.items():
            effects += self._partings.dismiss(peer, why)
        making.want(f"{worker.name} reports a stall: {reason}")
        return effects

    def compare(self, peer: m.PeerId, told: m.Fingerprint) -> list[Effect]:
        """States are compared beside the training; who has another one than most gets it anew."""
        run = self._run
        if not run.is_now(told.term, told.generation) or not self._making.resting:
            return []
        effects: list[Effect] = []
        for wrong in self._drifts.tell(peer, told.step, told.digest):
            if (worker := run.workers.get(wrong)) is None:
                continue
            self.drift_count += 1
            self._making.want(f"{worker.name} holds another state than most")
            fields = {"name": worker.name, "step": told.step, "so_far": self.drift_count}
            effects.append(Note("warning", "drifted", fields))
            effects.append(self._drifted.tell(wrong, m.Drifted(run.term, run.generation, told.step)))
        return effects

    def accused(self, peer: m.PeerId, message: m.Accuse) -> list[Effect]:
        """Of a breach of the protocol."""
        both = {peer, message.peer} <= self._run.members and peer != message.peer
        return [Strike(message.peer, message.reason, accuser=peer)] if both else []
