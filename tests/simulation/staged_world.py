"""A model in stages on the virtual network: the real cores, and toy trainers of one stage each.

A step, as rank 2 of 3 x 2 sees it:
    rank 0 --activation--> rank 2 --activation--> rank 4         the positions of the samples, then
    rank 0 <--gradient---- rank 2 <--gradient---- rank 4         sums of them, one from each stage;
                           rank 2 <--share------> rank 3         replicas add up their sums;
                           <--digest-----> all others     one digest of all stages is voted on

The state of a layer is a number; a sample adds to it what its position and the layer determine, so that each
one that is lost or counted twice is detected.  A stage is a range of layers that may change.  Checkpoints go
to a worker's own disk and to that of the next stage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import (
    BufferEffect,
    CollectiveComplete,
    CollectiveEffect,
    Provenance,
    SendTo,
    StoreFromRank,
    check_expected,
)
from gridtrain.core.group import member_events as ev
from gridtrain.core.group.rank_layout import RankAssignment, RankLayout
from gridtrain_coordinator.run import events as cio
from simulation.commit_coverage import open_round
from simulation.world import SimWorker, World
from simulation.world import WorkerDisk as OneDisk

SAMPLES, EPOCHS = 60, 2
ACTIVATION, GRADIENT, SHARE, DIGEST = range(4)
MAX_STORED_STEPS = 2

State = tuple[int, ...]
"""State of a stage, a number for each of its layers."""

SimCheckpoints = dict[m.CheckpointInfo, State]
"""Checkpoints, and the state of each."""


def layer_weight(position: int, layer: int) -> int:
    """What a sample adds to the state of a layer."""
    return (position * 7919 + layer * 104729) % 1009 + 1


def model_of(sizes: Sequence[int], *cuts: int) -> m.StagedModel:
    """Layers of these sizes in bytes; a worker stores each twice, with its gradients."""
    return m.StagedModel(cuts, tuple(m.LayerCosts(size, size) for size in sizes), copies=1.0)


def random_model(random: Random, stages: int) -> tuple[m.StagedModel, int]:
    """A model in so many stages, and its size in bytes without gradients."""
    sizes = [random.randint(1, 9) for _ in range(random.randint(stages, 2 * stages + 2))]
    cuts = sorted(random.sample(range(1, len(sizes)), stages - 1))
    return model_of(sizes, 0, *cuts, len(sizes)), sum(sizes)


def setup_of(
    stages: int, model: m.StagedModel | None = None, *, batch: int | None = None, epochs: int = EPOCHS
) -> m.Setup:
    spec = m.LedgerSpec(SAMPLES, 1, epochs=epochs)
    return m.Setup((("kind", "pipeline"),), spec, 3, batch, stages=stages, model=model)


def _everyone(rank: int, world_size: int, cuts: tuple[int, ...] = ()) -> frozenset[int]:
    """Digests go to all, so each needs an edge to all."""
    return frozenset(range(world_size)) - {rank}


class PipelineStep:
    """One step as rank `rank` sees it; a `gridtrain.core.collectives.collective.Collective`.

    A payload is stored when it arrives, and every payload that it completes is sent immediately.
    """

    def __init__(self, rank: int, layout: RankLayout, flags: int) -> None:
        self._rank, self._layout, self._flags = rank, layout, flags
        self._before, self._after = (
            _known(layout.previous_stage_rank(rank)),
            _known(layout.next_stage_rank(rank)),
        )
        self._group = frozenset(layout.stage_ranks(layout.stage_of(rank))) - {rank}
        self._everyone = frozenset(range(layout.world_size)) - {rank}
        self._due: dict[int, set[int]] = {
            ACTIVATION: set(self._before),
            GRADIENT: set(self._after),
            SHARE: set(self._group),
            DIGEST: set(self._everyone),
        }
        self._sent: set[int] = set()
        self.complete = False

    def start(self) -> list[CollectiveEffect]:
        return self._go_on()

    def handle(self, from_rank: int, slot: m.PayloadSlot, flags: int, payload: Any) -> list[CollectiveEffect]:
        kind = slot.hop
        due = (from_rank, _slot_of(kind)) if from_rank in self._due.get(kind, ()) else None
        check_expected(f"pipeline, rank {self._rank}", from_rank, slot, due, "no payload")
        self._due[kind].discard(from_rank)
        self._flags |= flags
        source = Provenance(from_rank, 1, self._layout.world_size, roundings=0)
        return [StoreFromRank(from_rank, payload, source), *self._go_on()]

    def waiting_for(self) -> frozenset[int]:
        return frozenset(rank for ranks in self._due.values() for rank in ranks)

    def _go_on(self) -> list[CollectiveEffect]:
        effects: list[CollectiveEffect] = []
        here = not self._due[ACTIVATION]
        back = here and not self._due[GRADIENT]
        shared = back and not self._due[SHARE]
        for kind, possible, to in (
            (ACTIVATION, here, self._after),
            (GRADIENT, back, self._before),
            (SHARE, back, self._group),
            (DIGEST, shared, self._everyone),
        ):
            if possible and kind not in self._sent:
                self._sent.add(kind)
                effects += [SendTo(rank, _slot_of(kind), self._flags) for rank in sorted(to)]
        if shared and not self._due[DIGEST] and not self.complete:
            self.complete = True
            effects.append(CollectiveComplete(self._flags))
        return effects


def _known(rank: int | None) -> frozenset[int]:
    return frozenset() if rank is None else frozenset({rank})


def _slot_of(kind: int) -> m.PayloadSlot:
    return m.PayloadSlot(m.CollectivePhase.ALL_GATHER, kind)


class StageStateBuffer:
    """The values of one attempt."""

    def __init__(self, assignment: RankAssignment, state: State, positions: Sequence[int]) -> None:
        self.placement, self.state = assignment, state
        self.positions = tuple(positions)  # in the first stage; others receive them from their neighbour
        self.shares: dict[int, State] = {}
        self.digests: dict[int, str] = {}

    def make_collective(self, rank: int, world_size: int, flags: int) -> PipelineStep:
        return PipelineStep(rank, self.placement.layout, flags)

    def apply(self, effect: BufferEffect) -> None:
        assert isinstance(effect, StoreFromRank)
        kind, value = json.loads(effect.payload)
        if kind == ACTIVATION:
            self.positions = tuple(value)
        elif kind == GRADIENT:
            assert tuple(value) == self.positions, "received the gradient of other samples"
        elif kind == SHARE:
            self.shares[effect.rank] = tuple(value)
        else:
            self.digests[effect.rank] = value

    def payload(self, slot: m.PayloadSlot) -> bytes:
        kind = slot.hop
        value: Any = self.positions
        if kind == SHARE:
            value = self._own_share()
        elif kind == DIGEST:
            value = self._own_digest()
        return json.dumps([kind, value]).encode()

    def compute_digest(self) -> bytes:
        """Digest of all stages; if replicas of a stage differ, one that no other rank has, so all abort."""
        digests = {**self.digests, self.placement.rank: self._own_digest()}
        for stage in range(self.placement.stages):
            if len({digests[rank] for rank in self.placement.layout.stage_ranks(stage)}) > 1:
                return self.placement.own_id
        return hashlib.blake2b(json.dumps(sorted(digests.items())).encode(), digest_size=16).digest()

    @property
    def after(self) -> State:
        return tuple(map(sum, zip(self.state, self._own_share(), *self.shares.values(), strict=True)))

    def _own_share(self) -> State:
        layers = range(self.placement.layers.start, self.placement.layers.stop)
        return tuple(sum(layer_weight(position, layer) for position in self.positions) for layer in layers)

    def _own_digest(self) -> str:
        return f"{self.placement.stage} {self.after}"


class StageTrainer:
    """Trainer of the stage of its worker's rank."""

    def __init__(self) -> None:
        self.layers = m.Span(0, 0)
        self.state: State = ()

    def begin(self, layers: m.Span) -> None:
        """Set the state of step 0."""
        self.layers, self.state = layers, (0,) * (layers.stop - layers.start)

    def prepare(
        self, round_id: m.RoundId, assignment: RankAssignment, spans: Sequence[m.Span], skip: bool
    ) -> dict[m.Channel, Any]:
        assert self.layers == assignment.layers, f"holds {self.layers}, is assigned {assignment.layers}"
        positions = [position for span in spans for position in range(span.start, span.stop)]
        return {m.Channel(): StageStateBuffer(assignment, self.state, positions)}

    def commit(self, buffers: dict[m.Channel, Any], skip: bool) -> None:
        if not skip:
            self.state = buffers[m.Channel()].after

    def capture(self) -> Any:
        return self.layers, self.state

    def restore(self, state: Any) -> None:
        self.layers, self.state = state

    def clear_residual(self) -> None:
        pass

    def take_residual(self) -> Any:
        return b""

    def add_residual(self, residual: Any) -> None: ...


