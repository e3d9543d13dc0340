"""Admits workers up to a limit, compares setups with the run's definition, and starts link measurements.

    Join --> registered, named --DialBackResult--> addressable ---+
    Setup -> fits the run (the first setup defines it) -----------+--> Admitted: it measures its links
    LinkLatencies, or `probe_s` has elapsed -----------------------> may be in the next generation

A setup may replace the run's definition (model, data) before the first step, if all workers with the earlier
setup have left.  Whether a worker may connect at all depends on its key (`access.authorization`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.ledger_record import spec_entry
from gridtrain.core.commit.shard_leases import MAX_LEASES
from gridtrain.core.stages.repartition import check_setup
from gridtrain.errors import ConfigError
from gridtrain.quantities import MAX_NAMES, list_first
from gridtrain_coordinator.membership.departures import Departures
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.events import Effect, JournalEntry, LogEvent
from gridtrain_coordinator.run.generation_plan import GenerationPlanner
from gridtrain_coordinator.run.registry import Worker, setup_differences, shown_facts
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.unique_names import WorkerNames, rename_events
from gridtrain_coordinator.stages.checkpoint_catalog import CheckpointCatalog, is_impossible

MAX_WORKERS = 2000  # the most that the lists in one message can hold
MAX_PROBES = 256
LEDGER_BYTES = 124 * 1024  # of a header's 128 KiB, for a ledger that specifies the batches of all members
HELD_BYTES, PENDING_BYTES, LEASE_BYTES, SPAN_BYTES = 55, 69, 54, 19  # largest encodings of its entries


def max_workers(spec: m.LedgerSpec | None) -> int:
    """Return the maximum number of workers for which every ledger of a run fits into a message.

    Args:
        spec: the ledger's specification; None if the run is not defined yet.
    """
    room, each = LEDGER_BYTES, HELD_BYTES
    if spec is not None and spec.delay:
        each += PENDING_BYTES
    if spec is not None and spec.shards:  # each member without a lease may have left a re-queued span
        room, each = room - MAX_LEASES * LEASE_BYTES, each + SPAN_BYTES
    return min(MAX_WORKERS, room // each)


@dataclass(slots=True, eq=False)
class WorkerAdmission:
    """Registers workers, refuses workers that do not fit the run, and introduces admitted workers to each
    other."""

    _run: RunState
    _planner: GenerationPlanner
    _departures: Departures
    _checkpoints: CheckpointCatalog
    _addresses: AddressBook
    _worker_names: WorkerNames

    def check_join(self, peer: m.PeerId, join: m.Join) -> list[Effect]:
        """Return the effects of refusing the worker; an empty list if it may join."""
        run = self._run
        if join.run != run.name:
            reason = f'this coordinator serves the run "{run.name}", not "{join.run}"'
            remedy = f'ask the owner of "{join.run}" for an invitation to it'
            return self._departures.refuse(peer, m.Refused("wrong-run", reason, remedy))
        if run.is_finished:
            return self._departures.refuse_late(peer)
        spec = run.definition.ledger if run.definition is not None else None
        if peer not in run.workers and (full := _fullness(len(run.workers), spec)):
            return self._departures.refuse(peer, full)
        return []

    def register(self, peer: m.PeerId, join: m.Join, now_s: float) -> list[Effect]:
        """Register a worker, or update its registration if it rejoins."""
        run = self._run
        worker = run.workers.get(peer)
        if worker is None:
            taken = {other.name for other in run.workers.values()}
            taken |= run.paused_workers.reserved_names(peer, now_s)
            name = self._worker_names.assign(peer, join.name, taken)
            worker = run.workers.register(peer, name, join.address, now_s)
        worker.record_join(join.address)
        self._run.paused_workers.discard(peer)
        fields = {"name": worker.name, "peer": peer.hex()[:12], "address": join.address}
        return [
            LogEvent("info", "joined", fields),
            *rename_events(join.name, worker.name),
            run.welcome_message(peer),
            run.phase_message(peer),
            *self._addresses.request_dial_back(worker, join.can_relay),
        ]

    def handle_setup(self, worker: Worker, setup: m.Setup, now_s: float) -> list[Effect]:
        """Handle a worker's setup; refuse the worker if its setup does not fit the run."""
        run, peer = self._run, worker.peer
        if run.is_finished:
            return self._departures.refuse_late(peer)
        described = self._with_later_facts(setup)
        reference = run.definition if described is None else described
        others = self._other_names(worker)
        is_binding = bool(others) or run.has_committed
        if reference is not None and not is_binding and setup_differences(reference, setup):
            reference = described = None  # all workers with the run's setup left before the first step
        # A worker that is refused must not define the run.
        if misfit := self._incompatibility(reference, setup, others):
            reason = misfit.reason + self._base_origins(worker, setup)
            return self._departures.refuse(peer, replace(misfit, reason=reason))
        effects: list[Effect] = []
        choice = self._planner.exchange_choice
        if described is not None:
            run.replace_facts(described.facts)
            effects.append(JournalEntry("run", _definition_entry(described)))
        if reference is None:
            run.define(setup)
            choice.configure(setup)
            effects.append(JournalEntry("run", _definition_entry(setup)))
            effects.append(LogEvent("info", "run_defined", shown_facts(setup.facts)))
            if choice.unknown_text:
                effects.append(LogEvent("warning", "exchange_unknown", {"exchange": choice.unknown_text}))
        run.accepted_workers.add(peer)
        worker.record_setup(setup)
        effects += run.forget_left(worker.peer)  # it is back, and the setup lists its checkpoints
        # A pipeline's worker cannot catch up before it has a stage, and dense updates are too large for it.
        if setup.stages > 1 or (choice.is_auto and not choice.is_sparse):
            worker.mark_caught_up()
        effects += self._checkpoints.journal_confirmed() + self._checkpoints.replan_if_missing(worker)
        return effects + (self._introduce(worker, now_s) if worker.is_addressable else [])

    def _other_names(self, worker: Worker) -> list[str]:
        """Return the names of the other workers that have an accepted setup, and of the other members."""
        names = {member.peer: member.name for member in self._run.member_list}
        names |= {w.peer: w.name for w in self._run.workers.values() if w.setup is not None}
        return [name for peer, name in names.items() if peer != worker.peer]

    def _with_later_facts(self, setup: m.Setup) -> m.Setup | None:
        """Return the definition, extended with this worker's values for its missing `LATER_FACTS`.

        A definition journalled by an earlier version lacks these facts; the first worker that returns with a
        checkpoint adds them.  The worker's base is compared with the checkpoint's when the checkpoint is
        loaded: before the worker joins or, in a pipeline, when it receives a stage.

        Returns None if no fact is missing or this worker may not add any.
        """
        run, has_checkpoint = self._run, setup.checkpoint is not None or setup.stage_checkpoints
        if run.definition is None or not has_checkpoint:
            return None
        known = dict(run.definition.facts)
        added = [fact for fact in setup.facts if fact[0] in m.LATER_FACTS and fact[0] not in known]
        if not added or (m.BASE_FACT, "any") in added:
            return None
        if any(worker.setup is not None for worker in run.workers.values()):
            return None
        return replace(run.definition, facts=(*run.definition.facts, *added))

    def _incompatibility(
        self, reference: m.Setup | None, setup: m.Setup, others: list[str]
    ) -> m.Refused | None:
        """Return the refusal of the setup; None if it fits the definition.

        Args:
            others: the names of the other workers with the run's setup.
        """
        if reference is None:
            reference = setup
            try:
                data_ledger.validate(setup.ledger)
                check_setup(setup)
            except ConfigError as error:
                return m.Refused("ledger", error.reason, error.remedy)
        if differing := setup_differences(reference, setup):
            reason = "this worker's training setup differs from the run's: " + "; ".join(differing)
            anew = _how_to_define_anew([] if self._run.has_committed else others)
            return m.Refused("different-run", reason, f"{_remedy(reference, setup)}; {anew}")
        # More workers may have joined before the run was defined.
        if full := _fullness(len(others), reference.ledger):
            return full
        own = setup.checkpoint
        if own is not None and (
            own.ledger.step != own.applied + 1
            or not data_ledger.is_sound_when_released(reference.ledger, own.ledger)
        ):
            reason = f"the ledger in the checkpoint of step {own.applied + 1} is inconsistent"
            return m.Refused("checkpoint", reason, "move this worker's checkpoints to another folder")
        if setup.batch_size < 1 and setup.global_batch_size is None:
            reason = f"batch_size is {setup.batch_size}; it must be at least 1"
            return m.Refused("batch-size", reason, "pass a batch_size of at least 1 to grid.batches")
        if any(is_impossible(checkpoint, reference) for checkpoint in setup.stage_checkpoints):
            reason = "a checkpoint has a stage that does not exist in the run, or an inconsistent ledger"
            return m.Refused("checkpoint", reason, "move this worker's checkpoints to another folder")
        return None

    def _base_origins(self, worker: Worker, setup: m.Setup) -> str:
        """Return where this worker and the others loaded their bases from, if the bases differ and the
        origins were reported."""
        run = self._run
        defined = dict(run.definition.facts) if run.definition is not None else {}
        if m.BASE_FACT not in defined or defined[m.BASE_FACT] == dict(setup.facts).get(m.BASE_FACT):
            return ""
        others = {other.info.get(m.BASE_ORIGIN, "") for other in run.workers.values() if other.setup}
        here, there = worker.info.get(m.BASE_ORIGIN, ""), ", ".join(sorted(others - {""}))
        known = [f"{origin} {where}" for origin, where in ((here, "here"), (there, "in the run")) if origin]
        return f"; the base was loaded from {' and '.join(known)}" if known else ""

    def handle_dial_back_result(self, peer: m.PeerId, address: str, now_s: float) -> list[Effect]:
        """Record how others can reach a worker, and introduce it to them if its setup is known."""
        worker = self._run.workers.get(peer)
        if worker is None or not (effects := self._addresses.on_dial_back_result(worker, address)):
            return []
        return effects + (self._introduce(worker, now_s) if worker.setup is not None else [])

    def _introduce(self, worker: Worker, now_s: float) -> list[Effect]:
        self._planner.reorder_limits.record_introduction(worker.peer, now_s)
        worker.begin_probing(now_s + self._run.limits.probe_s)
        # Workers that are still measuring are included, so that each pair of workers that join together is
        # measured.  The latest worker comes first, so that newcomers do not all start with the same one.
        others = [w for w in self._run.workers.values() if w.is_introduced and w is not worker]
        others.sort(key=lambda other: -other.probe_deadline_s)
        return self._addresses.introduce(worker.peer, [other.peer for other in others[:MAX_PROBES]])


