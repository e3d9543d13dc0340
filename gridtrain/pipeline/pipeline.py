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
from gridtrain.core.collectives import ring
from gridtrain.core.collectives.activation_transfer import STAGE_SUMMARY_CHANNEL
from gridtrain.core.collectives.collective import CollectiveComplete
from gridtrain.core.collectives.direct_allgather import make_allgather
from gridtrain.core.collectives.direct_allgather import neighbours as everybody
from gridtrain.core.collectives.subgroup import Subgroup, neighbours_within
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.messages import Channel, CheckpointInfo, Facts, Span, StagedModel
from gridtrain.core.stages import schedule
from gridtrain.core.stages.stage_cost import Layer
from gridtrain.errors import ConfigError, LineBroken, LocalProtocolError, RemoteProtocolError
from gridtrain.pipeline import model_costs
from gridtrain.pipeline.executor import StepResult, share_tied_parameters
from gridtrain.pipeline.memory_usage import MemoryUsage, optimizer_state_tensors, storage_bytes
from gridtrain.pipeline.micro_batch_count import MicroBatchCount
from gridtrain.pipeline.model_stages import ModelStages, StageModule
from gridtrain.pipeline.profiler import Profile
from gridtrain.pipeline.random_seeds import derive_step_seed
from gridtrain.pipeline.stage_link import ExpectedPayloads, RoundStageLink
from gridtrain.pipeline.stage_optimizer import StageOptimizer
from gridtrain.pipeline.stage_residuals import StageResiduals
from gridtrain.pipeline.stage_state import MakeOptimizer, PipelineOptions, StageState, make_optimizer
from gridtrain.pipeline.validation import check_batch
from gridtrain.runtime.activation_buffers import StageSummary, StageSummaryBuffer
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.open_round import PipelineRound, RoundPart
from gridtrain.runtime.step_plan import RoundOutcome, StepPlan
from gridtrain.training.buffer_averaging import BufferAveraging
from gridtrain.training.checkpoint import checkpoint_merge, serialization
from gridtrain.training.checkpoint.checkpoint_store import Checkpoint, CheckpointContent
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters
from gridtrain.training.checkpoint.model_export import save_model
from gridtrain.training.exchangers import ExchangeAttempt
from gridtrain.training.optimizer import check_compatible, l2_norm

log = logging.getLogger("gridtrain")

NeighboursOf = Callable[[int, int], frozenset[int]]
EdgesOf = Callable[..., frozenset[int]]
"""Of a rank, a world size and, where the model is cut otherwise than the run is defined, the cuts."""

MICRO_BATCHES_TRACKER = "gridtrain: micro-batches"
"""Its name among the trackers."""

UPDATE_CHANNEL, AVERAGES_CHANNEL = Channel(), Channel(index=1)
_ROUND_SETTINGS = b"a model in stages"  # what the vote covers of the settings is in the rows, stage by stage
_NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class _AttemptState:
    """What one attempt has in flight."""

    attempt: ExchangeAttempt
    averages: Any
    seal_buffer: StageSummaryBuffer


