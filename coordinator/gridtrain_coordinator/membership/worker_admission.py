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

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.stages.repartition import check_setup
from gridtrain.errors import ConfigError
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.events import Effect, JournalEntry, LogEvent
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.paused_workers import PausedWorkers
from gridtrain_coordinator.run.registry import Worker, setup_differences
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.worker_names import WorkerNames
from gridtrain_coordinator.stages.checkpoint_catalog import CheckpointCatalog, is_impossible

MAX_WORKERS = 1000  # what the lists of one message hold
MAX_PROBES = 256


class WorkerAdmission:
    """See the module's text."""

    def __init__(
        self,
        run: RunState,
        plans: GenerationPlanner,
        partings: Departures,
        disks: CheckpointCatalog,
        whereabouts: AddressBook,
        resting: PausedWorkers,
    ) -> None:
        self._run, self._planner, self._departures, self._checkpoints = run, plans, partings, disks
        self._addresses, self._paused_workers, self._worker_names = whereabouts, resting, WorkerNames()

    def check_join(self, peer: m.PeerId, join: m.Join) -> list[Effect]:
        """Nothing: it may join."""
        run = self._run
        if join.run != run.name:
            return self._departures.refuse(
                peer,
                "wrong-run",
                f'this coordinator serves the run "{run.name}", not "{join.run}"',
                f'ask the owner of "{join.run}" for an invitation to it',
            )
        if run.is_finished:
            return self._departures.refuse_late(peer)
        if len(run.workers) >= MAX_WORKERS and peer not in run.workers:
            reason = f"the run has {len(run.workers)} workers, and {MAX_WORKERS} are the most"
            return self._departures.refuse(peer, "full", reason, "try again when somebody has left")
        return []

    def register(self, peer: m.PeerId, join: m.Join, now_s: float) -> list[Effect]:
        """On the roll, for the first time or again."""
        run = self._run
        worker = run.workers.get(peer)
        if worker is None:
            taken = {other.name for other in run.workers.values()} | self._paused_workers.reserved_names(peer)
            worker = Worker(
                peer, self._worker_names.assign(peer, join.name, taken), join.address, now_s, now_s
            )
            run.workers[peer] = worker
        worker.address, worker.disconnected_s = join.address, None
        self._paused_workers.discard(peer)
        return [
            LogEvent(
                "info", "joined", {"name": worker.name, "peer": peer.hex()[:12], "address": join.address}
            ),
            *self._worker_names.rename_events(join.name, worker.name),
            run.welcome_message(peer),
            run.phase_message(peer),
            *self._addresses.request_dial_back(worker, join.can_relay),
        ]

    def handle_setup(self, worker: Worker, setup: m.Setup, now_s: float) -> list[Effect]:
        """It tells what it would train; who does not fit is refused."""
        run, peer = self._run, worker.peer
        if run.is_finished:
            return self._departures.refuse_late(peer)
        if misfit := self._incompatibility(setup):  # who is refused defines nothing
            return self._departures.refuse(peer, *misfit)
        effects: list[Effect] = []
        if run.definition is None:
            run.define(setup)
            self._planner.exchange_choice.configure(setup)
            run.set_stage_requirement(setup.stages)
            effects += [
                JournalEntry("run", _definition(setup)),
                LogEvent("info", "run_defined", dict(setup.facts)),
            ]
        run.accepted_workers.add(peer)
        worker.setup, worker.checkpoints = setup, setup.stage_checkpoints
        worker.has_caught_up = (
            worker.has_caught_up or setup.stages > 1
        )  # nobody can follow before it knows its stage
        exchanging = self._planner.exchange_choice
        worker.has_caught_up = worker.has_caught_up or (exchanging.is_auto and not exchanging.is_sparse)
        effects += self._checkpoints.journal_confirmed() + self._checkpoints.replan_if_missing(worker)
        return effects + (self._introduce(worker, now_s) if worker.is_addressable else [])

    def _incompatibility(self, setup: m.Setup) -> tuple[str, str, str] | None:
        """Code, reason and remedy; None: it fits."""
        reference = self._run.definition
        if reference is None:
            reference = setup
            try:
                data_ledger.validate(setup.ledger)
                check_setup(setup)
            except ConfigError as error:
                return "ledger", error.reason, error.remedy
        if differing := setup_differences(reference, setup):
            reason = "this worker would train something else: " + "; ".join(differing)
            return "different-run", reason, "start every worker with the same script, data and options"
        held = setup.checkpoint
        if held is not None and not (
            data_ledger.is_balanced(held.ledger) and held.ledger.step == held.applied + 1
        ):
            reason = f"the checkpoint of step {held.applied + 1} has a ledger that does not add up"
            return "checkpoint", reason, "move this worker's checkpoints away"
        if setup.batch_size < 1 and setup.global_batch_size is None:
            reason = f"batch_size is {setup.batch_size}; it must be >= 1"
            return "batch-size", reason, "give grid.batches a batch_size"
        if any(is_impossible(held, reference) for held in setup.stage_checkpoints):
            reason = "a checkpoint has a stage that the run has not, or a ledger that does not add up"
            return "checkpoint", reason, "move this worker's checkpoints away"
        return None

    def handle_dial_back_result(self, peer: m.PeerId, address: str, now_s: float) -> list[Effect]:
        """It is known how others reach it."""
        worker = self._run.workers.get(peer)
        if worker is None or not (told := self._addresses.on_dial_back_result(worker, address)):
            return []
        return told + (self._introduce(worker, now_s) if worker.setup is not None else [])

    def _introduce(self, worker: Worker, now_s: float) -> list[Effect]:
        self._planner.record_introduction(worker.peer)
        worker.probe_deadline_s = now_s + self._run.limits.probe_s
        # Those that are still measuring too: of workers that come together each pair has to be measured.
        # Whoever came last is measured first, so that each of them is one other's first, second, third ..
        others = [w for w in self._run.workers.values() if w.is_introduced and w is not worker]
        others.sort(key=lambda other: -other.probe_deadline_s)
        return self._addresses.introduce(worker.peer, [other.peer for other in others[:MAX_PROBES]])


def _definition(setup: m.Setup) -> dict[str, Any]:
    """For the journal; `recovery.recover` reads it back."""
    return {
        "facts": dict(setup.facts),
        "ledger": asdict(setup.ledger),
        "global_batch_size": setup.global_batch_size,
        "stages": setup.stages,
        "model": asdict(setup.model) if setup.model is not None else None,
    }