def _fullness(count: int, spec: m.LedgerSpec | None) -> m.Refused | None:
    """Return the refusal of another worker; None if the run is not full.

    Args:
        count: the number of other workers.
        spec: see `max_workers`.
    """
    if count < (most := max_workers(spec)):
        return None
    reason = f"the run has {count} workers; it can have at most {most}"
    return m.Refused("full", reason, "try again when a worker has left")


def _how_to_define_anew(others: list[str]) -> str:
    """Return the remedy for defining the run with another setup.

    Args:
        others: the workers that would have to leave before the first step; empty if a step was committed.
    """
    if not others:
        return (
            "to train the run's model with another setup, load it in a run with another name in run.toml "
            "(see docs/operations.md)"
        )
    return (
        f"if the setup of {list_first(others, MAX_NAMES)} is the wrong one, stop or kick "
        f"{'that worker' if len(others) == 1 else 'these workers'}: until the first step is committed, the "
        "next worker then defines the run"
    )


def _remedy(reference: m.Setup, setup: m.Setup) -> str:
    remedy = "start every worker with the same script, data and options"
    run_facts, facts = dict(reference.facts), dict(setup.facts)
    run, here = run_facts.get(m.BASE_FACT), facts.get(m.BASE_FACT)
    if run != here and "any" in (run, here):
        return f"{remedy}; base= must be the same on all of them"
    if any(name in facts and name not in run_facts for name in m.LATER_FACTS):
        return (
            f"{remedy}; if the run was started with an earlier version, a worker with one of its checkpoints "
            "must join first"
        )
    differing = [name for name in run_facts if facts.get(name) != run_facts[name]]
    if differing == [m.GROUPS_FACT]:
        return f"{remedy}; list the optimizer's parameters in the same order on all of them: a set has none"
    if differing == ["data"]:
        return f"{remedy}; a script that draws or shuffles its data must seed it equally on all of them"
    if differing == ["optimizer"]:
        return f"{remedy}; to change the learning rate during the run, set it in the loop, by grid.step"
    if run == here:
        return remedy
    return (
        "load the same base model as the other workers, that is, the same files in the same dtype; if the "
        "script draws frozen parameters at random, name them in send_frozen=, or save them once and load the "
        "same file on all workers (a seed does not suffice: processors draw different numbers from it); to "
        'train with differently quantized bases, pass base="any" on all workers'
    )


def _definition_entry(setup: m.Setup) -> dict[str, Any]:
    """Return the definition's journal entry, which `journal_recovery.recover_run` reads."""
    return {
        "facts": dict(setup.facts),
        "ledger": spec_entry(setup.ledger),
        "global_batch_size": setup.global_batch_size,
        "stages": setup.stages,
        "model": asdict(setup.model) if setup.model is not None else None,
    }