class Pipeline(StageResiduals):
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
        self, staging: ModelStages, make: MakeOptimizer, options: PipelineOptions, session: GroupSession
    ) -> None:
        self._defined_stages = self._current_stages = staging
        self._make_optimizer, self._options = make, options
        self._session = session
        super().__init__()
        self._failed_round: PipelineRound | None = None
        self._micro_batch_count = MicroBatchCount(
            options.micro_batches, options.stages, options.schedule_kind, options.ahead
        )
        self._trackers: dict[str, serialization.Stateful] = (
            {MICRO_BATCHES_TRACKER: self._micro_batch_count} if self._micro_batch_count.is_auto else {}
        )
        self.model: nn.Module = staging.whole  # on the meta device: names and shapes, no values
        self.inner = make_optimizer(make, self.model.parameters())
        self._optimizer_handle = StageOptimizer(self.inner)
        self._at_start: Callable[[], None] | None = None
        check_compatible(self.inner, options.exchange, options.clip_norm)
        self.buffer_averaging = BufferAveraging(self.model, options.average_buffers_every)
        self.exchange_config = options.exchange
        self.compare_every = options.compare_every
        self.skipped_steps = 0
        self.last_skipped = self.metered = False
        self._kept_bytes = self._largest_micro_batch = 0
        self.timings: dict[str, float] = {}

    # -- what a loop calls -------------------------------------------------------------------------

    @property
    def stage(self) -> int | None:
        """Which stage this worker holds; changes where the coordinator seats it anew.  None: it is spare."""
        picture = self._session.snapshot
        return self.stage_at(picture) if picture.world_size else None

    def stage_at(self, place: WorkerSnapshot | StepPlan) -> int:
        """That a member of a rank holds."""
        return self._rank_layout(place).stage_of(place.rank)

    def blocks_at(self, place: WorkerSnapshot | StepPlan) -> Span:
        """Of the model, that a member of a rank holds."""
        return Span(*self._stages_at(place).block_range(self.stage_at(place)))

    def _stages_at(self, place: WorkerSnapshot | StepPlan) -> ModelStages:
        """As the model is cut in this generation; before there is one, as the run is defined."""
        cuts = place.stage_bounds or self._defined_stages.cuts
        if cuts != self._current_stages.cuts:
            self._current_stages = self._defined_stages.with_cuts(cuts)
        return self._current_stages

    def _rank_layout(self, place: WorkerSnapshot | StepPlan) -> RankLayout:
        return RankLayout.for_world_size(self._stages_at(place).stages, place.world_size)

    @property
    def micro_batches(self) -> int:
        """Into which the next step's batch is divided, if it has so many samples."""
        return self._micro_batch_count.number

    @property
    def module(self) -> StageModule:
        """This worker's layers, under their names in the whole model."""
        return self._current_state().module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of this worker's stage, whichever that is: one object, from the beginning on, for schedulers.

        Its settings must be the same on the replicas of a stage.  It is stepped by `pipe.step` alone.
        """
        return self._optimizer_handle

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
            held = self._state_at(plan)
            if plan.step == 0 and held.has_stepped:
                self._restart()
                self._micro_batch_count.reset()
                held = self._state_at(plan)
            held.inner.zero_grad()
            outcome, brought = self._attempt(held, plan, inputs, targets)
            if (not outcome.is_committed or outcome.is_skipped) and held.executor is not None:
                held.executor.stage.abort()  # before anybody asks for the state
            self._session.end_round(outcome)
            if not outcome.is_committed:
                self._in_flight.mark_ended()
            if brought is not None and not outcome.is_committed:
                self._check_same_settings(plan, brought.seal_buffer)
            if outcome.is_committed:
                assert brought is not None
                return self._apply(held, plan, outcome, brought, begun_s)

    def _end_failed(self) -> None:
        """The step is called again after the model or the loss raised something."""
        failed, self._failed_round = self._failed_round, None
        if failed is not None:
            self._session.end_round(failed.end())

    @property
    def holding(self) -> MemoryUsage:
        """Bytes that this worker holds for its stage, counted; after a step that was `metered`."""
        held = self._current_state()
        parameters = list(held.module.parameters())
        trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        exchange = [held.flat.flat_N, *self.residual_state().values()]
        kept_inputs = held.kept_input_bytes(self._largest_micro_batch, self._micro_batch_count.number)
        return MemoryUsage(
            storage_bytes((*parameters, *held.module.buffers())),
            trained,
            storage_bytes(optimizer_state_tensors(held.inner)),
            storage_bytes(exchange),
            self._kept_bytes + kept_inputs,
        )

    def track(self, **trackers: serialization.Stateful) -> None:
        """See `Grid.track`."""
        self._trackers.update(trackers)

    # -- one attempt -------------------------------------------------------------------------------

    def _attempt(
        self, held: StageState, plan: StepPlan, inputs: Any, targets: Any
    ) -> tuple[RoundOutcome, _AttemptState | None]:
        seats = self._rank_layout(plan)
        runner = held.prepare_executor(self._current_stages, self._options, inputs)
        sizes = held.micro_batch_sizes(plan.samples, self._micro_batch_count.number)
        self._largest_micro_batch = max(sizes, default=0)
        line = RoundStageLink(seats, plan.rank, held.max_payload_bytes(self._largest_micro_batch))
        expected = list(self._expected_payloads(held.stage, len(sizes)))
        round_ = self._session.open_round(plan, line.round_parts(expected), _ROUND_SETTINGS)
        line.set_round(round_)
        seed = derive_step_seed(self._options.seed, plan.step, seats.replica_of(plan.rank))
        try:
            self._share_tied(held, seats, line)
            meter = held.activation_meter()
            with (
                meter.counting()
                if self.metered or self._micro_batch_count.needs_memory_measurement
                else nullcontext()
            ):
                ran = runner.run(line, seed=seed, sizes=sizes, inputs=inputs, targets=targets)
            if self.metered:
                self._kept_bytes = max(self._kept_bytes, meter.peak_bytes)
            if self._micro_batch_count.needs_memory_measurement:
                self._micro_batch_count.record_memory(
                    meter.peak_bytes, self._largest_micro_batch, runner.stage.device
                )
            self._session.finish_computing()
            self.timings = {"computing_s": ran.computed_s, "pipeline_waiting_s": ran.waited_s}
            return self._exchange(held, plan, seats, round_, ran)
        except LineBroken as broken:
            line.fail_attempt(broken)
            return round_.end(), None
        except Exception as error:  # a user's code may raise anything, and go on
            line.abort(f"stage {held.stage}: {type(error).__name__}: {error}")
            self._failed_round = round_
            raise

    def _share_tied(self, held: StageState, seats: RankLayout, line: RoundStageLink) -> None:
        """Copies of a parameter stay one: where updates may differ, the first stage's replaces others."""
        assert held.executor is not None
        if held.tied and (not isinstance(self._options.exchange, Dense) or seats.replicas > 2):
            share_tied_parameters(held.executor.stage, held.stage, line)

    def _expected_payloads(self, stage: int, micro_batches: int) -> ExpectedPayloads:
        for m in range(micro_batches):
            if stage > 0:
                yield stage - 1, schedule.activations_channel(m)
            if stage < self._current_stages.stages - 1:
                yield stage + 1, schedule.gradients_channel(m)

    def _exchange(
        self, held: StageState, plan: StepPlan, seats: RankLayout, round_: PipelineRound, ran: StepResult
    ) -> tuple[RoundOutcome, _AttemptState]:
        """Among the stage's replicas, while other stages still compute; then all say what they hold."""
        group, replica = seats.stage_ranks(held.stage), seats.replica_of(plan.rank)
        within = replace(plan, rank=replica, world_size=seats.replicas)
        held.flat.gather()
        attempt = held.exchanger.prepare_bucket(0, held.flat.flat_N, within, usable=True)
        workspaces: dict[Channel, Any] = {UPDATE_CHANNEL: attempt.buffer}
        averages = held.buffer_averaging.make_collective_buffer(within)
        if averages is not None:
            workspaces[AVERAGES_CHANNEL] = averages
        if seats.replicas == 1:
            skip = any([_exchange_alone(workspace, attempt.skip) for workspace in workspaces.values()])
        else:
            round_.add(
                {
                    channel: RoundPart(
                        Subgroup(workspace.make_collective(replica, seats.replicas, attempt.skip), group),
                        workspace,
                    )
                    for channel, workspace in workspaces.items()
                }
            )
            if not round_.wait(*workspaces):
                raise LineBroken(round_.failure_reason)
            skip = any(round_.is_skipped(channel) for channel in workspaces)
        row = self._step_report(held, workspaces, skip, plan, ran, round_)
        seals = StageSummaryBuffer(seats, plan.rank, row)
        self._in_flight.mark_sent(attempt)
        outcome = round_.complete(
            STAGE_SUMMARY_CHANNEL, RoundPart(make_allgather(plan.rank, plan.world_size, skip), seals)
        )
        return outcome, _AttemptState(attempt, averages, seals)

    def _step_report(
        self,
        held: StageState,
        workspaces: Mapping[Channel, Any],
        skip: bool,
        plan: StepPlan,
        ran: StepResult,
        round_: PipelineRound,
    ) -> StageSummary:
        try:
            parts = [b"" if skip else workspace.compute_digest() for workspace in workspaces.values()]
        except RemoteProtocolError as error:
            round_.fail(error.reason)
            raise LineBroken(error.reason) from error
        seal = _NO_DIGEST if skip else hashlib.blake2b(b"".join(parts), digest_size=32).digest()
        norm_squared = 0.0
        if self._options.clip_norm is not None and not skip:
            norm_squared = l2_norm(held.without_tied_copies(_update_of(workspaces[UPDATE_CHANNEL]))) ** 2
        loss = ran.loss * plan.weight if ran.loss is not None and plan.samples else 0.0
        figures = self._micro_batch_count.step_timings(ran, plan.samples)
        return StageSummary(
            seal, serialization.hyperparameter_digest(held.inner), loss, norm_squared, figures
        )

    def _check_same_settings(self, plan: StepPlan, seals: StageSummaryBuffer) -> None:
        if not seals.is_complete or not seals.has_diverged_settings:
            return
        error = ConfigError(
            f"step {plan.step} cannot be committed: the optimizer of stage {self.stage} is set otherwise "
            "here than on most of its replicas",
            remedy="change its settings on all workers alike, by pipe.step's loss, which all have",
        )
        self._session.close(error.reason)
        raise error

    def _apply(
        self, held: StageState, plan: StepPlan, outcome: RoundOutcome, brought: _AttemptState, begun_s: float
    ) -> float:
        self.last_skipped = outcome.is_skipped
        loss = brought.seal_buffer.loss
        if outcome.is_skipped:
            self._in_flight.mark_ended()
            self.skipped_steps += 1
        else:
            held.flat.load_update(self._in_flight.commit(held.exchanger, brought.attempt))
            limit = self._options.clip_norm
            if limit is not None:
                norm = math.sqrt(brought.seal_buffer.norm_squared)
                held.flat.flat_N.mul_(min(1.0, limit / (norm + 1e-6)))
            held.flat.scatter()
            if brought.averages is not None:
                held.buffer_averaging.apply(brought.averages)
            self._optimizer_handle.apply()
            held.has_stepped = True
            assert held.executor is not None
            held.executor.stage.commit()
        held.inner.zero_grad()
        self._update_micro_batches(plan, brought.seal_buffer)
        every = self._options.compare_every
        if every and (plan.compare_after or (plan.step + 1) % every == 0):
            self._session.report_digest(plan.step, serialization.replica_digest(held.module, held.inner))
        self.timings["step_s"] = time.perf_counter() - begun_s
        self._session.report_figures({**self.timings, "stage": float(held.stage)})
        return loss

    def _update_micro_batches(self, plan: StepPlan, seals: StageSummaryBuffer) -> None:
        """The first steps show how many micro-batches are best."""
        seats = self._rank_layout(plan)
        chosen = self._micro_batch_count.record_step([row.figures for row in seals.summaries], seats)
        if chosen is not None:
            log.info("from step %d on %s", plan.step + 1, chosen.reason)
            self._session.report_figures({"micro_batches": float(chosen.micro_batches)})

    # -- what this worker holds ----------------------------------------------------------------------

    def _assigned_state(self) -> StageState:
        """The stage of this worker's seat, built where it is another one than before."""
        picture = self._session.snapshot
        if not picture.world_size:
            raise ConfigError(
                "which stage this worker holds is not known before the group has formed",
                remedy="ask inside of the loop over grid.batches(...)",
            )
        return self._state_at(picture)

    def _current_state(self) -> StageState:
        """What is in memory: others may still need it, though this worker has got another seat."""
        return self._assigned_state() if self._state is None else self._state

    def _state_at(self, place: WorkerSnapshot | StepPlan) -> StageState:
        """As `_here`, of the turn that is under way: by now the group may have another generation."""
        staging, stage = self._stages_at(place), self.stage_at(place)
        if self._state is None or self._state.blocks != Span(*staging.block_range(stage)):
            self._at_start = self._at_start or self.capture_turn_state()
            self._discard_residual()
            self._release_stage()  # its memory goes first
            self._state = StageState(stage, staging, self._make_optimizer, self._options)
            self._optimizer_handle.set_inner(self._state.inner)
            self._session.tasks.resize_residual(self.residual_size)
        self._state.set_position(staging, stage)
        return self._state

    def _release_stage(self) -> None:
        """Nothing of a stage is held any more, but for its optimizer's settings."""
        self._optimizer_handle.set_inner(self.inner)
        self._in_flight.clear()
        self._state = None

    def _restart(self) -> None:
        """At step 0 once more, as nobody holds a later state of all stages."""
        assert self._at_start is not None
        self._release_stage()
        self._at_start()

    def capture_turn_state(self) -> Callable[[], None]:
        """See `set_back.Trained`: the optimizer's settings and the trackers, whichever stage is held."""
        settings = self._optimizer_handle.settings()
        trackers = {name: copy.deepcopy(item.state_dict()) for name, item in self._trackers.items()}

        def put_back() -> None:
            self._optimizer_handle.load_settings(settings)
            for name, state in trackers.items():
                self._trackers[name].load_state_dict(copy.deepcopy(state))

        return put_back

    def capture_state(self, seat: WorkerSnapshot, whole: bool = True) -> Sequence[bytes | memoryview] | None:
        """The state of the stage of this seat, see `state_sync.capture`; None: another one is in memory.

        Before the first step a stage is built, and what was built for another seat is of no use any more.
        """
        if seat.applied >= 0 and self.held_blocks not in (None, self.blocks_at(seat)):
            return None
        held = self._state_at(seat)
        return serialization.capture_state(held.module, held.inner, self._trackers, whole=whole)

    def restore_state(self, blobs: bytes | memoryview | Sequence[bytes | memoryview]) -> None:
        """Take over a replica's state; that of another stage is refused, as its names differ."""
        self._discard_residual()  # what was not sent belongs to another life of this worker
        self._release_stage()
        held = self._assigned_state()
        serialization.restore_state(blobs, held.module, held.inner, self._trackers)

    def forget(self) -> None:
        """Give the stage's memory back: this worker leaves for a while."""
        self._release_stage()

    def pack(self, turn: WorkerSnapshot) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `state_sync.pack`; for checkpoints of the stage that this worker holds in this turn."""
        return self._pack_state(self._state_at(turn))

    def _pack_state(self, held: StageState) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """With what it takes to put a stage of another cut together from it (`pipeline.merging`)."""
        document, tensors = serialization.pack_state(held.module, held.inner, self._trackers)
        document[checkpoint_merge.PARAMETER_ORDER_KEY] = checkpoint_merge.parameter_order(
            held.module, held.inner
        )
        parameters = canonical_parameters(held.module)
        document[checkpoint_merge.FROZEN_KEY] = [name for name, p in parameters if not p.requires_grad]
        return document, tensors

    def pack_aside(self, held: CheckpointInfo, facts: Facts) -> CheckpointContent | None:
        """What is in memory, though this worker's seat is of other blocks already; None: it is not."""
        mine = self._state
        if mine is None or mine.blocks != held.layers:
            return None
        feedback = mine.exchanger.feedback
        self._set_aside = True
        return CheckpointContent(
            held, facts, *self._pack_state(mine), {} if feedback is None else feedback.state()
        )

    def load(self, founds: Sequence[Checkpoint], blocks: Span) -> None:
        """These blocks as checkpoints have them, with what this worker had not sent then.

        Raises:
            RemoteProtocolError: they are of other blocks or another model.
        """
        if self.held_blocks != blocks:
            self._discard_residual()  # what is of this stage and this worker's own comes back with the checkpoint
        self._release_stage()
        held = self._assigned_state()
        if held.blocks != blocks:
            return  # this worker has got another seat meanwhile, and loads again
        checkpoint_merge.load_merged(
            founds, held.module, held.inner, self._trackers, self._current_stages.tied_names
        )
        feedback = held.exchanger.feedback
        residual = (
            checkpoint_merge.merged_residual(founds, held.module, held.flat) if feedback is not None else {}
        )
        if feedback is not None and residual:
            feedback.load(residual)

    # -- what `Grid` asks of whatever trains ---------------------------------------------------------

    def describe_exchange(self) -> str:
        options = self._options
        cut = self._current_stages.describe()
        said = f"{options.exchange.describe()}, {cut}, {options.micro_batches or 'auto'} micro-batches"
        return f"{said}, {options.schedule_name}, {options.wire.value} activations, seed {options.seed}"

    def set_backwards_per_step(self, count: int) -> None:
        if count != 1:
            raise ConfigError(
                f"accumulate={count} with a pipeline, which divides each batch by itself",
                remedy="leave accumulate out, and give grid.pipeline(..., micro_batches=...)",
            )

    def begin_turn(self, trained: int) -> None:
        """Nothing to prepare."""

    def residual_state(self, turn: WorkerSnapshot | None = None) -> dict[str, Tensor]:
        held = self._assigned_state() if turn is None else self._state_at(turn)
        feedback = held.exchanger.feedback
        return {} if feedback is None else feedback.state()

    @property
    def exports(self) -> bool:
        """This worker writes its stage's part of the final model."""
        picture = self._session.snapshot
        if not picture.world_size:
            return False  # a spare
        return self._rank_layout(picture).replica_of(picture.rank) == 0

    @property
    def stages(self) -> int:
        """As the run is defined."""
        return self._options.stages

    @property
    def defined(self) -> ModelStages:
        """The model as the run is defined; the coordinator may cut it otherwise."""
        return self._defined_stages

    def described(self, profile: Profile | Sequence[Layer] | None, batch_size: int) -> StagedModel:
        """What the coordinator cuts it anew by."""
        of_whole = self.inner, profile, batch_size, self._trackers.values()
        return model_costs.describe_staged_model(self._defined_stages, self._options, *of_whole)

    def is_alone(self, place: WorkerSnapshot) -> bool:
        """Nobody else holds the stage of this worker."""
        return place.world_size == self._stages_at(place).stages

    def elements_of(self, blocks: Span) -> int:
        """Of a stage's flat gradient."""
        return self._defined_stages.gradient_elements(blocks.start, blocks.stop)

    def edges(self, neighbours: NeighboursOf) -> EdgesOf:
        """Ranks to which a rank needs an edge; `neighbours`: of the exchange among replicas."""

        def edges(rank: int, world_size: int, cuts: tuple[int, ...] = ()) -> frozenset[int]:
            staging = self._defined_stages.with_cuts(cuts or self._defined_stages.cuts)
            seats = RankLayout.for_world_size(staging.stages, world_size)
            group = seats.stage_ranks(seats.stage_of(rank))
            near = {seats.previous_stage_rank(rank), seats.next_stage_rank(rank)} - {None}
            stage, replica = seats.stage_of(rank), seats.replica_of(rank)
            near |= {seats.rank_of(other, replica) for other in staging.stages_tied_to(stage)}
            within = neighbours_within(neighbours, group, rank) | neighbours_within(
                ring.neighbours, group, rank
            )
            return frozenset({r for r in near if r is not None} | within | everybody(rank, world_size)) - {
                rank
            }

        return edges

    def export(self, folder: Path) -> None:
        """This stage's part of the final model, and on the first worker the index of all parts."""
        held = self._assigned_state()
        staging = self._current_stages
        path = folder / _part_name(held.stage, staging.stages)
        save_model(held.module.state_dict(), path)
        if held.stage == 0:
            parts = {
                name: _part_name(stage, staging.stages)
                for stage in range(staging.stages)
                for name in staging.tensor_names(stage)
            }
            text = json.dumps({"metadata": {"stages": staging.stages}, "weight_map": parts}, indent=1)
            partial = path.with_suffix(".partial")
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, folder / "final.safetensors.index.json")
        log.warning("the run is finished; stage %d of the model is in %s", held.stage, path)


def _part_name(stage: int, stages: int) -> str:
    return f"final-{stage + 1:05d}-of-{stages:05d}.safetensors"


def _exchange_alone(workspace: Any, skip: bool) -> bool:
    """The exchange of a stage that has one replica, here and now; returns whether the step is skipped."""
    for effect in workspace.make_collective(0, 1, skip).start(0.0):
        if isinstance(effect, CollectiveComplete):
            return effect.skip
        workspace.apply(effect)
    raise LocalProtocolError(f"an exchange among one is not complete: {type(workspace).__name__}")


def _update_of(workspace: Any) -> Any:
    return workspace.update if hasattr(workspace, "update") else workspace.update_N