class StagedWorker(SimWorker):
    """As `SimWorker`; it stores checkpoints of its own stage and of the previous one."""

    trainer: StageTrainer

    def __init__(self, world: StagedWorld, peer: m.PeerId, setup: m.Setup, disk: SimCheckpoints) -> None:
        self.trainer = StageTrainer()
        memory_bytes = world.memory_bytes() if setup.model is not None else 0
        mine = replace(setup, stage_checkpoints=tuple(disk), memory_bytes=memory_bytes)
        super().__init__(world, peer, self.trainer, mine)
        self.staged, self.memory_bytes = world, memory_bytes
        self.stored_checkpoints = disk
        self._to_load: ev.LoadCheckpoints | None = None
        self._to_keep: m.CheckpointInfo | None = None
        self.has_returned = False

    def _run_core(self, event: ev.MemberEvent | None) -> list[ev.MemberEffect]:
        effects = super()._run_core(event)
        assignment = self.core.rank_assignment
        if (
            assignment is not None
            and self.core.is_synced
            and self.core.applied < 0
            and self.trainer.layers != assignment.layers
        ):
            self.trainer.begin(assignment.layers)
        return effects

    def _execute_one(self, effect: ev.MemberEffect) -> list[ev.MemberEffect]:
        match effect:
            case ev.SendState(peer, term, generation, _, m.CheckpointInfo() as checkpoint):
                if checkpoint in self.stored_checkpoints:
                    state = checkpoint.layers, self.stored_checkpoints[checkpoint]
                    self.world.send(self.peer, peer, m.StateBlock(term, generation, 0, 1, state))
                return []
            case ev.LoadCheckpoints():
                self._to_load = effect
                return []
            case ev.SaveCheckpoint(checkpoint):
                self._to_keep = checkpoint
                return []
            case ev.SendCheckpoint(peer, term, generation, checkpoint):
                if checkpoint in self.stored_checkpoints:
                    block = m.CheckpointBlock(
                        term, generation, checkpoint, 0, 1, self.stored_checkpoints[checkpoint]
                    )
                    self.world.send(self.peer, peer, block)
                return []
            case ev.StoreCheckpointBlock(_, block):
                self.staged.copies += 1
                written_s = self.world.random.uniform(0.0, 0.1)
                self.world.later(
                    written_s, self.peer, partial(self.store_checkpoint, block.checkpoint, block.payload)
                )
                return []
            case ev.DiscardCheckpoints(after):
                for checkpoint in [
                    checkpoint for checkpoint in self.stored_checkpoints if checkpoint.applied > after
                ]:
                    del self.stored_checkpoints[checkpoint]
                return []
            case _:
                return super()._execute_one(effect)

    def _go_on(self) -> None:
        free = self.alive and not self._computing and not self._frozen
        if self._to_keep is not None and free:
            checkpoint, self._to_keep = self._to_keep, None
            if (checkpoint.layers, checkpoint.applied) == (self.trainer.layers, self.core.applied):
                state = self.trainer.state
                self.world.later(
                    self.world.restore_s(), self.peer, lambda: self.store_checkpoint(checkpoint, state)
                )
        if self._to_load is not None and self.alive and not self._computing and not self._frozen:
            self._computing, todo, self._to_load = True, self._to_load, None
            self.world.later(self.world.restore_s(), self.peer, partial(self._loaded, todo))
            return
        super()._go_on()

    def _loaded(self, todo: ev.LoadCheckpoints) -> None:
        self._computing = False
        self._batch_step = -1
        if not all(checkpoint in self.stored_checkpoints for checkpoint in todo.checkpoints):
            self.handle(ev.StageCheckpointsChanged(tuple(self.stored_checkpoints)))
            return
        self.staged.reloads += 1
        self.staged.merges += len(todo.checkpoints) > 1
        known: dict[int, int] = {}
        for checkpoint in todo.checkpoints:
            known.update(
                zip(
                    range(checkpoint.layers.start, checkpoint.layers.stop),
                    self.stored_checkpoints[checkpoint],
                    strict=True,
                )
            )
        layers = range(todo.layers.start, todo.layers.stop)
        self.trainer.restore((todo.layers, tuple(known[layer] for layer in layers)))
        self.handle(ev.StateLoaded(todo.term, todo.generation))

    def _resolve(self, round_id: m.RoundId, committed: bool, skip: bool) -> None:
        super()._resolve(round_id, committed, skip)
        assignment = self.core.rank_assignment
        if not committed or assignment is None or round_id.step % self.world.checkpoint_every:
            return
        checkpoint = m.CheckpointInfo(
            self.core.applied, self.core.history, self.core.replica_state.ledger, self.trainer.layers
        )
        written_s = self.world.random.uniform(0.0, 0.1)
        self.world.later(written_s, self.peer, partial(self.store_checkpoint, checkpoint, self.trainer.state))

    def store_checkpoint(self, checkpoint: m.CheckpointInfo, state: State) -> None:
        self.stored_checkpoints[checkpoint] = state
        for layers in {known.layers for known in self.stored_checkpoints}:
            of_stage = sorted(
                (k for k in self.stored_checkpoints if k.layers == layers), key=lambda k: k.applied
            )
            for old in of_stage[:-MAX_STORED_STEPS]:
                del self.stored_checkpoints[old]
        # A worker that has had several stages has old checkpoints of all: the oldest are deleted.
        for old in sorted(self.stored_checkpoints, key=lambda k: k.applied)[: -m.MAX_STAGE_CHECKPOINTS]:
            del self.stored_checkpoints[old]
        if self.alive:
            self.handle(ev.StageCheckpointsChanged(tuple(self.stored_checkpoints)))


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """How long it took until all living members knew of a death."""

    peer: m.PeerId
    took_s: float


