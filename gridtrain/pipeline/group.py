"""What users hold for a model that is cut into stages: `pipe = grid.pipeline(...)`, `loss = pipe.step(...)`.

Decides what this worker's stage brings into a step and applies what the group committed, as `optim.wrapper`
does for a whole model.  Never opens a socket, never decides a commit, never holds another stage's parameters.

    round opens -> Runner: activations, gradients -> p.grad -> exchange among the stage's replicas
                                                                 |  seal of its update
                -> all S x R members: rows (seal, settings, loss, norm) -> one digest -> vote -> apply
    a member is gone, a payload is lost: everyone's line breaks -> the next attempt computes the step anew

An attempt that was aborted is computed anew from its batch, on all members: that depends on the round's id
alone, so all do alike, and seeds and batch are the same, so the gradient is.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gridtrain.config import Dense
from gridtrain.errors import ConfigError, LineBroken, LocalProtocolError, RemoteProtocolError
from gridtrain.optim import state_sync
from gridtrain.optim.averages import BufferAverage
from gridtrain.optim.checkpoint import Checkpoint, Snapshot
from gridtrain.optim.exchange import Attempt
from gridtrain.optim.export import save_model
from gridtrain.optim.flat import canonical_parameters
from gridtrain.optim.wrapper import norm_of, refuse_misfits
from gridtrain.pipeline import costing, merging
from gridtrain.pipeline.automatic import MicroBatches
from gridtrain.pipeline.checks import check_batch
from gridtrain.pipeline.handle import StageOptimizer
from gridtrain.pipeline.held import HeldStage, MakeOptimizer, Options, made
from gridtrain.pipeline.holding import Holding, state_tensors, storage_bytes
from gridtrain.pipeline.line import Expected, GroupLine
from gridtrain.pipeline.profiling import Profile
from gridtrain.pipeline.randomness import seed_of_step
from gridtrain.pipeline.runner import Outcome, share_tied_parameters
from gridtrain.pipeline.staging import StageModule, Staging
from gridtrain.pipeline.unsent import Unsent
from gridtrain.protocol import ring, schedule
from gridtrain.protocol.collective import Complete
from gridtrain.protocol.handoff import SEALS
from gridtrain.protocol.messages import Channel, Facts, Held, Span, StagedModel
from gridtrain.protocol.seats import Seats
from gridtrain.protocol.stage_costs import Layer
from gridtrain.protocol.subgroup import Subgroup, edges_within
from gridtrain.protocol.telling import neighbours as everybody
from gridtrain.protocol.telling import telling
from gridtrain.runtime.api import GroupSession
from gridtrain.runtime.handoffs import Row, SealsWorkspace
from gridtrain.runtime.opened import OpenedRound, Part
from gridtrain.runtime.picture import Picture
from gridtrain.runtime.plan import RoundOutcome, StepPlan

log = logging.getLogger("gridtrain")

Neighbours = Callable[[int, int], frozenset[int]]
Edges = Callable[..., frozenset[int]]
"""Of a rank, a world size and, where the model is cut otherwise than the run is defined, the cuts."""

AUTOMATIC = "gridtrain: micro-batches"
"""Its name among the trackers."""

UPDATE, AVERAGES = Channel(), Channel(index=1)
_SETTINGS = b"a model in stages"  # what the vote covers of the settings is in the rows, stage by stage
_NOTHING = bytes(32)


@dataclass(frozen=True, slots=True)
class _Brought:
    """What one attempt has in flight."""

    attempt: Attempt
    averages: Any
    seals: SealsWorkspace


class Pipeline(Unsent):
    """This worker's stage of the model.  Used from the thread that trains; made by `Grid.pipeline`.

    Attributes:
        skipped_steps: committed steps whose update was empty because somebody's gradient was not finite.
        last_skipped: whether the latest step was one of these, or did not count here.
        metered: set it, and `holding` counts what is kept between forward and backward, which takes its time.
        timings: seconds of the latest step: computing, waiting for other stages, and the whole.
    """

    calls_per_turn = 1
    local_calls = 0

    def __init__(
        self, staging: Staging, make: MakeOptimizer, options: Options, session: GroupSession
    ) -> None:
        self._defined = self._staging = staging
        self._make, self._options = make, options
        self._session = session
        super().__init__()
        self._failed: OpenedRound | None = None
        self._division = MicroBatches(options.micro_batches, options.stages, options.order, options.ahead)
        self._trackers: dict[str, state_sync.Stateful] = (
            {AUTOMATIC: self._division} if self._division.is_auto else {}
        )
        self.model: nn.Module = staging.whole  # on the meta device: names and shapes, no values
        self.inner = made(make, self.model.parameters())
        self._handle = StageOptimizer(self.inner)
        self._at_start: Callable[[], None] | None = None
        refuse_misfits(self.inner, options.exchange, options.clip_norm)
        self.averages = BufferAverage(self.model, options.average_buffers_every)
        self.exchange_config = options.exchange
        self.compare_every = options.compare_every
        self.skipped_steps = 0
        self.last_skipped = self.metered = False
        self._kept_bytes = self._largest = 0
        self.timings: dict[str, float] = {}

    # -- what a loop calls -------------------------------------------------------------------------

    @property
    def stage(self) -> int | None:
        """Which stage this worker holds; changes where the coordinator seats it anew.  None: it is spare."""
        picture = self._session.picture
        return self.stage_at(picture) if picture.world_size else None

    def stage_at(self, place: Picture | StepPlan) -> int:
        """That a member of a rank holds."""
        return self._seats(place).stage_of(place.rank)

    def blocks_at(self, place: Picture | StepPlan) -> Span:
        """Of the model, that a member of a rank holds."""
        return Span(*self._cut(place).bounds(self.stage_at(place)))

    def _cut(self, place: Picture | StepPlan) -> Staging:
        """As the model is cut in this generation; before there is one, as the run is defined."""
        cuts = place.cuts or self._defined.cuts
        if cuts != self._staging.cuts:
            self._staging = self._defined.at(cuts)
        return self._staging

    def _seats(self, place: Picture | StepPlan) -> Seats:
        return Seats.of(self._cut(place).stages, place.world_size)

    @property
    def micro_batches(self) -> int:
        """Into which the next step's batch is divided, if it has so many samples."""
        return self._division.number

    @property
    def module(self) -> StageModule:
        """This worker's layers, under their names in the whole model."""
        return self._now().module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of this worker's stage, whichever that is: one object, from the beginning on, for schedulers.

        Its settings must be the same on the replicas of a stage.  It is stepped by `pipe.step` alone.
        """
        return self._handle

    def step(self, inputs: Any, targets: Any = None) -> float | None:
        """One step of the whole group on this batch, from `grid.batches`.

        Args:
            inputs: samples first; the first stage computes with them, the others look at the shape.
            targets: of the loss, which the last stage computes.

        Returns:
            The mean loss over all samples of the step, on every worker; None where this batch did not count,
            as the group goes on from another one, or this worker's owner wants it elsewhere: `grid.batches`
            knows what comes next.

        Raises:
            ConfigError: inputs or targets are not this step's batch.  Nothing has been sent then, and the
                same step may be called again with the right ones.
            Exception: what the model or the loss raised; the others have been told, and repeat the step when
                this worker does, or without it.
        """
        self._end_failed()
        while True:
            begun_s = time.perf_counter()
            plan = self._session.begin()
            if plan is None:
                self.last_skipped = True
                return None
            if plan.samples:  # else a stand-in
                check_batch("inputs", inputs, plan.samples)
                check_batch("targets", targets, plan.samples)
            held = self._at(plan)
            if plan.step == 0 and held.stepped:
                self._begin_anew()
                self._division.begin_anew()
                held = self._at(plan)
            held.inner.zero_grad()
            outcome, brought = self._attempt(held, plan, inputs, targets)
            if (not outcome.committed or outcome.skip) and held.runner is not None:
                held.runner.stage.abort()  # before anybody asks for the state
            self._session.ended(outcome)
            if not outcome.committed:
                self._in_flight.ended()
            if brought is not None and not outcome.committed:
                self._refuse_fork(plan, brought.seals)
            if outcome.committed:
                assert brought is not None
                return self._apply(held, plan, outcome, brought, begun_s)

    def _end_failed(self) -> None:
        """The step is called again after the model or the loss raised something."""
        failed, self._failed = self._failed, None
        if failed is not None:
            self._session.ended(failed.end())

    @property
    def holding(self) -> Holding:
        """Bytes that this worker holds for its stage, counted; after a step that was `metered`."""
        held = self._now()
        parameters = list(held.module.parameters())
        trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        exchange = [held.flat.flat_N, *self.residual_state().values()]
        kept_inputs = held.kept_input_bytes(self._largest, self._division.number)
        return Holding(
            storage_bytes((*parameters, *held.module.buffers())),
            trained,
            storage_bytes(state_tensors(held.inner)),
            storage_bytes(exchange),
            self._kept_bytes + kept_inputs,
        )

    def track(self, **trackers: state_sync.Stateful) -> None:
        """See `Grid.track`."""
        self._trackers.update(trackers)

    # -- one attempt -------------------------------------------------------------------------------

    def _attempt(
        self, held: HeldStage, plan: StepPlan, inputs: Any, targets: Any
    ) -> tuple[RoundOutcome, _Brought | None]:
        seats = self._seats(plan)
        runner = held.prepare(self._staging, self._options, inputs)
        sizes = held.sizes(plan.samples, self._division.number)
        self._largest = max(sizes, default=0)
        line = GroupLine(seats, plan.rank, held.limit_bytes(self._largest))
        expected = list(self._expected(held.stage, len(sizes)))
        round_ = self._session.open(plan, line.parts(expected), _SETTINGS)
        line.opened(round_)
        seed = seed_of_step(self._options.seed, plan.step, seats.replica_of(plan.rank))
        try:
            self._share_tied(held, seats, line)
            meter = held.meter()
            with meter.counting() if self.metered or self._division.weighs else nullcontext():
                ran = runner.run(line, seed=seed, sizes=sizes, inputs=inputs, targets=targets)
            if self.metered:
                self._kept_bytes = max(self._kept_bytes, meter.peak_bytes)
            if self._division.weighs:
                self._division.weighed(meter.peak_bytes, self._largest, runner.stage.device)
            self._session.computed()
            self.timings = {"computing_s": ran.computed_s, "pipeline_waiting_s": ran.waited_s}
            return self._exchange(held, plan, seats, round_, ran)
        except LineBroken as broken:
            line.give_up(broken)
            return round_.end(), None
        except Exception as error:  # a user's code may raise anything, and go on
            line.abort(f"stage {held.stage}: {type(error).__name__}: {error}")
            self._failed = round_
            raise

    def _share_tied(self, held: HeldStage, seats: Seats, line: GroupLine) -> None:
        """Copies of a parameter stay one: where updates may differ, the first stage's replaces others."""
        assert held.runner is not None
        if held.tied and (not isinstance(self._options.exchange, Dense) or seats.replicas > 2):
            share_tied_parameters(held.runner.stage, held.stage, line)

    def _expected(self, stage: int, micro_batches: int) -> Expected:
        for m in range(micro_batches):
            if stage > 0:
                yield stage - 1, schedule.activations(m)
            if stage < self._staging.stages - 1:
                yield stage + 1, schedule.gradients(m)

    def _exchange(
        self, held: HeldStage, plan: StepPlan, seats: Seats, round_: OpenedRound, ran: Outcome
    ) -> tuple[RoundOutcome, _Brought]:
        """Among the stage's replicas, while other stages still compute; then all say what they hold."""
        group, replica = seats.group(held.stage), seats.replica_of(plan.rank)
        within = replace(plan, rank=replica, world_size=seats.replicas)
        held.flat.gather()
        attempt = held.exchanger.prepare_bucket(0, held.flat.flat_N, within, usable=True)
        workspaces: dict[Channel, Any] = {UPDATE: attempt.workspace}
        averages = held.averages.workspace(within)
        if averages is not None:
            workspaces[AVERAGES] = averages
        if seats.replicas == 1:
            skip = any([_alone(workspace, attempt.skip) for workspace in workspaces.values()])
        else:
            round_.add(
                {
                    channel: Part(
                        Subgroup(workspace.collective(replica, seats.replicas, attempt.skip), group),
                        workspace,
                    )
                    for channel, workspace in workspaces.items()
                }
            )
            if not round_.wait(*workspaces):
                raise LineBroken(round_.why)
            skip = any(round_.skips(channel) for channel in workspaces)
        row = self._row(held, workspaces, skip, plan, ran, round_)
        seals = SealsWorkspace(seats, plan.rank, row)
        self._in_flight.sent(attempt)
        outcome = round_.complete(SEALS, Part(telling(plan.rank, plan.world_size, skip), seals))
        return outcome, _Brought(attempt, averages, seals)

    def _row(
        self,
        held: HeldStage,
        workspaces: Mapping[Channel, Any],
        skip: bool,
        plan: StepPlan,
        ran: Outcome,
        round_: OpenedRound,
    ) -> Row:
        try:
            parts = [b"" if skip else workspace.seal() for workspace in workspaces.values()]
        except RemoteProtocolError as error:
            round_.fail(error.reason)
            raise LineBroken(error.reason) from error
        seal = _NOTHING if skip else hashlib.blake2b(b"".join(parts), digest_size=32).digest()
        norm_squared = 0.0
        if self._options.clip_norm is not None and not skip:
            norm_squared = norm_of(held.counted(_update_of(workspaces[UPDATE]))) ** 2
        loss = ran.loss * plan.weight if ran.loss is not None and plan.samples else 0.0
        figures = self._division.figures(ran, plan.samples)
        return Row(seal, state_sync.hyper_digest(held.inner), loss, norm_squared, figures)

    def _refuse_fork(self, plan: StepPlan, seals: SealsWorkspace) -> None:
        if not seals.complete or not seals.forked:
            return
        error = ConfigError(
            f"step {plan.step} cannot be committed: the optimizer of stage {self.stage} is set otherwise "
            "here than on most of its replicas",
            remedy="change its settings on all workers alike, by pipe.step's loss, which all have",
        )
        self._session.close(error.reason)
        raise error

    def _apply(
        self, held: HeldStage, plan: StepPlan, outcome: RoundOutcome, brought: _Brought, begun_s: float
    ) -> float:
        self.last_skipped = outcome.skip
        loss = brought.seals.loss
        if outcome.skip:
            self._in_flight.ended()
            self.skipped_steps += 1
        else:
            held.flat.fill(self._in_flight.commit(held.exchanger, brought.attempt))
            limit = self._options.clip_norm
            if limit is not None:
                norm = math.sqrt(brought.seals.norm_squared)
                held.flat.flat_N.mul_(min(1.0, limit / (norm + 1e-6)))
            held.flat.scatter()
            if brought.averages is not None:
                held.averages.load(brought.averages)
            self._handle.apply()
            held.stepped = True
            assert held.runner is not None
            held.runner.stage.commit()
        held.inner.zero_grad()
        self._divide_anew(plan, brought.seals)
        every = self._options.compare_every
        if every and (plan.compare or (plan.step + 1) % every == 0):
            self._session.compare(plan.step, state_sync.digest(held.module, held.inner))
        self.timings["step_s"] = time.perf_counter() - begun_s
        self._session.note({**self.timings, "stage": float(held.stage)})
        return loss

    def _divide_anew(self, plan: StepPlan, seals: SealsWorkspace) -> None:
        """The first steps show how many micro-batches are best."""
        seats = self._seats(plan)
        chosen = self._division.committed([row.figures for row in seals.rows], seats)
        if chosen is not None:
            log.info("from step %d on %s", plan.step + 1, chosen.reason)
            self._session.note({"micro_batches": float(chosen.micro_batches)})

    # -- what this worker holds ----------------------------------------------------------------------

    def _here(self) -> HeldStage:
        """The stage of this worker's seat, built where it is another one than before."""
        picture = self._session.picture
        if not picture.world_size:
            raise ConfigError(
                "which stage this worker holds is not known before the group has formed",
                remedy="ask inside of the loop over grid.batches(...)",
            )
        return self._at(picture)

    def _now(self) -> HeldStage:
        """What is in memory: others may still need it, though this worker has got another seat."""
        return self._here() if self._held is None else self._held

    def _at(self, place: Picture | StepPlan) -> HeldStage:
        """As `_here`, of the turn that is under way: by now the group may have another generation."""
        staging, stage = self._cut(place), self.stage_at(place)
        if self._held is None or self._held.blocks != Span(*staging.bounds(stage)):
            self._at_start = self._at_start or self.remember()
            self._lose()
            self._drop()  # its memory goes first
            self._held = HeldStage(stage, staging, self._make, self._options)
            self._handle.hold(self._held.inner)
            self._session.resize_residual(self.residual_size)
        self._held.place(staging, stage)
        return self._held

    def _drop(self) -> None:
        """Nothing of a stage is held any more, but for its optimizer's settings."""
        self._handle.hold(self.inner)
        self._in_flight.forgotten()
        self._held = None

    def _begin_anew(self) -> None:
        """At step 0 once more, as nobody holds a later state of all stages."""
        assert self._at_start is not None
        self._drop()
        self._at_start()

    def remember(self) -> Callable[[], None]:
        """See `set_back.Trained`: the optimizer's settings and the trackers, whichever stage is held."""
        settings = self._handle.settings()
        trackers = {name: copy.deepcopy(item.state_dict()) for name, item in self._trackers.items()}

        def put_back() -> None:
            self._handle.load_settings(settings)
            for name, state in trackers.items():
                self._trackers[name].load_state_dict(copy.deepcopy(state))

        return put_back

    def capture(self, seat: Picture, whole: bool = True) -> Sequence[bytes | memoryview] | None:
        """The state of the stage of this seat, see `state_sync.capture`; None: another one is in memory.

        Before the first step a stage is built, and what was built for another seat is of no use any more.
        """
        if seat.applied >= 0 and self.held_blocks not in (None, self.blocks_at(seat)):
            return None
        held = self._at(seat)
        return state_sync.capture(held.module, held.inner, self._trackers, whole=whole)

    def restore(self, blobs: bytes | memoryview | Sequence[bytes | memoryview]) -> None:
        """Take over a replica's state; that of another stage is refused, as its names differ."""
        self._lose()  # what was not sent belongs to another life of this worker
        self._drop()
        held = self._here()
        state_sync.restore(blobs, held.module, held.inner, self._trackers)

    def forget(self) -> None:
        """Give the stage's memory back: this worker leaves for a while."""
        self._drop()

    def pack(self, turn: Picture) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `state_sync.pack`; for checkpoints of the stage that this worker holds in this turn."""
        return self._packed(self._at(turn))

    def _packed(self, held: HeldStage) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """With what it takes to put a stage of another cut together from it (`pipeline.merging`)."""
        document, tensors = state_sync.pack(held.module, held.inner, self._trackers)
        document[merging.ORDER] = merging.order_of(held.module, held.inner)
        parameters = canonical_parameters(held.module)
        document[merging.FROZEN] = [name for name, p in parameters if not p.requires_grad]
        return document, tensors

    def pack_aside(self, held: Held, facts: Facts) -> Snapshot | None:
        """What is in memory, though this worker's seat is of other blocks already; None: it is not."""
        mine = self._held
        if mine is None or mine.blocks != held.blocks:
            return None
        feedback = mine.exchanger.feedback
        self._set_aside = True
        return Snapshot(held, facts, *self._packed(mine), {} if feedback is None else feedback.state())

    def load(self, founds: Sequence[Checkpoint], blocks: Span) -> None:
        """These blocks as checkpoints have them, with what this worker had not sent then.

        Raises:
            RemoteProtocolError: they are of other blocks or another model.
        """
        if self.held_blocks != blocks:
            self._lose()  # what is of this stage and this worker's own comes back with the checkpoint
        self._drop()
        held = self._here()
        if held.blocks != blocks:
            return  # this worker has got another seat meanwhile, and loads again
        merging.load(founds, held.module, held.inner, self._trackers, self._staging.tied_names)
        feedback = held.exchanger.feedback
        residual = merging.residual(founds, held.module, held.flat) if feedback is not None else {}
        if feedback is not None and residual:
            feedback.load(residual)

    # -- what `Grid` asks of whatever trains ---------------------------------------------------------

    def describe_exchange(self) -> str:
        options = self._options
        cut = self._staging.describe()
        said = f"{options.exchange.describe()}, {cut}, {options.micro_batches or 'auto'} micro-batches"
        return f"{said}, {options.schedule_name}, {options.wire.value} activations, seed {options.seed}"

    def expect_backwards(self, count: int) -> None:
        if count != 1:
            raise ConfigError(
                f"accumulate={count} with a pipeline, which divides each batch by itself",
                remedy="leave accumulate out, and give grid.pipeline(..., micro_batches=...)",
            )

    def turn_begins(self, trained: int) -> None:
        """Nothing to prepare."""

    def residual_state(self, turn: Picture | None = None) -> dict[str, Tensor]:
        held = self._here() if turn is None else self._at(turn)
        feedback = held.exchanger.feedback
        return {} if feedback is None else feedback.state()

    @property
    def exports(self) -> bool:
        """This worker writes its stage's part of the final model."""
        picture = self._session.picture
        if not picture.world_size:
            return False  # a spare
        return self._seats(picture).replica_of(picture.rank) == 0

    @property
    def stages(self) -> int:
        """As the run is defined."""
        return self._options.stages

    @property
    def defined(self) -> Staging:
        """The model as the run is defined; the coordinator may cut it otherwise."""
        return self._defined

    def described(self, profile: Profile | Sequence[Layer] | None, batch_size: int) -> StagedModel:
        """What the coordinator cuts it anew by."""
        of_whole = self.inner, profile, batch_size, self._trackers.values()
        return costing.staged_model(self._defined, self._options, *of_whole)

    def is_alone(self, place: Picture) -> bool:
        """Nobody else holds the stage of this worker."""
        return place.world_size == self._cut(place).stages

    def elements_of(self, blocks: Span) -> int:
        """Of a stage's flat gradient."""
        return self._defined.elements(blocks.start, blocks.stop)

    def edges(self, neighbours: Neighbours) -> Edges:
        """Ranks to which a rank needs an edge; `neighbours`: of the exchange among replicas."""

        def edges(rank: int, world_size: int, cuts: tuple[int, ...] = ()) -> frozenset[int]:
            staging = self._defined.at(cuts or self._defined.cuts)
            seats = Seats.of(staging.stages, world_size)
            group = seats.group(seats.stage_of(rank))
            near = {seats.before(rank), seats.after(rank)} - {None}
            stage, replica = seats.stage_of(rank), seats.replica_of(rank)
            near |= {seats.rank(other, replica) for other in staging.tied_with(stage)}
            within = edges_within(neighbours, group, rank) | edges_within(ring.neighbours, group, rank)
            return frozenset({r for r in near if r is not None} | within | everybody(rank, world_size)) - {
                rank
            }

        return edges

    def export(self, folder: Path) -> None:
        """This stage's part of the final model, and on the first worker the index of all parts."""
        held = self._here()
        staging = self._staging
        path = folder / _part_name(held.stage, staging.stages)
        save_model(held.module.state_dict(), path)
        if held.stage == 0:
            parts = {
                name: _part_name(stage, staging.stages)
                for stage in range(staging.stages)
                for name in staging.names(stage)
            }
            text = json.dumps({"metadata": {"stages": staging.stages}, "weight_map": parts}, indent=1)
            partial = path.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, folder / "final.safetensors.index.json")
        log.warning("the run is finished; stage %d of the model is in %s", held.stage, path)


def _part_name(stage: int, stages: int) -> str:
    return f"final-{stage + 1:05d}-of-{stages:05d}.safetensors"


def _alone(workspace: Any, skip: bool) -> bool:
    """The exchange of a stage that has one replica, here and now; returns whether the step is skipped."""
    for effect in workspace.collective(0, 1, skip).start(0.0):
        if isinstance(effect, Complete):
            return effect.skip
        workspace.apply(effect)
    raise LocalProtocolError(f"an exchange among one is not complete: {type(workspace).__name__}")


def _update_of(workspace: Any) -> Any:
    return workspace.update if hasattr(workspace, "update") else workspace.update_N
