"""`pipe = grid.pipeline(...)`, `pipe.step(...)`: runs a training step of a staged model, including the vote.

`Pipeline` runs the steps, `HeldStage` keeps the stage in memory, and `StageModelState` saves and exports it.

In each attempt at a step,

1. the round opens, and `StageExecutor` computes the stage's gradients,
2. the replicas of the stage exchange the gradients,
3. all members exchange summaries (loss, norm, timings, digests of the stage's update and settings),
4. all members vote on the digest of the summaries, and apply the update.

If a member or a payload is lost, the links between all stages break.  After an aborted attempt, all members
recompute the step from its batch.  The seeds depend on the step and not on the attempt, so the gradient is
the same.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from gridtrain.config import Dense
from gridtrain.core.collectives.activation_transfer import STAGE_SUMMARY_CHANNEL
from gridtrain.core.collectives.collective import CollectiveComplete
from gridtrain.core.collectives.subgroup import Subgroup
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.group.round_flags import is_skipped
from gridtrain.core.messages import Channel
from gridtrain.core.stages import schedule
from gridtrain.errors import ConfigError, LineBroken, LocalProtocolError, RemoteProtocolError
from gridtrain.pipeline.autocast import autocast_dtype, without_autocast
from gridtrain.pipeline.batch_checks import check_batch, check_same_dtypes
from gridtrain.pipeline.executor import OtherSizes, StepResult, share_tied_parameters
from gridtrain.pipeline.held_stage import MICRO_BATCHES_TRACKER, HeldStage
from gridtrain.pipeline.memory_meters import MemoryUsage, optimizer_state_tensors, storage_bytes
from gridtrain.pipeline.micro_batch_count import MicroBatchCount
from gridtrain.pipeline.model_stages import ModelStages, StageModule
from gridtrain.pipeline.random_seeds import derive_step_seed
from gridtrain.pipeline.stage_link import ExpectedPayloads, RoundStageLink
from gridtrain.pipeline.stage_state import MakeOptimizer, PipelineOptions, StageState
from gridtrain.runtime.activation_buffers import StageSummary, StageSummaryBuffer
from gridtrain.runtime.buffers.buckets import BucketedBuffer
from gridtrain.runtime.buffers.collective_buffers import CollectiveBuffer, DenseRingBuffer
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.step_plan import RoundOutcome, StepPlan, is_comparison_due
from gridtrain.runtime.open_round import PipelineRound, RoundPart
from gridtrain.training.buffer_averaging import BufferAveraging
from gridtrain.training.checkpoint import hyperparameters, serialization
from gridtrain.training.checkpoint.frozen_base import FrozenBase
from gridtrain.training.exchangers import ExchangePart
from gridtrain.training.optimizer import check_applied, check_compatible, l2_norm
from gridtrain.training.single_samples import SingleSampleReport
from gridtrain.training.skip_report import SkipReport

log = logging.getLogger("gridtrain")

UPDATE_CHANNEL, AVERAGES_CHANNEL = Channel(), Channel(index=1)
_ROUND_SETTINGS = b"a model in stages"  # the same on all members; summaries contain the settings
_NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class _Contribution:
    """This worker's contribution to one attempt."""

    part: ExchangePart
    averages: DenseRingBuffer | None
    summaries: StageSummaryBuffer


