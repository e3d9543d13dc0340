"""A model in stages on the virtual network: the real cores, and toy trainers that hold one stage each.

Decides nothing that the product decides (see `sim.world`).  A step, as rank 2 of 3 x 2 sees it:

    rank 0 --activation--> rank 2 --activation--> rank 4         which samples these are, then
    rank 0 <--gradient---- rank 2 <--gradient---- rank 4         sums of them, one from each stage;
                           rank 2 <--share------> rank 3         replicas add theirs up;
                           rank 2 <--seal-------> all others     one digest of all stages is voted on

A block's state is a number; a sample adds to it what its position and the block determine, so that each one
that is lost or counted twice shows.  A stage is some blocks, and which these are may change.  Checkpoints go
to a worker's own disk and to that of the next stage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gridtrain.core import messages as m
from gridtrain.core.collectives.collective import (
    BufferEffect,
    CollectiveComplete,
    CollectiveEffect,
    PayloadReceived,
    Provenance,
    SendTo,
    StoreFromRank,
    check_expected,
)
from gridtrain.core.commit.attempts import RankAssignment
from gridtrain.core.group import member_events as io
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain_coordinator.run import events as cio
from simulation.world import SimWorker, World
from simulation.world import WorkerDisk as OneDisk

ACTIVATION, GRADIENT, SHARE, SEAL = range(4)
MOST_STEPS_KEPT = 2

State = tuple[int, ...]
"""Of a stage: of each of its blocks."""

SimCheckpoints = dict[m.CheckpointInfo, State]
"""Checkpoints, and the state of each."""


def layer_weight(position: int, block: int) -> int:
    """What a sample adds to the state of a block."""
    return (position * 7919 + block * 104729) % 1009 + 1


class PipelineStep:
    """One step as rank `rank` sees it.  See `gridtrain.core.collectives.collective.Collective`.

    What arrives is stored whenever it comes, and what it makes possible is sent at once.
    """

    def __init__(self, rank: int, seats: RankLayout, skip: bool) -> None:
        self._rank, self._seats, self._any_skip = rank, seats, skip
        self._before, self._after = (
            _known(seats.previous_stage_rank(rank)),
            _known(seats.next_stage_rank(rank)),
        )
        self._group = frozenset(seats.stage_ranks(seats.stage_of(rank))) - {rank}
        self._everyone = frozenset(range(seats.world_size)) - {rank}
        self._due: dict[int, set[int]] = {
            ACTIVATION: set(self._before),
            GRADIENT: set(self._after),
            SHARE: set(self._group),
            SEAL: set(self._everyone),
        }
        self._sent: set[int] = set()
        self.complete = False

    def start(self, now_s: float) -> list[CollectiveEffect]:
        return self._go_on()

    def handle(self, event: PayloadReceived, now_s: float) -> list[CollectiveEffect]:
        kind, rank = event.slot.hop, event.from_rank
        place = _place_of(kind)
        due = (rank, place) if rank in self._due.get(kind, ()) else None
        check_expected(f"pipeline, rank {self._rank}", event, due)
        self._due[kind].discard(rank)
        self._any_skip |= event.skip
        source = Provenance(rank, 1, self._seats.world_size, roundings=0)
        return [StoreFromRank(rank, event.payload, source), *self._go_on()]

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
            (SEAL, shared, self._everyone),
        ):
            if possible and kind not in self._sent:
                self._sent.add(kind)
                effects += [SendTo(rank, _place_of(kind), self._any_skip) for rank in sorted(to)]
        if shared and not self._due[SEAL] and not self.complete:
            self.complete = True
            effects.append(CollectiveComplete(self._any_skip))
        return effects


def _known(rank: int | None) -> frozenset[int]:
    return frozenset() if rank is None else frozenset({rank})


def _place_of(kind: int) -> m.PayloadSlot:
    return m.PayloadSlot(m.CollectivePhase.ALL_GATHER, kind)


class StageStateBuffer:
    """The numbers of one attempt."""

    def __init__(self, seat: RankAssignment, state: State, positions: Sequence[int]) -> None:
        self.placement, self.state = seat, state
        self.positions = tuple(positions)  # of the first stage; others are told by their neighbour
        self.shares: dict[int, State] = {}
        self.digests: dict[int, str] = {}

    def make_collective(self, rank: int, world_size: int, skip: bool) -> PipelineStep:
        return PipelineStep(rank, self.placement.layout, skip)

    def apply(self, effect: BufferEffect) -> None:
        assert isinstance(effect, StoreFromRank)
        kind, value = json.loads(effect.payload)
        if kind == ACTIVATION:
            self.positions = tuple(value)
        elif kind == GRADIENT:
            assert tuple(value) == self.positions, "the gradient of other samples came back"
        elif kind == SHARE:
            self.shares[effect.rank] = tuple(value)
        else:
            self.digests[effect.rank] = value

    def payload(self, place: m.PayloadSlot) -> bytes:
        kind = place.hop
        value: Any = self.positions
        if kind == SHARE:
            value = self._own_share()
        elif kind == SEAL:
            value = self._own_digest()
        return json.dumps([kind, value]).encode()

    def compute_digest(self) -> bytes:
        """All stages' digests; where replicas of one stage differ it is nobody else's, so that all abort."""
        seals = {**self.digests, self.placement.rank: self._own_digest()}
        for stage in range(self.placement.stages):
            if len({seals[rank] for rank in self.placement.layout.stage_ranks(stage)}) > 1:
                return self.placement.own_id
        return hashlib.blake2b(json.dumps(sorted(seals.items())).encode(), digest_size=16).digest()

    @property
    def after(self) -> State:
        return tuple(map(sum, zip(self.state, self._own_share(), *self.shares.values(), strict=True)))

    def _own_share(self) -> State:
        blocks = range(self.placement.layers.start, self.placement.layers.stop)
        return tuple(sum(layer_weight(position, block) for position in self.positions) for block in blocks)

    def _own_digest(self) -> str:
        return f"{self.placement.stage} {self.after}"


class StageTrainer:
    """Holds one stage; which one the seat says."""

    def __init__(self) -> None:
        self.blocks = m.Span(0, 0)
        self.state: State = ()

    def begin(self, blocks: m.Span) -> None:
        """As at step 0."""
        self.blocks, self.state = blocks, (0,) * (blocks.stop - blocks.start)

    def prepare(
        self, round_id: m.RoundId, seat: RankAssignment, spans: Sequence[m.Span], skip: bool
    ) -> dict[m.Channel, Any]:
        assert self.blocks == seat.layers, f"holds {self.blocks}, sits at {seat.layers}"
        positions = [position for span in spans for position in range(span.start, span.stop)]
        return {m.Channel(): StageStateBuffer(seat, self.state, positions)}

    def commit(self, workspaces: dict[m.Channel, Any], skip: bool) -> None:
        if not skip:
            self.state = workspaces[m.Channel()].after

    def capture(self) -> Any:
        return self.blocks, self.state

    def restore(self, state: Any) -> None:
        self.blocks, self.state = state

    def take_residual(self) -> Any:
        return b""

    def add_residual(self, residual: Any) -> None: ...


class StagedWorker(SimWorker):
    """As `SimWorker`; it keeps checkpoints of its own stage and of the one before."""

    trainer: StageTrainer

    def __init__(self, world: StagedWorld, peer: m.PeerId, setup: m.Setup, shelf: SimCheckpoints) -> None:
        self.trainer = StageTrainer()
        memory_bytes = world.memory_bytes() if setup.model is not None else 0
        mine = replace(setup, stage_checkpoints=tuple(shelf), memory_bytes=memory_bytes)
        super().__init__(world, peer, self.trainer, mine)
        self.staged, self.memory_bytes = world, memory_bytes
        self.stored_checkpoints = shelf
        self._to_load: io.LoadCheckpoints | None = None
        self._to_keep: m.CheckpointInfo | None = None
        self.has_returned = False

    def _run_core(self, event: io.MemberEvent | None) -> list[io.MemberEffect]:
        effects = super()._run_core(event)
        seat = self.core.rank_assignment
        if (
            seat is not None
            and self.core.is_synced
            and self.core.applied < 0
            and self.trainer.blocks != seat.layers
        ):
            self.trainer.begin(seat.layers)
        return effects

    def _execute_one(self, effect: io.MemberEffect) -> list[io.MemberEffect]:
        match effect:
            case io.SendState(peer, term, generation, _, m.CheckpointInfo() as held):
                if held in self.stored_checkpoints:
                    state = held.layers, self.stored_checkpoints[held]
                    self.world.send(self.peer, peer, m.StateBlock(term, generation, 0, 1, state))
                return []
            case io.LoadCheckpoints():
                self._to_load = effect
                return []
            case io.SaveCheckpoint(held):
                self._to_keep = held
                return []
            case io.SendCheckpoint(peer, term, generation, held):
                if held in self.stored_checkpoints:
                    block = m.CheckpointBlock(term, generation, held, 0, 1, self.stored_checkpoints[held])
                    self.world.send(self.peer, peer, block)
                return []
            case io.StoreCheckpointBlock(_, block):
                self.staged.copies += 1
                written_s = self.world.random.uniform(0.0, 0.1)
                self.world.later(
                    written_s, self.peer, partial(self.store_checkpoint, block.checkpoint, block.payload)
                )
                return []
            case io.DiscardCheckpoints(after):
                for held in [held for held in self.stored_checkpoints if held.applied > after]:
                    del self.stored_checkpoints[held]
                return []
            case _:
                return super()._execute_one(effect)

    def _go_on(self) -> None:
        free = self.alive and not self._computing and not self._frozen
        if self._to_keep is not None and free:
            held, self._to_keep = self._to_keep, None
            if (held.layers, held.applied) == (self.trainer.blocks, self.core.applied):
                state = self.trainer.state
                self.world.later(
                    self.world.restore_s(), self.peer, lambda: self.store_checkpoint(held, state)
                )
        if self._to_load is not None and self.alive and not self._computing and not self._frozen:
            self._computing, todo, self._to_load = True, self._to_load, None
            self.world.later(self.world.restore_s(), self.peer, partial(self._loaded, todo))
            return
        super()._go_on()

    def _loaded(self, todo: io.LoadCheckpoints) -> None:
        self._computing = False
        self._batch_step = -1
        if not all(held in self.stored_checkpoints for held in todo.checkpoints):
            self.handle(io.StageCheckpointsChanged(tuple(self.stored_checkpoints)))
            return
        self.staged.reloads += 1
        self.staged.merges += len(todo.checkpoints) > 1
        known: dict[int, int] = {}
        for held in todo.checkpoints:
            known.update(
                zip(range(held.layers.start, held.layers.stop), self.stored_checkpoints[held], strict=True)
            )
        blocks = range(todo.layers.start, todo.layers.stop)
        self.trainer.restore((todo.layers, tuple(known[block] for block in blocks)))
        self.handle(io.StateLoaded(todo.term, todo.generation))

    def _resolve(self, round_id: m.RoundId, committed: bool, skip: bool) -> None:
        super()._resolve(round_id, committed, skip)
        seat = self.core.rank_assignment
        if not committed or seat is None or round_id.step % self.world.checkpoint_every:
            return
        held = m.CheckpointInfo(self.core.applied, self.core.history, self.core.ledger, self.trainer.blocks)
        written_s = self.world.random.uniform(0.0, 0.1)
        self.world.later(written_s, self.peer, partial(self.store_checkpoint, held, self.trainer.state))

    def store_checkpoint(self, held: m.CheckpointInfo, state: State) -> None:
        self.stored_checkpoints[held] = state
        for blocks in {known.layers for known in self.stored_checkpoints}:
            of_stage = sorted(
                (k for k in self.stored_checkpoints if k.layers == blocks), key=lambda k: k.applied
            )
            for old in of_stage[:-MOST_STEPS_KEPT]:
                del self.stored_checkpoints[old]
        # Whoever was moved about holds old ones of many stages: the oldest go.
        for old in sorted(self.stored_checkpoints, key=lambda k: k.applied)[: -m.MAX_STAGE_CHECKPOINTS]:
            del self.stored_checkpoints[old]
        if self.alive:
            self.handle(io.StageCheckpointsChanged(tuple(self.stored_checkpoints)))


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """How long it took until all who live knew that somebody had died."""

    peer: m.PeerId
    took_s: float


class StagedWorld(World):
    """As `World`, of a model in stages; a `disk` of a worker that joins is what it keeps.

    Attributes:
        notices: of each death that was watched (`watch`).
        lost_steps: of each rollback, from where to where; None: nobody could say from where.
        pauses, reloads, copies: how often; `merges`: a stage was put together from several checkpoints.
        cuts: of each generation of a model in stages, as they were made.
    """

    def __init__(
        self,
        seed: int,
        setup: m.Setup,
        edges: Callable[..., frozenset[int]],
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
        super().__init__(seed, StageTrainer, edges, setup, min_workers=1, **more)

    def join_with(self, shelf: SimCheckpoints) -> SimWorker:
        """A worker that starts again, with a new name but with what it had saved."""
        self._next_checkpoints = shelf
        return self.join()

    def _disk_of(self, old: SimWorker) -> OneDisk | None:
        assert isinstance(old, StagedWorker)
        self._next_checkpoints = old.stored_checkpoints  # what a stage's worker goes on from
        return None

    def memory_bytes(self) -> int:
        """That a worker declares; 0: nothing."""
        return self.random.choice(self._memory) if len(self._memory) > 1 else self._memory[0]

    def make_worker(self, peer: m.PeerId, trainer: Any, setup: m.Setup) -> SimWorker:
        shelf, self._next_checkpoints = dict(self._next_checkpoints), {}
        return StagedWorker(self, peer, setup, shelf)

    def watch(self, peer: m.PeerId) -> None:
        """A member has just died: look when the last of the others knows that the open round is over."""
        others = [
            w for w in self.alive if w.core.phase is io.MemberPhase.RUNNING and w.core.open_round is not None
        ]
        opened = {w.peer: w.core.open_round for w in others}
        died_s = self.now_s

        def look() -> None:
            waiting = [
                w for w in others
                if w.alive and w.core.phase is io.MemberPhase.RUNNING and w.core.open_round == opened[w.peer]
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