class StagedWorld(World):
    """As `World`, of a model in stages; a worker's disk holds its stored checkpoints.

    Attributes:
        notices: of each death that was watched (`watch`).
        lost_steps: of each rollback, (from step, to step); from None: unknown.
        pauses, reloads, copies: counters; `merges`: stages assembled from several checkpoints.
        stage_bounds: the partition of each generation, in order.
    """

    def __init__(
        self,
        seed: int,
        setup: m.Setup,
        *,
        memory: Sequence[int] = (0,),
        **more: Any,
    ) -> None:
        self.notices: list[FailureNotice] = []
        self.pauses = 0
        self.reloads = 0
        self.copies = 0
        self.merges = 0
        self.stage_bounds: list[tuple[int, ...]] = []
        self.setup = setup
        self._memory: tuple[int, ...] = tuple(memory)
        self._next_checkpoints: SimCheckpoints = {}
        self.lost_steps: list[tuple[int | None, int]] = []
        more = {"min_workers": 1, "compute_s": (0.001, 0.1), "checkpoint_every": 4, **more}
        super().__init__(seed, StageTrainer, _everyone, setup, **more)

    def join_with(self, disk: SimCheckpoints) -> SimWorker:
        """Start a worker with a new name and these stored checkpoints."""
        self._next_checkpoints = disk
        return self.join()

    def _disk_of(self, old: SimWorker) -> OneDisk | None:
        assert isinstance(old, StagedWorker)
        self._next_checkpoints = old.stored_checkpoints  # the state from which a stage's worker continues
        return None

    def memory_bytes(self) -> int:
        """Memory that a worker declares; 0: none."""
        return self.random.choice(self._memory) if len(self._memory) > 1 else self._memory[0]

    def make_worker(self, peer: m.PeerId, trainer: Any, setup: m.Setup) -> SimWorker:
        disk, self._next_checkpoints = dict(self._next_checkpoints), {}
        return StagedWorker(self, peer, setup, disk)

    def watch(self, peer: m.PeerId) -> None:
        """A member has just died: note when the last of the others knows that the open round is over."""
        others = [
            w for w in self.alive if w.core.phase is ev.MemberPhase.RUNNING and open_round(w.core) is not None
        ]
        opened = {w.peer: open_round(w.core) for w in others}
        died_s = self.now_s

        def look() -> None:
            waiting = [
                w for w in others
                if w.alive and w.core.phase is ev.MemberPhase.RUNNING and open_round(w.core) == opened[w.peer]
            ]  # fmt: skip
            if waiting:
                self.at(self.now_s + 0.01, look)
            else:
                self.notices.append(FailureNotice(peer, self.now_s - died_s))

        look()

    def _execute_coordinator(self, effects: list[cio.Effect], event: cio.Event | None) -> None:
        for effect in effects:
            match effect:
                case cio.LogEvent("error", "paused"):
                    self.pauses += 1
                case cio.LogEvent("error", "rollback", fields):
                    known = None if fields["at_least"] else fields["from"]
                    self.lost_steps.append((known, fields["to"]))
                case cio.LogEvent("info", "generation", _):
                    self.stage_bounds.append(self.coordinator.run.partition.bounds)
                case cio.LogEvent(_, "restored", fields):
                    self.lost_steps.append((None, fields["step"]))
        super()._execute_coordinator(effects, event)
