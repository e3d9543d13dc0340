"""`Grid`, the object whose methods a script calls: optimizer, batches, mean, report, pipeline, ...

`Grid` connects a PyTorch training loop to the parts that do the work:

    gridtrain.join()      transport, GroupSession (I/O thread) --> Grid (see `join`)
    grid.optimizer(...)   GridOptimizer or LocalSGDOptimizer, and WholeModelState for checkpoints and residual
    grid.pipeline(...)    Pipeline, and StageModelState
    grid.batches(...)     Turns: one item for each call to `optimizer.step`, until the run has ended

    grid = gridtrain.join()
    optimizer = grid.optimizer(optimizer, model, exchange=gridtrain.GTopK(density=0.01, momentum=0.9))
    for batch in grid.batches(dataset, batch_size=32, epochs=3):
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gridtrain.config import Auto, Dense, Exchange, JoinConfig, LocalSteps, Overlap, exchange_of
from gridtrain.core.commit import data_ledger
from gridtrain.core.messages import LedgerSpec, Span
from gridtrain.core.stages.stage_cost import Layer
from gridtrain.device_speed import device_flops
from gridtrain.errors import BudgetSpent, ConfigError, DataError, GridtrainError, describe_type
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.fault_injection import Faults
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.pipeline.blueprint import Blueprint, Init, Model
from gridtrain.pipeline.memory_limit import training_memory_bytes
from gridtrain.pipeline.micro_batch_count import parse_micro_batches
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.profiler import Profile, to_device
from gridtrain.pipeline.stage import LossFunction
from gridtrain.pipeline.stage_model_state import StageModelState
from gridtrain.pipeline.stage_state import (
    MakeOptimizer,
    PipelineOptions,
    parse_wire,
    schedule_for,
)
from gridtrain.runtime.client.agent_link import AgentControl, NoAgent
from gridtrain.runtime.client.worker_defaults import export_folder
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.process_hooks import (
    closed_at_exit,
    describe_end,
    install_sigterm_handler,
    uncaught_error,
)
from gridtrain.sdk.argument_checks import check_kinds, to_intervals, to_ints
from gridtrain.sdk.batches import Turns
from gridtrain.sdk.checkpoint_options import checkpoint_options
from gridtrain.sdk.reported_figures import ReportedFigures
from gridtrain.sdk.run_end import finish_run
from gridtrain.sdk.run_facts import run_facts
from gridtrain.training.checkpoint import serialization
from gridtrain.training.checkpoint.frozen_base import FrozenBase
from gridtrain.training.checkpoint.joint_optimizer import as_one, parts_of
from gridtrain.training.data import readers, sampler
from gridtrain.training.data.batch_sizes import BatchSizes
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.data.prefetch import Prefetcher, check_readers
from gridtrain.training.data.shards import ShardedDataset
from gridtrain.training.grad_scaler import GridScaler, unsupported_scaler_error
from gridtrain.training.local_sgd import LocalSGDOptimizer
from gridtrain.training.model_check import TokenCheck, check_values, spread_samples, warn_of_sync_norms
from gridtrain.training.model_state import ModelState, WholeModelState, device_of
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.overlapped_local_sgd import OverlappedLocalSGDOptimizer
from gridtrain.training.pause import MakeTransport, PauseController, SetRateLimits

log = logging.getLogger("gridtrain")

CHECKPOINT_TIMEOUT_S = 30.0
"""How many seconds `Grid.close` waits for a checkpoint that is being written or uploaded."""


class Grid:
    """This worker's interface to the run.  Use it on the training thread."""

    _has_warned = _has_warned_of_end = False
    _read_error: Exception | None = None  # the error that ended `batches`
    _scalers: tuple[GridScaler, ...] = ()
    _optimizer: GridOptimizer | Pipeline | None = None

    def __init__(
        self,
        transport: FlowControlTransport,
        config: JoinConfig,
        allowlist: PeerAllowlist,
        faults: Faults | None = None,
    ) -> None:
        self._config = config
        self.resources = ExitStack()  # released when the grid is closed
        self._process = os.getpid()
        self._session = GroupSession(transport, self._config, allowlist)
        if faults is not None:
            self._session.on_turn_begun = partial(faults.stall, config.name)
        try:
            self._session.connection.loop.start()
        except BaseException:
            self._session.close()
            transport.close()  # the session's thread, which closes it, may never have run
            raise
        self._figures = ReportedFigures()
        self._fetches = FetchMeter()
        if config.download_limit:
            self._fetches.limit(parse_rate(config.download_limit), math.inf)
        self._pauses = PauseController(
            self._session, NoAgent(), None, lambda upload_Bps, download_Bps: None, self._fetches
        )
        self._model_state: ModelState | None = None
        self._turns: Turns | None = None
        self._given: tuple[LedgerSpec, BatchSizes, str] | None = None  # what the script passed when it joined
        self._prefetcher: Prefetcher | None = None
        self._is_repeated_later = False  # whether the current micro-batch's sample is
        self._is_closed = False
        atexit.register(self._close_at_exit)
        install_sigterm_handler()

    # -- where we are ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank in the current generation.

        Before the first batch, it is 0, and a warning is logged once.
        """
        self._warn_before_first_batch()
        return self._session.snapshot.rank

    def _warn_before_first_batch(self) -> None:
        if self._turns is None and not self._has_warned:
            self._has_warned = True
            log.warning(
                "grid.rank is 0, grid.is_first is True and grid.mean returns the worker's own number on all "
                "workers before the first batch; read them in the loop"
            )

    @property
    def world_size(self) -> int:
        """The number of workers in the current generation; 0 before the first batch."""
        return self._session.snapshot.world_size

    @property
    def is_first(self) -> bool:
        """Whether this worker has rank 0, as exactly one worker of a generation does; only that worker
        should log and save.  Before the first batch, it is True on every worker, and a warning is logged
        once."""
        is_first = self.rank == 0 and (self._turns is None or self.world_size > 0)
        return is_first and not self._session.end_reason  # "" unless the run has ended without this worker

    @property
    def run_id(self) -> str:
        """A name for the run, for loggers and folders: the same on all its workers, and different for every
        run."""
        return f"{self._config.run}-{self._config.coordinator_key[:16]}"

    @property
    def step(self) -> int:
        """The number of the run's steps whose updates this worker's parameters contain.

        A worker that missed steps, because it was cut off or its loop stalled, receives them with its next
        batch; until then, the other workers may be ahead.
        """
        return self._session.step

    @property
    def calls_per_step(self) -> int:
        """The number of calls to `optimizer.step` in one step: H with `LocalSteps(every=H)`, otherwise 1.

        Raises `ConfigError` before the optimizer is wrapped.
        """
        return self._wrapped().calls_per_turn

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self._turns is not None and self._turns.is_finished

    @property
    def has_samples(self) -> bool:
        """Whether this worker's batch counts in a mean over samples (see `mean`).

        It is False for a stand-in batch (see `batches`), for a sample that a later micro-batch repeats, and
        before the first batch.  The backward pass must run for every batch, even if `has_samples` is False.

        If a step has fewer samples than micro-batches (`accumulate`), samples are repeated.  The gradient of
        each repetition has a part of the sample's weight; `has_samples` is True only for the last repetition.
        """
        return self._turns is not None and not self._turns.is_stand_in and not self._is_repeated_later

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """The bytes (sent, received) by message type, counted at the socket and including framing."""
        return self._session.connection.traffic

    def moved_bytes(self) -> int:
        """Return how many bytes have been sent, received, and fetched as data files so far.

        May be called from any thread.
        """
        return self._pauses.moved_bytes

    def why_waiting(self) -> str:
        """Return why this worker is not training; "" if it is.  May be called from any thread."""
        return self._session.why_waiting

    # -- what a loop calls -------------------------------------------------------------------------

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        model: nn.Module,
        *,
        exchange: Exchange | LocalSteps | Auto | str | None = None,
        clip_norm: float | None = None,
        average_buffers_every: int = 100,
        compare_every: int = 500,
        overlap: Overlap | None = None,
        wait: str | None = None,
        base: str | None = None,
        send_frozen: Sequence[str] = (),
        weigh_by: str = "samples",
        exchange_device: torch.device | str | None = None,
        unused: str = "zero",
    ) -> GridOptimizer:
        """Wrap `optimizer`, so that its `step()` applies the group's update.  See `GridOptimizer`.

        A list or tuple of optimizers without common parameters, such as `[muon, adamw]`, is used as one; each
        of them is stepped in every step.  Pass several models, such as a generator and a discriminator, as
        one `nn.ModuleList`.

        The loss of a batch must be the mean over its samples, because a worker's gradient is weighted by its
        share of the step's samples; divide a sum by the number of samples.  Gradients are exchanged in
        float32, even those of float64 parameters.

        Args:
            exchange: `Dense()`, `TopK(...)`, `GTopK(...)`, or `LocalSteps(...)` around one of them, the same
                on all workers; `GTopK()` by default.  With "auto" or `Auto(...)`, also within `LocalSteps`,
                the coordinator chooses one of the first three (see docs/planning.md).
            clip_norm: the maximum 2-norm of the exchanged update; not available with `LocalSteps`.
            average_buffers_every: the interval, in steps, at which floating-point buffers (batch norm) are
                averaged.  They are also averaged in the last step of the run, unless that step is skipped.  0
                disables both.  Between two averages, the workers' buffers differ, and so do the results of
                their evaluations.  Averaging destroys a queue of samples, as in MoCo: register the queue with
                `persistent=False`, so that each worker keeps its own, which is neither sent nor saved.  Make
                a codebook a frozen parameter (`send_frozen`) that the loop changes in the same way on all
                workers.
            compare_every: the interval, in steps, at which the workers' states are compared; within the first
                interval, they are compared after steps 1, 2, 4, 8, ...  A state that differs (because of a
                flipped bit, a different kind of processor, or random numbers of the script) is replaced by
                the state of the majority, about a second later or at the end of the run.  0 disables
                comparisons.  The steps after the last comparison are not compared.  Muon multiplies matrices,
                whose rounding depends on the number of threads: call `torch.set_num_threads` with the same
                number on all workers, or use `LocalSteps`, with which moments and local steps may differ.
            overlap: `Overlap()` to exchange gradients during the backward pass; the same on all workers.
                Gradients must then not be changed between `backward()` and `step` (clip with
                `clip_norm=`).
            wait: "all" waits for all workers in every step.  A run of the same workers is then reproducible
                from its seeds on two conditions.  First, shares and exchange must not depend on measurements:
                use `batch_size=`, and an exchange with a fixed topology (but not a dense star, which adds in
                order of arrival).  Second, each worker must have the same rank, which determines its samples:
                use `--order joined` and start the workers in the same order.  The same applies to a run that
                is resumed, because a residual stays with its worker.  "auto" continues without workers whose
                loops have stalled (see docs/stragglers.md).  `wait` must be the same on all workers.  The
                default is the `wait` option of `gridtrain worker`, or "all" if that is not set.
            base: "exact" refuses a worker whose frozen parameters differ in value from those of the run;
                "any" lets each worker have its own, such as another quantization of the same model (see
                docs/frozen-base.md).  `base` must be the same on all workers.  The default is the `base`
                option of `gridtrain worker`, or "exact" if that is not set.
            send_frozen: the names, or patterns such as `*.projection`, of the frozen parameters that are sent
                to newcomers and saved in checkpoints like trained ones, because each process initializes or
                changes them itself; all other frozen parameters are never sent.
            weigh_by: "samples" weights a worker's gradient by its samples; "tokens" weights it by the counts
                that the loop passes to `weigh`.  `weigh_by` must be the same on all workers.
            exchange_device: "cpu" keeps the flat gradient, the residual and what local steps need in host
                memory, so that a GPU holds only the model's own tensors; entries are then selected by the
                CPU.  It may differ between workers.  The default is the device of the parameters.
            unused: "zero" gives a parameter that has no gradient on any worker a zero gradient, so that
                weight decay and momentum continue to change it.  "skip" leaves its `grad` None, so that the
                optimizer skips it, as torch does in one process; use it for alternating updates, as in a GAN,
                for models with branches, and to freeze parameters in some steps.  "skip" needs `Dense()` in
                fp32 without overlap.  `unused` must be the same on all workers.

        Raises:
            ConfigError: an argument is invalid, or the method was already called.
        """
        if self._optimizer is not None:
            raise ConfigError(
                "grid.optimizer was called twice",
                remedy="call grid.optimizer only once: pass several models as one nn.ModuleList, and several "
                "optimizers as a list; in a notebook, run only the cell of the loop again or, for a new "
                "model, call grid.close() and gridtrain.join() first",
            )
        inner = as_one(optimizer)
        check_kinds(inner, model)
        warn_of_sync_norms(model)
        average_buffers_every, compare_every = to_intervals(
            average_buffers_every=average_buffers_every, compare_every=compare_every
        )
        chosen = exchange_of(exchange)
        if isinstance(chosen, Auto):
            chosen = _fit_auto(chosen, inner, overlap)
        kind: Callable[..., GridOptimizer] = GridOptimizer
        if isinstance(chosen, LocalSteps):
            kind = OverlappedLocalSGDOptimizer if chosen.overlap else LocalSGDOptimizer
        wrapped = kind(
            inner,
            model,
            chosen,
            self._session,
            clip_norm=clip_norm,
            average_buffers_every=average_buffers_every,
            compare_every=compare_every,
            overlap=overlap,
            wait=self._config.wait if wait is None else wait,
            base=FrozenBase(model, sent=send_frozen, rule=self._config.base if base is None else base),
            weigh_by=weigh_by,
            exchange_device=exchange_device,
            unused=unused,
        )
        self._optimizer = wrapped
        self._track_scalers()
        self._model_state = WholeModelState(self._session, wrapped, checkpoint_options(self._config))
        if self._pauses.is_controlled:  # started by an agent: the owner may compare the workers' speed
            self._session.report_figures({"float32_flops": device_flops(device_of(model))})
        return wrapped

    def pipeline(
        self,
        model: Model | Blueprint | Callable[[], Model],
        optimizer: MakeOptimizer,
        *,
        stages: int,
        loss_fn: LossFunction,
        micro_batches: int | str = "auto",
        exchange: Exchange | None = None,
        cuts: Sequence[int] | None = None,
        schedule: str = "1f1b",
        ahead: float = 1.0,
        wire: str = "exact",
        clip_norm: float | None = None,
        average_buffers_every: int = 100,
        compare_every: int = 500,
        rematerialise: bool = True,
        device: torch.device | str = "cpu",
        seed: int = 0,
        init: Init | None = None,
        profile: Profile | Sequence[Layer] | None = None,
        memory_bytes: int | None = None,
        base: str | None = None,
        send_frozen: Sequence[str] = (),
    ) -> Pipeline:
        """Train a model that no worker holds as a whole; each worker holds one of its stages.

        S x R workers hold S stages in R replicas.  All members of a replica get the same batch from
        `grid.batches`.  One batch is one step: `loss = pipe.step(inputs, targets)`.

        Args:
            model: a chain of blocks (`nn.Sequential`, a list, `gridtrain.pipeline.Sequence`) on the meta
                device, a function that makes it (called under `torch.device("meta")`), or a `Blueprint`.
            optimizer: a function that makes a stage's optimizer, or a list of optimizers, from the stage's
                parameters: `functools.partial(torch.optim.SGD, lr=0.1)`.  If it returns a list, pass
                parameter groups to each optimizer, `SGD([{"params": matrices}], lr=0.1)`: a stage may have no
                parameters for it, and torch rejects an empty list.
            stages: the number of stages, S; a run needs at least this many workers.
            loss_fn: a function that takes the last layer's output and the targets, and returns the mean loss
                over the samples as a scalar tensor.
            micro_batches: the number of pieces into which a batch is divided; with "auto", the first four
                steps try 4 and 8 micro-batches per stage, and then all workers use the number that is best
                according to the measured times.
            exchange: the exchange among the replicas of a stage; `Dense()` by default, which needs no
                residual, and sends nothing while a stage has one replica.
            cuts: (S + 1,) the index of the first block of each stage, then the total number of blocks; the
                same on all workers, for example `gridtrain.pipeline.partition(...).cuts`.  By default the
                largest stage has as few parameter bytes as possible; if the workers' devices differ, the
                coordinator chooses the cuts.
            schedule: "1f1b", or "fill-drain" as in GPipe, which stores more micro-batches.
            ahead: with 1F1B, the number of additional micro-batches in flight per following stage, so that
                the latency of links does not keep a stage waiting (`gridtrain.core.stages.schedule`).
            wire: the encoding of activations and their gradients: "exact", "fp16", "bf16" or "int8".
            clip_norm: the maximum 2-norm of the whole model's update.
            average_buffers_every: the interval, in steps, at which floating-point buffers are averaged over a
                stage's replicas; as in `Grid.optimizer`.
            compare_every: the interval, in steps, at which the states of a stage's replicas are compared; as
                in `Grid.optimizer`.
            rematerialise: whether to store only the inputs of a stage for each micro-batch, and recompute all
                other activations.
            device: the device of this worker's stage.
            seed: the seed for the initial parameters and for dropout; the same on all workers.
            init: the function that initializes a block; see `gridtrain.pipeline.Blueprint`, which also
                describes the supported models.
            profile: a profile of the blocks (`gridtrain.pipeline.profile`), which is used to repartition the
                model when workers are lost; without it, a block's time is assumed to be proportional to its
                bytes, and activations are not counted.
            memory_bytes: the bytes of memory that training may use on this worker; by default 90 % of the
                GPU's memory or, on a CPU, of the host's free memory.
            base, send_frozen: as in `Grid.optimizer`, for the whole model.

        Raises:
            ConfigError: an argument is invalid, the model cannot be partitioned in this way, or a model was
                already wrapped.
        """
        if self._optimizer is not None:
            raise ConfigError(
                "grid.pipeline was called for a second model", remedy="train only one model in a run"
            )
        if self._scalers:
            raise unsupported_scaler_error()
        average_buffers_every, compare_every = to_intervals(
            average_buffers_every=average_buffers_every, compare_every=compare_every
        )
        (seed,), at = to_ints(seed=seed), to_device(device)
        if not isinstance(rematerialise, bool):
            raise ConfigError(
                f"rematerialise is {rematerialise!r}; it must be True or False",
                remedy="try rematerialise=True",
            )
        make_schedule, schedule_name = schedule_for(schedule, ahead)
        options = PipelineOptions(
            stages=stages,
            micro_batches=parse_micro_batches(micro_batches),
            exchange=exchange if exchange is not None else Dense(),
            loss=loss_fn,
            schedule=make_schedule,
            schedule_name=schedule_name,
            ahead=ahead,
            wire=parse_wire(wire),
            clip_norm=clip_norm,
            average_buffers_every=average_buffers_every,
            compare_every=compare_every,
            rematerialise=rematerialise,
            seed=seed,
        )
        blueprint = model if isinstance(model, Blueprint) else Blueprint(model, seed=seed, init=init)
        staging = ModelStages(blueprint, stages, cuts=cuts, device=at)
        frozen = FrozenBase(
            staging.whole,
            sent=send_frozen,
            rule=self._config.base if base is None else base,
            pieces=staging.frozen_blocks,
        )
        pipe = Pipeline(staging, optimizer, options, self._session, frozen)
        self._model_state = StageModelState(
            self._session,
            pipe.held,
            checkpoint_options(self._config),
            profile=profile,
            memory_bytes=training_memory_bytes(memory_bytes, staging.device),
            measure_flops=lambda: device_flops(staging.device),
        )
        self._optimizer = pipe
        return pipe

    @closed_at_exit
    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        max_batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        accumulate: int = 1,
        seed: int = 0,
        length: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        collate_fn: Callable[[list[Any]], Any] = sampler.collate,
        weigh: bool = True,
    ) -> Generator[Any, None, None]:
        """Yield this worker's batches until the run has ended.

        In a pass over the data set, only one worker uses each sample.  The loop body calls `optimizer.step()`
        once for each yielded batch, or once for every `accumulate` batches.  In a step in which this worker
        has no samples, as at the end of a pass, the method yields a stand-in batch, so that schedulers take
        the same number of steps on all workers; the gradient of a stand-in batch is ignored.

        A further call with the same arguments continues the run where the loop was left, for example after a
        notebook cell was interrupted; a batch whose step was not taken is yielded again.

        With `LocalSteps(every=H)`, a step of the run (in `steps=`, `grid.step` and all settings that count
        steps) is H steps of the loop; sizes and `accumulate` refer to one step of the loop.

        Args:
            dataset: the data set, the same on all workers.  A `ShardedDataset` is read shard by shard: a
                worker opens only the files that the group has leased to it.  An iterable data set must yield
                the same samples each time.  It is read in its own order (`set_epoch(pass)` is called if it
                exists), and every worker skips the samples of the other workers.  For data that the loop
                generates, as in reinforcement learning, pass `range(n)`, whose numbers can serve as seeds:
                an iterable data set that generates different samples each time is rejected.
            batch_size: the number of samples in one yielded batch on this worker.  A batch has fewer, at
                least one, at the end of a pass, or if `batch_size` exceeds 64 times the median of all
                workers' batch sizes; the coordinator logs the latter.
            global_batch_size: the number of samples in a step over all workers.  It stays constant while
                workers join and leave, and is divided among them according to their measured speed.  A step
                is smaller at the end of a pass, or if a worker is lost during the step; the samples of the
                lost worker belong to later steps, so that a pass may take one more step.
            max_batch_size: with `global_batch_size`, the largest batch that this worker can process; it is
                exceeded while the group is too small, which the coordinator logs.
            epochs, steps: the length of the run, for all workers together; pass exactly one of the two.
            accumulate: the number of yielded batches in one step; the loop must divide the mean loss of each
                batch by this number.
            seed: the seed for the order of the samples, the same on all workers.
            length: the number of samples in a pass over an iterable data set without `__len__`.
            num_workers: the number of processes that read batches ahead; at most 1 for an iterable data set.
                Batches that are not needed after a change of the group are dropped, because a sample counts
                only when its step commits.
            prefetch_factor: the number of steps that each of these processes reads ahead.
            collate_fn: a function that makes a batch from a list of samples.  A batch has the weight of all
                the samples in this list; if the function leaves some out, use `weigh_by="tokens"`, and call
                `grid.weigh` with the number of remaining samples.
            weigh: whether each sample has the same weight even if a step's samples cannot be divided evenly
                into `accumulate` batches: their sizes then differ by one sample, and the accumulated gradient
                is scaled between two batches.  Set it to False for a loop that reads all batches of a step
                before it computes, or that weights the batches itself.

        Raises:
            ConfigError: an argument is invalid, the optimizer has not been wrapped, or the loop does not call
                `optimizer.step()` once for each step.
            DataError: the data set cannot be read.
            JoinRefused: the coordinator refuses or has removed this worker.
        """
        batch_size, global_batch_size, max_batch_size, accumulate, epochs, steps, seed, length = to_ints(
            batch_size=batch_size, global_batch_size=global_batch_size, max_batch_size=max_batch_size,
            accumulate=accumulate, epochs=epochs, steps=steps, seed=seed, length=length,
        )  # fmt: skip
        readers.check_kind(dataset)
        check_readers(dataset, num_workers, prefetch_factor)
        sizes = BatchSizes(batch_size, global_batch_size, max_batch_size, accumulate, self.calls_per_step)
        turns = self._join_run(dataset, sizes, epochs, steps, seed, length)
        self._wrapped().set_backwards_per_step(accumulate)
        make_reader = readers.IterableReader if readers.is_iterable(dataset) else readers.MapReader
        reader = make_reader(dataset, turns.spec, accumulate, collate_fn)
        if self._prefetcher is not None:
            self._prefetcher.close()
        ahead = Prefetcher(reader, num_workers, prefetch_factor, self._fetches) if num_workers else None
        self._prefetcher = ahead
        further = partial(spread_samples, dataset, collate_fn)
        tokens = TokenCheck(
            self._wrapped().model, further, is_tokens=getattr(dataset, "yields_tokens", False)
        )
        if isinstance(dataset, ShardedDataset) and ahead is None:
            dataset.while_opening = self.evaluation  # a file may have to be fetched first
        try:
            for spans in self._run_turns():
                with self._reading(dataset):
                    if ahead is not None and turns.has_samples:
                        batches = ahead.read(tuple(spans), turns.predict(ahead.depth))
                    else:
                        batches = reader.read(spans)
                    if failed_reads := getattr(dataset, "failed_reads", 0):
                        self.report(failed_reads=failed_reads)
                    for batch in batches:
                        tokens.check(batch)
                yield from self._counted(batches, spans, weigh=weigh) if accumulate > 1 else batches
        finally:
            if ahead is not None:
                ahead.close()

    def sampler(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        max_batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int = 0,
    ) -> sampler.GridSampler:
        """Return a sampler for `DataLoader(dataset, batch_sampler=grid.sampler(dataset, ...))`.  The
        arguments have the same meaning as in `batches`.

        The loader must not run ahead of the steps: use it with `num_workers=0`.  To read ahead, use
        `grid.batches(..., num_workers=...)`, which drops the right batches when the group changes.
        """
        batch_size, global_batch_size, max_batch_size, epochs, steps, seed = to_ints(
            batch_size=batch_size, global_batch_size=global_batch_size, max_batch_size=max_batch_size,
            epochs=epochs, steps=steps, seed=seed,
        )  # fmt: skip
        sizes = BatchSizes(batch_size, global_batch_size, max_batch_size, calls_per_step=self.calls_per_step)
        readers.check_kind(dataset)
        if readers.is_iterable(dataset):
            raise ConfigError(
                f"{describe_type(dataset)} cannot be indexed, so it cannot be sampled",
                remedy="use grid.batches(dataset, ...)",
            )
        turns = self._join_run(dataset, sizes, epochs, steps, seed)
        turns.feeds_loader = True
        return sampler.GridSampler(turns.spec, self._run_turns, dataset)

    def weigh(self, count: int | torch.Tensor) -> None:
        """Weight this worker's gradient by `count`, such as the number of tokens over which its loss is
        averaged, so that the group's gradient is the gradient of the mean loss over all tokens of the step.

        The optimizer must have `weigh_by="tokens"`.  Call `weigh` once for each batch, before its backward
        pass: the counts of the other workers then arrive during that pass.  With `accumulate=N`, call it
        either before each of the N backward passes, with the mean loss of each divided by N, or once for the
        step, if the accumulated gradient is the mean over the tokens of all N batches.  With a count of 0,
        the gradient is ignored.  Gradients that the loop sets itself, such as those of `torch.func.grad`, are
        not weighted within a step: for them, call `weigh` once for the step.
        """
        wrapped = self._wrapped()
        if isinstance(wrapped, Pipeline):
            raise ConfigError(
                "grid.weigh was called for a pipeline, whose steps are weighted by samples",
                remedy="weight the losses of the samples, as docs/pipeline.md describes",
            )
        try:
            if (tokens := int(count)) != count:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"the weight of a batch is {count!r}; it must be a number of tokens",
                remedy="pass the number of tokens over which the loss is averaged",
            ) from None
        wrapped.weigh(tokens)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Report this worker as busy while the `with` block, such as a long evaluation, runs; the group then
        does not consider it stalled."""
        self._session.set_busy(True)
        try:
            yield
        finally:
            self._session.set_busy(False)

    def mean(self, value: float | torch.Tensor, *, weight: float | None = None) -> float:
        """Return the average of `value` over all workers; all of them must make this call at the same point.

        Each worker's value counts equally, or in proportion to its `weight`, which all workers or none must
        pass.  Weight the mean of a batch by its number of samples.  A value with the weight 0, as for a
        stand-in batch (see `has_samples`), is ignored:

            grid.mean(loss, weight=len(inputs) if grid.has_samples else 0)

        If all weights are 0, the average is NaN.  A weighted average is the quotient of two averages, so its
        last digit can be rounded even if all values are equal.  It takes two exchanges; if a worker is lost
        between the two, that worker counts in only one of them, and the average is inexact, but equal on all
        workers.

        All workers that make the call with a step's batch, before `optimizer.step()`, receive the same
        average, even if workers join or leave during the call, and so can decide together to end the loop.  A
        worker that is cut off from the group, or leaves it, receives its own value; with `LocalSteps` or
        after `step()`, this can also happen to a worker that sends its state to a newcomer.  A worker that
        finishes the step without the call is left out and named in the log.  If a worker's value is not
        finite, neither is the average.

        Raises `ConfigError` on rank 0 if workers omit the call at least three times in a row, and at least
        half of all workers omit it the last time; and on any worker if a weight is negative or not finite.
        Before the first batch, a worker receives its own value, and a warning is logged once.
        """
        self._warn_before_first_batch()
        number = float(value.item() if isinstance(value, torch.Tensor) else value)
        if weight is None:
            return self._session.average(number)
        if not 0 <= (own := float(weight)) < math.inf:
            raise ConfigError(
                f"the weight of a number in grid.mean is {own:g}; it must be finite and at least 0",
                remedy="pass the number of samples over which the number is averaged",
            )
        weighted = self._session.average(own * number if own else 0.0)
        total = self._session.average(own)
        return weighted / total if total else math.nan

    def report(self, **figures: float) -> None:
        """Report figures, such as `loss=...`, for `gridtrain status` and the run's owner.

        Values that are not finite are left out.  Raises `ConfigError` if a name has more than 64 bytes,
        or control or invisible characters, or if there are more than `reported_figures.MAX_FIGURES` names.
        """
        self._session.report_figures(self._figures.filter_valid(figures))

    def track(self, **trackers: serialization.Stateful) -> None:
        """Add stateful objects, such as schedulers and weight averages, to the state that a newcomer
        receives.

        Raises `ConfigError` for a new name after the first batch: newcomers, and workers that continue from a
        checkpoint, load a state before the loop begins.
        """
        wrapped = self._wrapped()
        late = sorted(serialization.script_trackers(trackers).keys() - wrapped.trackers.keys())
        if self._session.is_in_turn and late:
            raise ConfigError(
                f"grid.track was given {late[0]!r} after the first batch, so workers that join later or "
                "continue from a checkpoint could not load the state",
                remedy="create the object, and call grid.track(...) with the same names on all workers, "
                "before the loop",
            )
        wrapped.track(**trackers)

    def scaler(self, **kwargs: Any) -> GridScaler:
        """Return a `torch.amp.GradScaler` whose scale is always the same on all workers, including
        newcomers; not available for a pipeline.

        If a gradient overflows, all workers skip the step and reduce the scale.  The log and `gridtrain
        status` report this as a worker's problem only from the tenth skipped step within 100 steps.
        """
        if isinstance(self._optimizer, Pipeline):
            raise unsupported_scaler_error()
        made = GridScaler(**kwargs)
        self._scalers = (*self._scalers, made)
        self._track_scalers()
        return made

    def led_by(self, agent: AgentControl, connect: MakeTransport, limit: SetRateLimits) -> None:
        """Let `agent`, the process of `gridtrain worker`, pause this worker and limit its traffic; see
        `PauseController`.

        Args:
            connect: a function that creates a transport for rejoining after a pause.
            limit: a function that changes the rate limits of the current transport.
        """

        def limit_all(upload_Bps: float | None, download_Bps: float | None) -> None:
            limit(upload_Bps, download_Bps)
            self._session.connection.limit_upload(upload_Bps)

        self._pauses = PauseController(self._session, agent, connect, limit_all, self._fetches)

    def close(self, reason: str = "the training script ended before the run") -> None:
        """Leave the run.  The method is idempotent, and is called automatically when the script ends.

        Call it before you load other weights, such as the best, because it saves the model of the last step:
        no model is saved if the parameters have changed since the loop's end, or since the start of a step in
        which the loop ended.  Changes through `.data` are noticed only in a few sampled values.  If a
        variable refers to the iterator of `grid.batches(...)` and the loop changes parameters after its
        steps, delete the variable first, because the loop's end is recorded only then.
        """
        if os.getpid() != self._process:
            return  # a forked child: only its parent takes part in the run
        atexit.unregister(self._close_at_exit)
        try:
            if not self.finished and not self._is_closed:
                self._is_closed = True
                if self._model_state is not None and self._turns is not None:
                    budget_bytes = self._pauses.residual_budget_bytes
                    is_settled = isinstance(self._optimizer, GridOptimizer) and self._optimizer.is_settled
                    between_steps = self._turns.is_stopped or (self._session.is_turn_done and is_settled)
                    self._model_state.leave(budget_bytes, between_steps=between_steps)
        finally:
            self._session.close("its run is finished" if self.finished else reason)
            if self._model_state is not None:
                self._model_state.close(CHECKPOINT_TIMEOUT_S, is_run_over=self.finished)
            self.resources.close()

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close_after(error)

    def _close_at_exit(self) -> None:
        self._close_after(uncaught_error())

    def _close_after(self, error: BaseException | None) -> None:
        if isinstance(error, BudgetSpent):
            self._pauses.report_spent()
        if self._model_state is not None:
            # Ctrl-C, SIGTERM and errors in waits for a batch or the group are not the script's failures.
            is_own = error is not self._read_error and not self._session.has_ended_by(error)
            self._model_state.has_failed = isinstance(error, Exception) and is_own
        reason = describe_end(error)
        if self._pauses.has_lost_agent:
            reason = f"`gridtrain worker`, which ran its script, has ended unexpectedly; {reason}"
        self.close(reason)

    # -- inside ------------------------------------------------------------------------------------

    def _track_scalers(self) -> None:
        """Add the scalers to the optimizer's state, as soon as there is an optimizer."""
        if isinstance(self._optimizer, GridOptimizer) and self._optimizer.shares_scale:
            prefix = serialization.INTERNAL_PREFIX
            named = {f"{prefix}scaler{number or ''}": each for number, each in enumerate(self._scalers)}
            self._optimizer.track(**named)

    def _wrapped(self) -> GridOptimizer | Pipeline:
        if self._optimizer is None:
            raise ConfigError(
                "the optimizer has not been wrapped yet",
                remedy="call optimizer = grid.optimizer(optimizer, model, ...) first",
            )
        return self._optimizer

    def _join_run(
        self,
        dataset: Any,
        sizes: BatchSizes,
        epochs: int | None,
        steps: int | None,
        seed: int,
        length: int | None = None,
    ) -> Turns:
        wrapped = self._wrapped()
        assert self._model_state is not None
        self._check_running()
        sizes.check()
        check_values(wrapped.model)
        if self._config.export_dir is not None:
            export_folder(self._config.run, self._config.export_dir)
        if isinstance(dataset, ShardedDataset):
            dataset.obey(self._fetches)
        size, data_text = readers.measure_dataset(dataset, length)
        shards = dataset.shard_sizes if isinstance(dataset, ShardedDataset) else ()
        spec = LedgerSpec(size, seed, epochs, steps, delay=wrapped.delay, shards=shards)
        data_ledger.validate(spec)
        given = spec, sizes, data_text
        if self._session.is_joined:
            if given != self._given:
                self._session.check_not_joined()
            assert self._turns is not None
            return self._turns
        self._given = given
        self._turns = Turns(self._session, wrapped, self._model_state, self._pauses, spec, sizes)
        self._model_state.join(run_facts(wrapped, data_text), spec, sizes)
        return self._turns

    def _check_running(self) -> None:
        """Raise `ConfigError` if the run has ended, or this worker has left it."""
        if self.finished:
            assert self._turns is not None
            raise ConfigError(
                f"the run of {self._turns.length_text} has ended",
                remedy="iterate once, not once for each epoch: epochs= or steps= is the length of the whole "
                "run; for another run, call gridtrain.join()",
            )
        if self._is_closed:
            raise ConfigError(
                "this worker has left the run: its grid was closed",
                remedy="call gridtrain.join(), grid.optimizer(...) and grid.batches(...) again",
            )

    @closed_at_exit
    def _run_turns(self) -> Generator[Sequence[Span], None, None]:
        """Yield this worker's positions in the data for each call to `optimizer.step`; export the model when
        the run ends."""
        turns, model_state = self._turns, self._model_state
        assert turns is not None and model_state is not None
        was_finished = turns.is_finished  # a DataLoader may ask once more after the end
        if was_finished and not turns.is_stopped and not self._has_warned_of_end:
            self._has_warned_of_end = True
            log.warning(
                "this iteration yields nothing, because the run of %s has ended -> iterate once, not once "
                "for each epoch: epochs= or steps= is the length of the whole run",
                turns.length_text,
            )
        yield from turns
        if turns.is_finished and not turns.is_stopped and not was_finished:
            finish_run(self._session, model_state, self._config, self._pauses.await_stop)

    @contextmanager
    def _reading(self, dataset: Any) -> Iterator[None]:
        """Record an error in the `with` block, in which the script waits for its next batch and has not begun
        the step."""
        try:
            yield
        except Exception as error:
            self._read_error = error
            if isinstance(error, DataError):
                failed_reads = max(1, getattr(dataset, "failed_reads", 0))  # 0: another process counted them
                what = f"{error.summary}; " if error.summary else ""
                text = f"its data cannot be read ({what}failed reads: {failed_reads}); see its output"
                self._session.failure = " ".join([text, *getattr(error, "__notes__", ())])
            elif not isinstance(error, GridtrainError):
                self._session.failure = f"its data cannot be read: {sampler.describe_read_error(error)}"
            raise

    def _counted(self, batches: Sequence[Any], spans: Sequence[Span], *, weigh: bool) -> Iterator[Any]:
        """Yield a step's micro-batches and count them; with `weigh`, set the weight of each.  The weights of
        a stand-in batch have no effect."""
        samples = data_ledger.count_samples(spans)
        weights = readers.micro_batch_weights(samples, len(batches))
        repeated = readers.is_repeated_later(samples, len(batches))
        wrapped = self._wrapped()
        assert isinstance(wrapped, GridOptimizer)
        for number, batch in enumerate(batches):
            if weigh:
                wrapped.weights.begin_micro_batch(number, weights)
            wrapped.requested_batches, self._is_repeated_later = number + 1, repeated[number]
            yield batch


def _fit_auto(auto: Auto, inner: torch.optim.Optimizer, overlap: Overlap | None) -> Auto:
    """Return `auto`, restricted to dense exchanges if an optimizer is of the Adam family (has `betas`).

    Raises `ConfigError` if `overlap` is set.
    """
    if overlap is not None:
        raise ConfigError(
            'overlap was set with exchange="auto", but buckets depend on the chosen exchange',
            remedy='choose an exchange, such as the one chosen by a run with exchange="auto"',
        )
    is_adam = any("betas" in part.defaults for part in parts_of(inner))
    return replace(auto, density=None, sparse=False) if is_adam else auto
