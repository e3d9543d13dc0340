"""`grid = gridtrain.join()` and its methods: the interface of a training script.

`Grid` connects a PyTorch training loop to the parts that do the work:

    gridtrain.join()      transport, GroupSession (I/O thread) --> Grid
    grid.optimizer(...)   GridOptimizer or LocalSGDOptimizer, and WholeModelState for checkpoints and residual
    grid.pipeline(...)    Pipeline, and StageModelState
    grid.batches(...)     Turns: one item for each call of `optimizer.step`, until the run has ended

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
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gridtrain._version import __version__
from gridtrain.config import (
    Auto,
    Deadlines,
    Exchange,
    GTopK,
    JoinConfig,
    LocalSteps,
    Overlap,
    exchange_of,
)
from gridtrain.core.commit import data_ledger
from gridtrain.core.group.invitation import parse
from gridtrain.core.messages import Facts, LedgerSpec, Span
from gridtrain.core.stages.stage_cost import Layer
from gridtrain.errors import BudgetSpent, ConfigError, DataError, GridtrainError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.fault_injection import Faults
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.network.transport.stack import build_stack
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.pipeline import model_costs
from gridtrain.pipeline.blueprint import Blueprint, Init, Model
from gridtrain.pipeline.micro_batch_count import parse_micro_batches
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.profiler import Profile
from gridtrain.pipeline.stage import LossFunction
from gridtrain.pipeline.stage_model_state import StageModelState
from gridtrain.pipeline.stage_state import (
    MakeOptimizer,
    PipelineOptions,
    check_stages,
    parse_wire,
    schedule_for,
)
from gridtrain.runtime.client.agent_link import CONTROL_VARIABLE, AgentControl, AgentLink, NoAgent
from gridtrain.runtime.client.coordinator_client import parse_coordinator_address
from gridtrain.runtime.client.enrollment import enroll
from gridtrain.runtime.client.worker_naming import (
    default_listen_address,
    random_name,
    run_folder_name,
    state_directory,
)
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.process_hooks import (
    describe_end,
    install_error_hook,
    install_sigterm_handler,
    uncaught_error,
)
from gridtrain.sdk.device_speed import device_flops, float32_flops
from gridtrain.sdk.reported_figures import ReportedFigures, check_names
from gridtrain.sdk.turns import Turns
from gridtrain.tools.options.resolve import join_settings
from gridtrain.tools.options.runfile import RunFile
from gridtrain.training.checkpoint import serialization
from gridtrain.training.checkpoint.frozen_base import FrozenBase
from gridtrain.training.checkpoint.pretrained import adapter_facts
from gridtrain.training.data import readers, sampler
from gridtrain.training.data.batch_sizes import (
    BatchSizes,
    check_readers,
    describe_optimizer,
    parse_int,
    to_ints,
    unsupported_scaler_error,
)
from gridtrain.training.data.fetch_meter import FetchMeter
from gridtrain.training.data.prefetch import Prefetcher
from gridtrain.training.data.shards import ShardedDataset
from gridtrain.training.grad_scaler import GridScaler
from gridtrain.training.local_sgd import LocalSGDOptimizer
from gridtrain.training.model_check import TokenCheck, check_values, spread_samples
from gridtrain.training.model_state import CheckpointOptions, ModelState, WholeModelState
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.overlapped_local_sgd import OverlappedLocalSGDOptimizer
from gridtrain.training.pause import MakeTransport, PauseController, SetRateLimits

log = logging.getLogger("gridtrain")

CHECKPOINT_TIMEOUT_S = 30.0
"""The seconds for which `Grid.close` waits for a checkpoint that is being written or uploaded."""

FINAL_CHECKPOINT_TIMEOUT_S = 1800.0
"""The seconds for which the end of a run waits for the previous checkpoint, for that of the last step, and
for its upload."""


def join(
    invitation: str | None = None,
    *,
    name: str | None = None,
    listen: str | None = None,
    advertise: str | None = None,
    upload_limit: str | None = None,
    download_limit: str | None = None,
    export_dir: str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_keep: int | None = None,
    checkpoints: str | None = None,
    handover_mib: int | None = None,
    state_dir: str | None = None,
    relay: bool | None = None,
    unencrypted: bool | None = None,
) -> Grid:
    """Join a run.  Arguments that are not given are read from the variables `GRIDTRAIN_*`, which are set by
    `gridtrain worker`, and in a script that was started by hand also from run.toml.

    Args:
        invitation: the string "gridtrain1:..." from the run's owner; not needed under `gridtrain worker`.
        name: the name of this worker, which the other workers can see; by default a random name.
        listen: the address to which peers connect, "tcp://interface:port"; port 0 uses any free port.  The
            default is a free port of the interface that leads to the coordinator.
        advertise: the address that is announced to peers, if it differs from `listen`.
        upload_limit, download_limit: rates such as "20Mbit"; they also apply to relayed traffic.
        export_dir: the folder to which the first worker writes the final model; the state directory by
            default.
        checkpoint_every: the number of steps between two checkpoints on this worker's disk, 500 by default; 0
            writes none.  If all workers have left a run, it continues from the latest checkpoint of a worker
            that returns.
        checkpoint_keep: the number of checkpoints to keep, 2 by default.
        checkpoints: a URL such as "s3://bucket/run", to which checkpoints are uploaded as well; this worker
            continues from its latest one if its disk has no later one.  See docs/operations.md.
        handover_mib: the maximum size in MiB of the residual that this worker sends to another worker when it
            leaves before the end, the largest values first; 16 by default, which is also the upper limit.
        state_dir: the folder for checkpoints.
        relay: whether to forward messages between two members that cannot reach each other; the messages are
            encrypted end to end.  True by default.
        unencrypted: whether to disable encryption, for benchmarks; the coordinator must disable it, too.

    Raises:
        ConfigError: an argument or variable is malformed, or there is no invitation.
        CoordinatorUnreachable: the coordinator did not answer in time.
        JoinRefused: the coordinator refused this worker; the message says why.
    """
    install_error_hook()
    arguments: dict[str, str | None] = {
        "name": name or None,
        "listen": listen,
        "advertise": advertise,
        "upload_limit": upload_limit,
        "download_limit": download_limit,
        "export_dir": export_dir,
        "checkpoint_every": None if checkpoint_every is None else str(checkpoint_every),
        "checkpoint_keep": None if checkpoint_keep is None else str(checkpoint_keep),
        "checkpoints": checkpoints,
        "handover_mib": None if handover_mib is None else str(handover_mib),
        "state_dir": state_dir,
        "relay": None if relay is None else "yes" if relay else "no",
        "unencrypted": "yes" if unencrypted else None,
    }
    if "GRIDTRAIN_COORDINATOR" not in os.environ:  # otherwise the agent has read run.toml
        arguments |= join_settings(arguments, os.environ, RunFile.find(os.environ))
    arguments["name"] = arguments["name"] or os.environ.get("GRIDTRAIN_NAME") or random_name()
    with ExitStack() as resources:
        if invitation is not None:
            entry = resources.enter_context(
                enroll(
                    parse(invitation),
                    Deadlines().connect_s,
                    unencrypted=arguments["unencrypted"] == "yes",
                )
            )
            arguments |= entry.join_options()
        config = JoinConfig.from_environment(None, **arguments)
        config = replace(config, coordinator=parse_coordinator_address(config.coordinator))
        check_names(config)
        identity = Identity.read(Path(config.identity))
        connector = _Connector(config, identity)
        transport, allowlist = connector.connect()
        grid = Grid(transport, config, allowlist, connector.faults)
        if control := os.environ.get(CONTROL_VARIABLE):
            grid.led_by(AgentLink(control, grid.moved_bytes), connector.connect, connector.set_rate_limits)
        grid.resources = resources.pop_all()  # the identity is this worker's until its grid is closed
        return grid


class _Connector:
    """Creates a worker's transport, and a new transport after each pause, with the current rate limits."""

    def __init__(self, config: JoinConfig, identity: Identity) -> None:
        self._config, self._identity = config, identity
        self._upload_Bps = parse_rate(config.upload_limit) if config.upload_limit else None
        self._download_Bps = parse_rate(config.download_limit) if config.download_limit else None
        self.faults = Faults.parse(config.faults) if config.faults else None
        self._sockets: ZeroMQTransport | None = None

    def connect(self) -> tuple[FlowControlTransport, PeerAllowlist]:
        config, encrypted = self._config, self._config.unencrypted != "yes"
        allowlist = PeerAllowlist(bytes.fromhex(config.coordinator_key), relays=config.relay != "no")
        self._sockets = ZeroMQTransport(
            self._identity,
            f"gridtrain {__version__}",
            gate=allowlist,
            encrypted=encrypted,
            plain_anywhere=not encrypted,  # the coordinator has to allow it, too
            upload_Bps=self._upload_Bps,
            download_Bps=self._download_Bps,
        )
        with_faults = partial(self.faults.over, name=config.name) if self.faults is not None else None
        transport = build_stack(
            self._sockets, self._identity, may_relay=allowlist.may_relay, with_faults=with_faults
        )
        return transport, allowlist

    def set_rate_limits(self, upload_Bps: float | None, download_Bps: float | None) -> None:
        self._upload_Bps, self._download_Bps = upload_Bps, download_Bps
        if self._sockets is not None:
            self._sockets.set_rate_limits(upload_Bps, download_Bps)