class Pipeline:
    """Takes the steps of this worker's stage.  Use it on the training thread only.

    `Grid.pipeline` creates it.

    Attributes:
        last_skipped: whether the latest step was skipped, or its batch was dropped on this worker.
        metered: whether to measure, for `holding`, the tensors that are stored between the forward and
            backward passes.  The measurement slows down each step.
        timings: the seconds that the latest step took in total, and those that it spent computing and waiting
            for other stages.
        held: the stage that this worker has in memory.
        base: the frozen parameters of the whole model, which are not part of the state.
    """

    delay = 0
    calls_per_turn = 1
    local_calls = 0
    weigh_by, unused = "samples", "zero"
    wait = "all"

    def __init__(
        self,
        staging: ModelStages,
        make: MakeOptimizer,
        options: PipelineOptions,
        session: GroupSession,
        base: FrozenBase | None = None,
    ) -> None:
        self._options, self._session = options, session
        self.base = base or FrozenBase(staging.whole, pieces=staging.frozen_blocks)
        self.held = HeldStage(staging, make, options, session, self.base)
        self.model = staging.whole  # on the meta device: names and shapes, no values
        self.inner = self.held.template
        check_compatible(self.inner, options.exchange, options.clip_norm)
        self._micro_batch_count = MicroBatchCount(
            options.micro_batches, options.stages, options.schedule_kind, options.ahead
        )
        if self._micro_batch_count.is_auto:
            self.held.track(**{MICRO_BATCHES_TRACKER: self._micro_batch_count})
        self._failed_round: PipelineRound | None = None
        self._unapplied_step: int | None = None  # committed, but not completely applied to this stage
        self._committed_autocast: set[torch.dtype | None] = set()  # results of `autocast_dtype`
        self._input_dtypes: Any = None  # of the latest committed step; None before the first one
        self.buffer_averaging = BufferAveraging(self.model, options.average_buffers_every)
        self.exchange_config = options.exchange
        self.compare_every, self.clip_norm = options.compare_every, options.clip_norm
        self._skips = SkipReport(lambda figures: session.report_figures(figures))
        self._single_samples = SingleSampleReport("replica of the model")
        self.last_skipped = self.metered = False
        self._stored_bytes = self._largest_micro_batch = 0
        self.timings: dict[str, float] = {}

    # -- training loop -----------------------------------------------------------------------------

    @property
    def stage(self) -> int | None:
        """The index of the stage that this worker's rank holds; None if this worker has no rank.

        The coordinator may assign another rank to this worker.
        """
        snapshot = self._session.snapshot
        return self.held.places.stage(snapshot) if snapshot.world_size else None

    @property
    def stages(self) -> int:
        """The number of stages in the run's definition; a repartitioned model can have fewer."""
        return self._options.stages

    @property
    def skipped_steps(self) -> int:
        """The number of committed steps whose update was skipped because a gradient was not finite."""
        return self._skips.total

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in the next step; fewer if its batch has too few samples."""
        return self._micro_batch_count.number

    @property
    def module(self) -> StageModule:
        """This worker's layers, under their names in the whole model."""
        return self.held.in_memory().module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this worker's stage; it stays the same object when the stage changes.

        Its settings must be the same on all replicas of a stage.  Only `pipe.step` may call its `step`.
        """
        return self.held.optimizer

    def step(self, inputs: Any, targets: Any = None) -> float | None:
        """Take one step of the whole group with the current batch of `grid.batches`.

        Args:
            inputs: the inputs, with the samples in the first dimension.  The first stage computes with them;
                other stages use their shapes and, to find the cause of an error, their values.
            targets: the targets for the loss, which the last stage computes.

        Returns:
            The mean loss over all samples of the step, on every worker; None if this batch was dropped,
            because the group continued without this worker or this worker has to pause.  In that case,
            continue the loop over `grid.batches`.

        Raises:
            ConfigError: (1) inputs or targets are not this step's batch, the dtypes or structure of the
                inputs differ from those in the previous step, or gradients are disabled; nothing was sent,
                and `step` can be called again with the right batch; (2) the optimizer settings on this worker
                differ from those on most replicas of its stage; (3) this worker received a payload of an
                unexpected size, and has not committed a step with its present autocast.
            Exception: the exception that the model or the loss raised.  The other members are informed; they
                repeat the step together with this worker or, if it leaves, without it.
        """
        check_applied(self._unapplied_step)
        if not torch.is_grad_enabled():
            raise ConfigError(
                "pipe.step was called under torch.no_grad or torch.inference_mode: nothing would be trained",
                remedy="call it outside of both",
            )
        self._end_failed_round()
        while True:
            began_s = time.perf_counter()
            plan = self._session.begin()
            if plan is None:
                self.held.record_dropped_step()
                self.last_skipped = True
                return None
            if plan.samples:  # otherwise a stand-in batch
                dtypes = check_batch("inputs", inputs, plan.samples)
                check_batch("targets", targets, plan.samples)
                if self._input_dtypes is not None:
                    check_same_dtypes(dtypes, self._input_dtypes)
            state = self.held.at(plan)
            if plan.step == 0 and state.has_stepped:
                self.held.restart()
                self._micro_batch_count.reset()
                state = self.held.at(plan)
            self.base.check_sometimes(state.module)
            state.inner.zero_grad()
            outcome, mine = self._attempt(state, plan, inputs, targets)
            if not outcome.is_committed or outcome.is_skipped:
                self.held.abort_step()  # before the state can be requested
            self._session.end_round(outcome)
            if outcome.is_committed:
                assert mine is not None
                if plan.samples:
                    self._input_dtypes = dtypes
                    self._committed_autocast.add(autocast_dtype(self.held.defined.device))
                return self._apply(state, plan, outcome, mine, began_s)
            state.residual.mark_ended()
            if mine is not None:
                self._check_same_settings(plan, mine.summaries)

    def _end_failed_round(self) -> None:
        """End the round of an earlier `step` in which the model or the loss raised an exception."""
        failed, self._failed_round = self._failed_round, None
        if failed is not None:
            self._session.end_round(failed.end())

    @property
    def holding(self) -> MemoryUsage:
        """The memory that this worker's stage uses, in bytes.

        Tensors stored for backward passes are included only after a step with `metered` set.
        """
        state = self.held.in_memory()
        parameters = list(state.module.parameters())
        input_bytes = state.kept_input_bytes(self._largest_micro_batch, self._micro_batch_count.number)
        return MemoryUsage(
            storage_bytes((*parameters, *state.module.buffers())),
            sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
            storage_bytes(optimizer_state_tensors(state.inner)),
            storage_bytes([state.flat.flat_N, *state.residual.state().values()]),
            self._stored_bytes + input_bytes,
        )

    @property
    def trackers(self) -> Mapping[str, serialization.Stateful]:
        """The tracked objects by name."""
        return self.held.trackers

    def track(self, **trackers: serialization.Stateful) -> None:
        """Track stateful objects; see `Grid.track`."""
        serialization.check_stateful(trackers)
        self.held.track(**trackers)

    # -- one attempt -------------------------------------------------------------------------------

    def _attempt(
        self, state: StageState, plan: StepPlan, inputs: Any, targets: Any
    ) -> tuple[RoundOutcome, _Contribution | None]:
        layout, count = self.held.places.layout(plan), self._micro_batch_count
        executor = state.prepare_executor(self.held.places.stages(plan), inputs)
        layer, is_normalized = state.lone_sample() if plan.samples == 1 else ("", True)
        if layer:
            is_one = self._session.batch_size_is_one
            self._single_samples.report(layer, batch_size_is_one=is_one, is_normalized=is_normalized)
        sizes = state.micro_batch_sizes(plan.samples, count.number)
        self._largest_micro_batch = max(sizes, default=0)
        link = RoundStageLink(layout, plan.rank, state.max_payload_bytes(self._largest_micro_batch))
        expected = list(_expected_payloads(state.stage, layout.stages, len(sizes)))
        round_ = self._session.open_round(plan, link.round_parts(expected), _ROUND_SETTINGS)
        link.set_round(round_)
        seed = derive_step_seed(self._options.seed, plan.step, layout.replica_of(plan.rank))
        try:
            self._share_tied(state, layout, link)
            meter = state.activation_meter()
            is_measured = self.metered or count.needs_memory_measurement
            with meter.counting() if is_measured else nullcontext():
                result = executor.run(link, seed=seed, sizes=sizes, inputs=inputs, targets=targets)
            if self.metered:
                self._stored_bytes = max(self._stored_bytes, meter.peak_bytes)
            if count.needs_memory_measurement:
                count.record_memory(meter.peak_bytes, self._largest_micro_batch, executor.stage.device)
            self._session.finish_computing()
            self.timings = {"computing_s": result.computed_s, "pipeline_waiting_s": result.waited_s}
            return self._exchange(state, plan, layout, round_, result)
        except LineBroken as broken:
            if isinstance(broken, OtherSizes) and (error := self._autocast_error(broken)) is not None:
                self._failed_round = round_
                raise error from broken
            link.fail_attempt(broken)
            return round_.end(), None
        except Exception as error:  # a user's code may raise anything, and the script may continue
            link.abort(f"stage {state.stage}: {type(error).__name__}: {error}")
            self._failed_round = round_
            raise

    def _autocast_error(self, broken: OtherSizes) -> ConfigError | None:
        """Return the error that ends this worker if it has not committed a step with its present autocast.

        In this case, this worker may be wrong, not the sender, which would otherwise be accused.
        """
        device = self.held.defined.device
        dtype = autocast_dtype(device)
        if dtype in self._committed_autocast:
            return None
        cast = "without autocast" if dtype is None else f"with autocast to {dtype}"
        reason = f"{broken.reason}; this worker has committed no step {cast} on {device.type}"
        return ConfigError(reason, remedy=broken.remedy)

    def _share_tied(self, state: StageState, layout: RankLayout, link: RoundStageLink) -> None:
        """Replace the copies of tied parameters with the first stage's copy if their updates may differ."""
        assert state.executor is not None
        exchange = self._options.exchange
        is_exact = isinstance(exchange, Dense) and exchange.values == "fp32"
        if state.tied and (not is_exact or layout.replicas > 2):
            share_tied_parameters(state.executor.stage, state.stage, link)

    def _exchange(
        self, state: StageState, plan: StepPlan, layout: RankLayout, round_: PipelineRound, result: StepResult
    ) -> tuple[RoundOutcome, _Contribution]:
        """Exchange gradients with the stage's replicas, then summaries with all members.

        The first exchange runs while other stages are still computing.
        """
        replica = layout.replica_of(plan.rank)
        stage_plan = replace(plan, rank=replica, world_size=layout.replicas)
        state.flat.gather()
        part = state.exchanger.prepare_bucket(0, state.flat.flat_N, stage_plan, usable=True)
        assert not isinstance(part.buffer, BucketedBuffer)
        update = part.buffer
        buffers: dict[Channel, CollectiveBuffer] = {UPDATE_CHANNEL: update}
        if state.buffer_averaging.is_due(stage_plan):
            assert state.executor is not None
            state.executor.stage.update_statistics()
        averages = state.buffer_averaging.make_collective_buffer(stage_plan)
        if averages is not None:
            buffers[AVERAGES_CHANNEL] = averages
        if layout.replicas == 1:
            skip = any([_exchange_alone(buffer, part.skip) for buffer in buffers.values()])
        else:
            group = layout.stage_ranks(state.stage)
            round_parts = {
                channel: RoundPart(
                    Subgroup(buffer.make_collective(replica, layout.replicas, part.skip), group), buffer
                )
                for channel, buffer in buffers.items()
            }
            round_.add(round_parts)
            if not round_.wait(*buffers):
                raise LineBroken(round_.failure_reason)
            skip = any(round_.is_skipped(channel) for channel in buffers)
        digest = _NO_DIGEST if skip else self._update_digest(buffers, round_)
        norm_squared = 0.0
        if self._options.clip_norm is not None and not skip:
            norm_squared = l2_norm(state.without_tied_copies(update.update)) ** 2
        summary = StageSummary(
            digest,
            hyperparameters.hyperparameter_digest(state.inner),
            result.loss * plan.weight if result.loss is not None and plan.samples else 0.0,
            norm_squared,
            self._micro_batch_count.step_timings(result, plan.samples),
        )
        summaries = StageSummaryBuffer(layout, plan.rank, summary)
        state.residual.mark_sent(part)
        collective = summaries.make_collective(plan.rank, plan.world_size, skip)
        outcome = round_.complete(STAGE_SUMMARY_CHANNEL, collective, summaries)
        return outcome, _Contribution(part, averages, summaries)

    def _update_digest(self, buffers: Mapping[Channel, CollectiveBuffer], round_: PipelineRound) -> bytes:
        try:
            parts = [buffer.compute_digest() for buffer in buffers.values()]
        except RemoteProtocolError as error:
            round_.fail(error.reason)
            raise LineBroken(error.reason) from error
        return hashlib.blake2b(b"".join(parts), digest_size=32).digest()

    def _check_same_settings(self, plan: StepPlan, summaries: StageSummaryBuffer) -> None:
        """Raise `ConfigError` if the round was aborted because this worker's optimizer settings differ."""
        if not summaries.is_complete or not summaries.has_diverged_settings:
            return
        error = ConfigError(
            f"step {plan.step + 1} cannot be committed: the optimizer settings of stage {self.stage} differ "
            "on this worker from those of most of its replicas",
            remedy="change settings in the same way on all workers; pipe.step returns the same loss on all "
            "of them",
        )
        self._session.close(error.reason)
        raise error

    def _apply(
        self, state: StageState, plan: StepPlan, outcome: RoundOutcome, mine: _Contribution, began_s: float
    ) -> float:
        self.last_skipped, state.applied = outcome.is_skipped, None
        self._unapplied_step = plan.step
        if outcome.is_skipped:
            state.residual.mark_ended()
            self._skips.record_skipped(plan.step, is_own=mine.part.skip)
        else:
            state.flat.load_update(state.residual.commit(mine.part))
            limit = self._options.clip_norm
            if limit is not None:
                norm = math.sqrt(mine.summaries.norm_squared)
                state.flat.flat_N.mul_(min(1.0, limit / (norm + 1e-6)))
            state.flat.scatter()
            if mine.averages is not None:
                state.buffer_averaging.apply(mine.averages)
            assert state.executor is not None
            with without_autocast(state.executor.stage.device):
                self.held.optimizer.apply()
            state.has_stepped = True
            state.executor.stage.commit()
        state.inner.zero_grad()
        self._update_micro_batches(plan, mine.summaries)
        self.held.record_step(plan.step)
        self._unapplied_step = None
        every = self._options.compare_every
        if every and (plan.compare_after or is_comparison_due(plan.step, every)):
            self._session.report_digest(plan.step, serialization.replica_digest(state.module, state.inner))
        self.timings["step_s"] = time.perf_counter() - began_s
        self._session.report_figures(self.timings | {"stage": float(state.stage)})
        return mine.summaries.loss

    def _update_micro_batches(self, plan: StepPlan, summaries: StageSummaryBuffer) -> None:
        """Record the step's timings; when the number of micro-batches is chosen, log and report it."""
        figures = [summary.figures for summary in summaries.summaries]
        chosen = self._micro_batch_count.record_step(figures, self.held.places.layout(plan))
        if chosen is not None:
            log.info("from step %d on, %s", plan.step + 2, chosen.reason)
            self._session.report_figures({"micro_batches": float(chosen.micro_batches)})

    # -- methods for `Grid`, as in `GridOptimizer` ----------------------------------------------------

    def describe_exchange(self) -> str:
        """Return a text that describes the settings that must be the same on all workers."""
        options = self._options
        stages = self.held.defined.describe()
        text = f"{options.exchange.describe()}, {stages}, {options.micro_batches or 'auto'} micro-batches"
        return f"{text}, {options.schedule_name}, {options.wire.value} activations, seed {options.seed}"

    def set_backwards_per_step(self, count: int) -> None:
        """Raise `ConfigError` unless `count` is 1."""
        if count != 1:
            raise ConfigError(
                f"accumulate is {count}; it must be 1 for a pipeline, which divides each batch itself",
                remedy="remove accumulate= and use grid.pipeline(..., micro_batches=...)",
            )

    def record_turn(self) -> None:
        """Record that the script requests its next batch; raise `GridtrainError` if a committed update
        was not applied."""
        check_applied(self._unapplied_step)
        self.held.record_turn()

    def begin_turn(self, calls_with_samples: int) -> None:
        """Do nothing: a pipeline needs no preparation."""

    def capture_turn_state(self) -> Callable[[], None]:
        """Copy the settings and trackers that the script may change, and return a function that restores
        them."""
        return self.held.capture_settings()


def _expected_payloads(stage: int, stages: int, micro_batches: int) -> ExpectedPayloads:
    for m in range(micro_batches):
        if stage > 0:
            yield stage - 1, schedule.activations_channel(m)
        if stage < stages - 1:
            yield stage + 1, schedule.gradients_channel(m)


def _exchange_alone(buffer: CollectiveBuffer, skip: bool) -> bool:
    """Run the exchange of a stage with one replica; return whether the step is skipped."""
    for effect in buffer.make_collective(0, 1, skip).start():
        if isinstance(effect, CollectiveComplete):
            return is_skipped(effect.flags)
        buffer.apply(effect)  # type: ignore[arg-type]
    raise LocalProtocolError(f"the exchange of a single replica is not complete: {type(buffer).__name__}")
