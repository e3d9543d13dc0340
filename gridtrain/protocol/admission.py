"""How a worker comes to be one: the name it gets, whether it trains the same thing, when its links are known.

Decides whom to refuse, and that a worker is admitted.  Never decides who is a member: that is for the next
generation; whoever may knock at all is decided by keys (`protocol.door`).

    Join --> on the roll, named --CalledBack--> placed
    Setup -> fits the run (the first one defines it) --both--> Admitted: it measures its links to the others
    Links, or `probe_s` are over -----------------------------> may be in the next generation
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gridtrain.errors import ConfigError
from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.membership_io import Effect, Journal, Note
from gridtrain.protocol.names import Names
from gridtrain.protocol.on_disks import OnDisks, impossible
from gridtrain.protocol.partings import Partings
from gridtrain.protocol.plans import Plans
from gridtrain.protocol.recutting import refuse_nonsense
from gridtrain.protocol.resting import Resting
from gridtrain.protocol.roll import Worker, differences
from gridtrain.protocol.run import Run
from gridtrain.protocol.whereabouts import Whereabouts

MAX_WORKERS = 1000  # what the lists of one message hold
MAX_PROBES = 256


class Admission:
    """See the module's text."""

    def __init__(
        self,
        run: Run,
        plans: Plans,
        partings: Partings,
        disks: OnDisks,
        whereabouts: Whereabouts,
        resting: Resting,
    ) -> None:
        self._run, self._plans, self._partings, self._disks = run, plans, partings, disks
        self._whereabouts, self._resting, self._names = whereabouts, resting, Names()

    def refusal(self, peer: m.PeerId, join: m.Join) -> list[Effect]:
        """Nothing: it may join."""
        run = self._run
        if join.run != run.name:
            return self._partings.refuse(
                peer,
                "wrong-run",
                f'this coordinator serves the run "{run.name}", not "{join.run}"',
                f'ask the owner of "{join.run}" for an invitation to it',
            )
        if run.over:
            return self._partings.too_late(peer)
        if len(run.workers) >= MAX_WORKERS and peer not in run.workers:
            reason = f"the run has {len(run.workers)} workers, and {MAX_WORKERS} are the most"
            return self._partings.refuse(peer, "full", reason, "try again when somebody has left")
        return []

    def join(self, peer: m.PeerId, join: m.Join, now_s: float) -> list[Effect]:
        """On the roll, for the first time or again."""
        run = self._run
        worker = run.workers.get(peer)
        if worker is None:
            taken = {other.name for other in run.workers.values()} | self._resting.names(peer)
            worker = Worker(peer, self._names.given(peer, join.name, taken), join.address, now_s, now_s)
            run.workers[peer] = worker
        worker.address, worker.lost_s = join.address, None
        self._resting.forget(peer)
        return [
            Note("info", "joined", {"name": worker.name, "peer": peer.hex()[:12], "address": join.address}),
            *self._names.renamed(join.name, worker.name),
            run.welcome(peer),
            run.told(peer),
            *self._whereabouts.locate(worker, join.relay),
        ]

    def set_up(self, worker: Worker, setup: m.Setup, now_s: float) -> list[Effect]:
        """It tells what it would train; who does not fit is refused."""
        run, peer = self._run, worker.peer
        if run.over:
            return self._partings.too_late(peer)
        if misfit := self._misfit(setup):  # who is refused defines nothing
            return self._partings.refuse(peer, *misfit)
        effects: list[Effect] = []
        if run.reference is None:
            run.define(setup)
            self._plans.exchanging.defined(setup)
            run.name_stages(setup.stages)
            effects += [Journal("run", _definition(setup)), Note("info", "run_defined", dict(setup.facts))]
        run.accepted.add(peer)
        worker.setup, worker.kept = setup, setup.kept
        worker.caught = worker.caught or setup.stages > 1  # nobody can follow before it knows its stage
        exchanging = self._plans.exchanging
        worker.caught = worker.caught or (exchanging.is_auto and not exchanging.sparse)
        effects += self._disks.hear() + self._disks.plan_without(worker)
        return effects + (self._introduce(worker, now_s) if worker.placed else [])

    def _misfit(self, setup: m.Setup) -> tuple[str, str, str] | None:
        """Code, reason and remedy; None: it fits."""
        reference = self._run.reference
        if reference is None:
            reference = setup
            try:
                ledger.validate(setup.ledger)
                refuse_nonsense(setup)
            except ConfigError as error:
                return "ledger", error.reason, error.remedy
        if differing := differences(reference, setup):
            reason = "this worker would train something else: " + "; ".join(differing)
            return "different-run", reason, "start every worker with the same script, data and options"
        held = setup.held
        if held is not None and not (ledger.balances(held.ledger) and held.ledger.step == held.applied + 1):
            reason = f"the checkpoint of step {held.applied + 1} has a ledger that does not add up"
            return "checkpoint", reason, "move this worker's checkpoints away"
        if setup.batch_size < 1 and setup.global_batch_size is None:
            reason = f"batch_size is {setup.batch_size}; it must be >= 1"
            return "batch-size", reason, "give grid.batches a batch_size"
        if any(impossible(held, reference) for held in setup.kept):
            reason = "a checkpoint has a stage that the run has not, or a ledger that does not add up"
            return "checkpoint", reason, "move this worker's checkpoints away"
        return None

    def called_back(self, peer: m.PeerId, address: str, now_s: float) -> list[Effect]:
        """It is known how others reach it."""
        worker = self._run.workers.get(peer)
        if worker is None or not (told := self._whereabouts.called_back(worker, address)):
            return []
        return told + (self._introduce(worker, now_s) if worker.setup is not None else [])

    def _introduce(self, worker: Worker, now_s: float) -> list[Effect]:
        self._plans.introduced(worker.peer)
        worker.probe_until_s = now_s + self._run.limits.probe_s
        # Those that are still measuring too: of workers that come together each pair has to be measured.
        # Whoever came last is measured first, so that each of them is one other's first, second, third ..
        others = [w for w in self._run.workers.values() if w.introduced and w is not worker]
        others.sort(key=lambda other: -other.probe_until_s)
        return self._whereabouts.introduce(worker.peer, [other.peer for other in others[:MAX_PROBES]])


def _definition(setup: m.Setup) -> dict[str, Any]:
    """For the journal; `recovery.recover` reads it back."""
    return {
        "facts": dict(setup.facts),
        "ledger": asdict(setup.ledger),
        "global_batch_size": setup.global_batch_size,
        "stages": setup.stages,
        "model": asdict(setup.model) if setup.model is not None else None,
    }