class Grid:
    """This worker's interface to the run.  Use it on the training thread."""

    _scalers: tuple[GridScaler, ...] = ()
    _optimizer: GridOptimizer | Pipeline | None = None

    def __init__(
        self,
        transport: FlowControlTransport,
        config: JoinConfig,
        allowlist: PeerAllowlist,
        faults: Faults | None = None,
    ) -> None:
        self._config = replace(config, listen=config.listen or default_listen_address(config.coordinator))
        self.resources = ExitStack()  # released when the grid is closed
        self._process = os.getpid()
        self._session = GroupSession(transport, self._config, allowlist)
        if faults is not None:
            self._session.on_turn_begun = partial(faults.stall, config.name)
        try:
            self._session.connection.start()
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
        self._clip_norm: float | None = None
        self._wait = "all"
        self._is_closed = False
        self._data_failure = ""  # why this worker leaves, if its data cannot be read
        atexit.register(self._close_at_exit)
        install_sigterm_handler()

    # -- where we are ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank in the running generation; 0 before the first generation."""
        return self._session.snapshot.rank

    @property
    def world_size(self) -> int:
        """The number of workers in the running generation; 0 before the first generation."""
        return self._session.snapshot.world_size

    @property
    def is_first(self) -> bool:
        """Whether this worker has rank 0, as exactly one worker of a generation does; use it for logging and
        saving."""
        return self.rank == 0

    @property
    def run_id(self) -> str:
        """A name of the run that is equal on all its workers, and differs from that of every other run: for
        loggers and folders."""
        return f"{self._config.run}-{self._config.coordinator_key[:16]}"

    @property
    def step(self) -> int:
        """The number of steps committed so far, over the whole run."""
        return self._session.step

    @property
    def calls_per_step(self) -> int:
        """The number of calls of `optimizer.step` in one step: H with `LocalSteps(every=H)`, otherwise 1.

        Raises `ConfigError` before the optimizer is wrapped.
        """
        return self._wrapped().calls_per_turn

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self._turns is not None and self._turns.is_finished

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """The bytes (sent, received) by message type, counted at the socket and including framing."""
        return self._session.connection.traffic

    def moved_bytes(self) -> int:
        """Return the bytes sent, received and fetched so far.  May be called from any thread."""
        return self._pauses.moved_bytes

    # -- what a loop calls -------------------------------------------------------------------------

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
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
    ) -> GridOptimizer:
        """Wrap `optimizer`, so that its `step()` applies the group's update.  See `GridOptimizer`.

        Args:
            exchange: `Dense()`, `TopK(...)`, `GTopK(...)`, or `LocalSteps(...)` around one of them, the same
                on all workers; `GTopK()` by default.  With "auto" or `Auto(...)`, also within `LocalSteps`,
                the coordinator chooses one of the first three (see docs/planning.md).
            clip_norm: the maximum 2-norm of the exchanged update; not available with `LocalSteps`.
            average_buffers_every: the number of steps between two averagings of floating-point buffers (batch
                norm).
            compare_every: the number of steps between two comparisons of the workers' states; a state that
                differs (because of a flipped bit or another kind of processor) is replaced by the state of
                the majority.  0 disables comparisons.
            overlap: `Overlap()` to exchange while backward is still computing; it must be the same on all
                workers.  Gradients must then not be changed between backward and `step` (clip with
                `clip_norm=`).
            wait: "all" waits for all workers in every step, so that a run is reproducible from its seeds;
                "auto" continues without workers whose loops have stalled (see docs/stragglers.md).  It must
                be the same on all workers.  The default is the option `wait` of `gridtrain worker`, "all" if
                it is not set.
            base: "exact" refuses a worker whose frozen parameters have other values than those of the run;
                "any" lets each worker have its own, such as another quantization of the same model (see
                docs/frozen-base.md).  It must be the same on all workers.  The default is the option `base`
                of `gridtrain worker`, "exact" if it is not set.
            send_frozen: names of frozen parameters, or patterns such as `*.projection`, that are sent to
                joining workers and saved in checkpoints like trained ones, because each process initializes
                or changes them; all other frozen parameters are never sent.
            weigh_by: "samples" weights a worker's gradient by its samples; "tokens" by the counts that the
                loop passes to `weigh`, the same on all workers.
            exchange_device: "cpu" keeps the flat gradient, the residual and what local steps need in the
                memory of the host, so that a GPU has only the model's own tensors; entries are then selected
                by the CPU.  It may differ between workers.  The default is the device of the parameters.
        """
        if self._optimizer is not None:
            raise ConfigError(
                "grid.optimizer was called twice",
                remedy="call grid.optimizer only once, because a run trains one model",
            )
        wait = self._config.wait if wait is None else wait
        chosen = exchange_of(exchange)
        if isinstance(chosen, Auto):
            chosen = _fit_auto(chosen, optimizer, overlap)
        options: dict[str, Any] = {
            "clip_norm": clip_norm,
            "average_buffers_every": average_buffers_every,
            "compare_every": compare_every,
            "overlap": overlap,
            "wait": wait,
            "exchange_device": exchange_device,
            "base": FrozenBase(model, sent=send_frozen, rule=self._base_rule(base)),
            "weigh_by": weigh_by,
        }
        if isinstance(chosen, LocalSteps):
            kind = OverlappedLocalSGDOptimizer if chosen.overlap else LocalSGDOptimizer
            wrapped: GridOptimizer = kind(optimizer, model, chosen, self._session, **options)
        else:
            wrapped = GridOptimizer(optimizer, model, chosen, self._session, **options)
        self._optimizer, self._clip_norm, self._wait = wrapped, clip_norm, wrapped.wait
        self._track_scalers()
        self._model_state = WholeModelState(
            self._session, wrapped, self._checkpoint_options(), self._max_transfer_bytes()
        )
        if self._pauses.is_controlled:  # started by an agent: the owner may compare the workers' speed
            self._session.report_figures({"float32_flops": float32_flops(model)})
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
                device, a function that creates it and is called on the meta device, or a `Blueprint`.
            optimizer: a function that makes the optimizer of a stage from its parameters: `torch.optim.SGD`
                with bound arguments, or `lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)`.
            stages: the number of stages, S; a run needs at least this many workers.
            loss_fn: a function of the last layer's output and the targets that returns the mean over the
                samples as a scalar tensor.
            micro_batches: the number of pieces into which a batch is divided; with "auto" the first four
                steps try 4 and 8 micro-batches per stage, and then all workers use the number that is best
                according to the measured times.
            exchange: the exchange among the replicas of a stage; `GTopK()` by default.
            cuts: (S + 1,) the number of the first block of each stage, and the number of blocks; the same on
                all workers, for example `gridtrain.pipeline.partition(...).cuts`.  By default the cuts are
                chosen by the bytes of the parameters, or by the coordinator if the workers' devices differ.
            schedule: "1f1b", or "fill-drain" as in GPipe, which stores more micro-batches.
            ahead: with 1F1B, the number of additional micro-batches in flight per following stage, so that
                the latency of links does not keep a stage waiting (`gridtrain.core.stages.schedule`).
            wire: the encoding in which activations are sent: "exact", "fp16", "bf16" or "int8".
            clip_norm: the maximum 2-norm of the whole model's update.
            average_buffers_every: the number of steps between two averagings of floating-point buffers over a
                stage's replicas.
            compare_every: the number of steps between two comparisons of the states of a stage's replicas; 0
                disables comparisons.
            rematerialise: whether to store only the inputs of a stage for each micro-batch, and recompute all
                other activations.
            device: the device of this worker's stage.
            seed: the seed of the initial parameters and of dropout; the same on all workers.
            init: the function that initializes a block; see `gridtrain.pipeline.Blueprint`, which also
                describes the supported models.
            profile: a profile of the blocks (`gridtrain.pipeline.profile`), with which the model is
                partitioned again when workers are lost; without it a block's time is assumed to be
                proportional to its bytes, and activations are not counted.
            memory_bytes: the bytes of memory that training may use on this worker; by default 90 % of the
                GPU's memory, and unlimited on a CPU.
            base, send_frozen: the same arguments as those of `optimizer`, for the whole model.

        Raises:
            ConfigError: the model cannot be partitioned in this way; the message says what to change.
        """
        if self._optimizer is not None:
            raise ConfigError(
                "grid.pipeline was called for a second model", remedy="train only one model in a run"
            )
        if self._scalers:
            raise unsupported_scaler_error()
        check_stages(stages)
        make_schedule, schedule_name = schedule_for(schedule, ahead)
        options = PipelineOptions(
            stages=stages,
            micro_batches=parse_micro_batches(micro_batches),
            exchange=exchange if exchange is not None else GTopK(),
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
        staging = ModelStages(blueprint, stages, cuts=cuts, device=torch.device(device))
        frozen = FrozenBase(
            staging.whole,
            sent=send_frozen,
            rule=self._base_rule(base),
            pieces=staging.frozen_blocks,
        )
        pipe = Pipeline(staging, optimizer, options, self._session, frozen)
        self._model_state = StageModelState(
            self._session,
            pipe.held,
            self._checkpoint_options(),
            self._max_transfer_bytes(),
            profile=profile,
            memory_bytes=model_costs.training_memory_bytes(memory_bytes, staging.device),
            measure_flops=lambda: device_flops(staging.device),
        )
        self._optimizer, self._clip_norm = pipe, clip_norm
        return pipe

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
    ) -> Iterator[Any]:
        """Yield this worker's batches until the run has ended; every sample counts once.

        One yielded batch is one step: the loop body calls `optimizer.step()` once for each batch, or once for
        every `accumulate` batches.  In a step in which this worker has no samples (the tail of a pass) the
        method yields a stand-in batch, whose gradient is ignored, so that schedulers take the same number of
        steps on all workers.

        With `LocalSteps(every=H)` a step of the run (in `steps=`, `grid.step` and all settings that count
        steps) is H steps of the loop; sizes and `accumulate` refer to one step of the loop.

        Args:
            dataset: the data set, the same on all workers.  A `ShardedDataset` is read by shards: a worker
                opens only the files that the group has leased to it.  An iterable data set must yield the
                same samples each time.  It is read in its own order (`set_epoch(pass)` is called if it
                exists), and every worker skips the samples of the other workers.
            batch_size: the number of samples in one yielded batch on this worker.
            global_batch_size: the number of samples in a step over all workers.  It stays constant while
                workers join and leave, and is divided among them according to their measured speed.
            max_batch_size: with `global_batch_size`, the largest batch that this worker can process.
            epochs, steps: the length of the run, for all workers together; pass exactly one of the two.
            accumulate: the number of yielded batches in one step; the loop must divide the mean loss of each
                batch by this number.
            seed: the seed for the order of the samples, the same on all workers.
            length: the number of samples in a pass over an iterable data set without `__len__`.
            num_workers: the number of processes that read batches ahead; at most 1 for an iterable data set.
                Batches that are not needed after a change of the group are dropped, because a sample counts
                when its step commits.
            prefetch_factor: the number of steps that each of these processes reads ahead.
            weigh: whether each sample has the same weight even if a step's samples cannot be divided evenly
                into `accumulate` batches: the batches then differ by one sample, and the accumulated gradient
                is scaled between two batches.  Set it to False for a loop that reads all batches of a step
                before it computes, or that weights the batches itself.
        """
        batch_size, global_batch_size, max_batch_size, accumulate, epochs, steps, seed, length = to_ints(
            batch_size=batch_size, global_batch_size=global_batch_size, max_batch_size=max_batch_size,
            accumulate=accumulate, epochs=epochs, steps=steps, seed=seed, length=length,
        )  # fmt: skip
        check_readers(dataset, num_workers, prefetch_factor)
        sizes = BatchSizes(batch_size, global_batch_size, max_batch_size, accumulate, self.calls_per_step)
        turns = self._join_run(dataset, sizes, epochs, steps, seed, length)
        self._wrapped().set_backwards_per_step(accumulate)
        make_reader = readers.IterableReader if readers.is_iterable(dataset) else readers.MapReader
        reader = make_reader(dataset, turns.spec, accumulate, collate_fn)
        ahead = Prefetcher(reader, num_workers, prefetch_factor, self._fetches) if num_workers else None
        further = partial(spread_samples, dataset, collate_fn)
        tokens = TokenCheck(
            self._wrapped().model, further, is_tokens=getattr(dataset, "yields_tokens", False)
        )
        if isinstance(dataset, ShardedDataset) and ahead is None:
            dataset.while_opening = self.evaluation  # a file may have to be fetched first
        try:
            for spans in self._run_turns():
                if ahead is not None and turns.has_samples:
                    batches = ahead.read(tuple(spans), turns.predict(ahead.depth))
                else:
                    batches = reader.read(spans)
                if failed_reads := getattr(dataset, "failed_reads", 0):
                    self.report(failed_reads=failed_reads)
                for batch in batches:
                    tokens.check(batch)
                yield from self._weighed(batches, spans) if weigh and accumulate > 1 else batches
        except BudgetSpent:
            self._pauses.report_spent()
            raise
        except DataError:
            failed_reads = max(1, getattr(dataset, "failed_reads", 0))  # 0: another process has counted
            self._data_failure = f"its data cannot be read (failed reads: {failed_reads}); see its output"
            raise
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
        arguments are those of `batches`.

        The loader must not run ahead of the steps: use it with `num_workers=0`.  To read ahead, use
        `grid.batches(..., num_workers=...)`, which drops the right batches when the group changes.
        """
        batch_size, global_batch_size, max_batch_size, epochs, steps, seed = to_ints(
            batch_size=batch_size, global_batch_size=global_batch_size, max_batch_size=max_batch_size,
            epochs=epochs, steps=steps, seed=seed,
        )  # fmt: skip
        sizes = BatchSizes(batch_size, global_batch_size, max_batch_size, calls_per_step=self.calls_per_step)
        if readers.is_iterable(dataset):
            raise ConfigError(
                f"a {type(dataset).__name__} cannot be indexed, so it cannot be sampled",
                remedy="use grid.batches(dataset, ...)",
            )
        turns = self._join_run(dataset, sizes, epochs, steps, seed)
        return sampler.GridSampler(turns.spec, self._run_turns, dataset)

    def _base_rule(self, base: str | None) -> str:
        return self._config.base if base is None else base

    def weigh(self, count: int | torch.Tensor) -> None:
        """Weight this worker's gradient by `count`, such as the number of tokens of which its loss is the
        mean, so that the group's gradient is that of the mean over all tokens of the step.

        The optimizer must have `weigh_by="tokens"`.  Call it once for each batch, before its backward pass:
        the counts of the other workers then arrive while it computes.  With `accumulate=a`, call it either
        before each of the a backward passes, with the mean loss of each divided by a, or once for the step,
        if the accumulated gradient is the mean over all of them.  With a count of 0 the gradient is ignored.
        """
        wrapped = self._wrapped()
        if isinstance(wrapped, Pipeline):
            raise ConfigError(
                "grid.weigh was called for a pipeline, whose steps are weighed by samples",
                remedy="weight the losses of the samples, as docs/pipeline.md describes",
            )
        wrapped.weigh(int(count))

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Report this worker as busy while a long evaluation runs in the `with` block, so that it is not
        considered hung."""
        self._session.set_busy(True)
        try:
            yield
        finally:
            self._session.set_busy(False)

    def mean(self, value: float | torch.Tensor) -> float:
        """Return the average of a number over all workers, for logs; all workers must call it at the same
        place.

        The average is not replicated state: if the group changes during the call, or a worker does not make
        the call, a worker gets its own number back.
        """
        return self._session.average(value.item() if isinstance(value, torch.Tensor) else float(value))

    def report(self, **figures: float) -> None:
        """Report figures, such as `loss=...`, for `gridtrain status` and the run's owner.

        Values that are not finite are left out.  Raises `ConfigError` for a name of more than 64 bytes or
        with control characters, and for more than `reported_figures.MAX_FIGURES` names.
        """
        self._session.report_figures(self._figures.filter_valid(figures))

    def track(self, **trackers: serialization.Stateful) -> None:
        """Add stateful objects, such as schedulers and weight averages, to the state that a joining worker
        receives."""
        self._wrapped().track(**trackers)

    def scaler(self, **kwargs: Any) -> GridScaler:
        """Return a `torch.amp.GradScaler` whose scale stays equal on all workers, including joining workers;
        not available for a pipeline."""
        if isinstance(self._optimizer, Pipeline):
            raise unsupported_scaler_error()
        made = GridScaler(**kwargs)
        self._scalers = (*self._scalers, made)
        self._track_scalers()
        return made

    def led_by(self, agent: AgentControl, connect: MakeTransport, limit: SetRateLimits) -> None:
        """Let `agent` pause and limit this worker; see `PauseController`.

        Args:
            connect: a function that creates the transport with which this worker joins again after a pause.
            limit: a function that changes the rate limits of the current transport.
        """
        self._pauses = PauseController(self._session, agent, connect, limit, self._fetches)

    def close(self, reason: str = "the training script ended") -> None:
        """Leave the run.  The method is idempotent, and is called automatically when the script ends."""
        if os.getpid() != self._process:
            return  # a forked child: only its parent takes part in the run
        atexit.unregister(self._close_at_exit)
        try:
            if not self.finished and not self._is_closed:
                self._is_closed = True
                if self._model_state is not None and self._turns is not None:
                    budget_bytes = self._pauses.remaining_bytes // 2
                    self._model_state.leave(budget_bytes, between_steps=self._turns.is_stopped)
        finally:
            self._session.close("its run is finished" if self.finished else self._data_failure or reason)
            if self._model_state is not None:
                self._model_state.close(CHECKPOINT_TIMEOUT_S)
            self.resources.close()

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(describe_end(error))

    def _close_at_exit(self) -> None:
        self.close(describe_end(uncaught_error()))

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

    def _checkpoint_options(self) -> CheckpointOptions:
        """Return the checkpoint options.  Each worker on a machine has its own folder, in a folder named
        after the coordinator's key."""
        config = self._config
        if config.state_dir:
            folder = Path(config.state_dir)
        else:
            worker = run_folder_name(Path(config.identity).stem or config.name)
            folder = state_directory(config.run) / "checkpoints" / config.coordinator_key[:16] / worker
        return CheckpointOptions(
            folder,
            every=parse_int("checkpoint_every", config.checkpoint_every),
            keep=parse_int("checkpoint_keep", config.checkpoint_keep),
            url=config.checkpoints,
        )

    def _max_transfer_bytes(self) -> int:
        return parse_int("handover_mib", self._config.handover_mib) << 20

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
        self._session.check_not_joined()
        sizes.check()
        check_values(wrapped.model)
        self._export_folder()
        if isinstance(dataset, ShardedDataset):
            dataset.obey(self._fetches)
        size, data_text = readers.measure_dataset(dataset, length)
        shards = dataset.shard_sizes if isinstance(dataset, ShardedDataset) else ()
        spec = LedgerSpec(size, seed, epochs, steps, delay=wrapped.delay, shards=shards)
        data_ledger.validate(spec)
        facts: Facts = (
            ("model", wrapped.base.describe_model()),
            ("buffers", wrapped.buffer_averaging.describe()),
            ("exchange", wrapped.describe_exchange()),
            ("optimizer", describe_optimizer(wrapped.inner)),
            ("clip_norm", str(self._clip_norm)),
            ("compared", f"every {wrapped.compare_every} steps" if wrapped.compare_every else "never"),
            ("data", data_text),
            *((("wait", self._wait),) if self._wait != "all" else ()),
            *((("weigh_by", "tokens"),) if wrapped.weigh_by != "samples" else ()),
            *wrapped.base.facts(),
            *adapter_facts(wrapped.model),
        )
        self._turns = Turns(self._session, wrapped, self._model_state, self._pauses, spec, sizes.batch_size)
        self._model_state.join(facts, spec, sizes)
        return self._turns

    def _run_turns(self) -> Iterator[Sequence[Span]]:
        """Yield this worker's spans for each call of `optimizer.step`; export the model at the end of the
        run."""
        assert self._turns is not None
        was_finished = self._turns.is_finished  # a DataLoader may ask once more after the end
        yield from self._turns
        if self._turns.is_finished and not self._turns.is_stopped and not was_finished:
            self._finish()

    def _weighed(self, batches: Sequence[Any], spans: Sequence[Span]) -> Iterator[Any]:
        """Yield a step's micro-batches, and set the weight of each; the weights of a stand-in batch have no
        effect."""
        weights = readers.micro_batch_weights(data_ledger.count_samples(spans), len(batches))
        wrapped = self._wrapped()
        assert isinstance(wrapped, GridOptimizer)
        for number, batch in enumerate(batches):
            wrapped.begin_micro_batch(number, weights)
            yield batch

    def _finish(self) -> None:
        if self._session.is_standby_at_end:
            log.warning(
                "the run is finished; at the end this worker held neither the model nor a stage of it"
            )
            return
        assert self._model_state is not None
        exports = self._is_exporter()
        written = self._try_final_checkpoint(0.0)  # a slow disk does not delay the export
        if exports:
            self._export()
        if written is False:
            written = self._try_final_checkpoint(FINAL_CHECKPOINT_TIMEOUT_S)
        if not self._session.wait_for_members():
            log.warning("this worker left before the coordinator had declared the run finished")
        if not exports:
            # The first worker may have been lost after the last step, before its export.
            with suppress(GridtrainError):  # it ended the session; the group's state is then unknown
                exports = self._is_exporter()
            if exports:
                self._export()
        if isinstance(written, Exception):
            raise written
        self._model_state.finish_checkpoints(FINAL_CHECKPOINT_TIMEOUT_S)

    def _try_final_checkpoint(self, timeout_s: float) -> bool | Exception:
        """Return the result of `write_final_checkpoint`, or the error, which is to be raised at the very end:
        such as a changed base, or no memory for a copy."""
        assert self._model_state is not None
        try:
            return self._model_state.write_final_checkpoint(timeout_s)
        except Exception as error:
            return error

    def _is_exporter(self) -> bool:
        assert self._model_state is not None
        return self._model_state.exports

    def _export(self) -> None:
        assert self._model_state is not None
        self._model_state.export(self._export_folder())

    def _export_folder(self) -> Path:
        """Create and check the export folder before the training, because afterwards it would be too late to
        choose another folder."""
        if "://" in self._config.export_dir:
            raise ConfigError(
                f"export_dir is {self._config.export_dir!r}; it must be a folder",
                remedy="leave it out, and copy the final model with gridtrain export to the URL",
            )
        folder = Path(self._config.export_dir or state_directory(self._config.run))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            raise ConfigError(
                f"the final model cannot be written to {folder}: {error.strerror or error}",
                remedy="choose another folder with --export-dir (or gridtrain.join(export_dir=...))",
            ) from None


def _fit_auto(auto: Auto, inner: torch.optim.Optimizer, overlap: Overlap | None) -> Auto:
    """Return `auto`, restricted to the exchanges that are suitable for this optimizer."""
    if overlap is not None:
        raise ConfigError(
            'overlap was set with exchange="auto", but buckets depend on the chosen exchange',
            remedy='choose an exchange, such as the one that a run with exchange="auto" has chosen',
        )
    return replace(auto, density=None, sparse=False) if "betas" in inner.defaults else auto
