"""What users hold: `grid = gridtrain.join()` and the few calls on it.

Decides how an ordinary PyTorch loop maps to steps of the run.  The work is done elsewhere: rounds in
`runtime`, updates in `optim.wrapper`, samples in `optim.sampler`.

    grid = gridtrain.join()
    optimizer = grid.optimizer(optimizer, model, exchange=gridtrain.GTopK(density=0.01, momentum=0.9))
    for batch in grid.batches(dataset, batch_size=32, epochs=3):
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gridtrain._version import __version__
from gridtrain.config import (
    Auto,
    Deadlines,
    Dense,
    Exchange,
    GTopK,
    JoinConfig,
    LocalSteps,
    Overlap,
    exchange_of,
    round_exchange,
)
from gridtrain.core.collectives import allgather, butterfly, direct, ring, star, tree
from gridtrain.core.commit import data_ledger
from gridtrain.core.group.invitation import parse
from gridtrain.core.messages import CheckpointInfo, Facts, LedgerSpec, Setup, Span
from gridtrain.core.planning.exchange_facts import DIRECT_DENSE
from gridtrain.core.stages.stage_cost import Layer
from gridtrain.errors import ConfigError, GridtrainError, JoinRefused, RemoteProtocolError
from gridtrain.network.transport.access_control import PeerAllowlist
from gridtrain.network.transport.fault_injection import Faults
from gridtrain.network.transport.flow_control import FlowControlTransport
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.network.transport.stack import build_stack
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.network.wire.sparse_payload import SparseVector
from gridtrain.pipeline import model_costs
from gridtrain.pipeline.blueprint import Blueprint, Init, Model
from gridtrain.pipeline.micro_batch_count import parse_micro_batches
from gridtrain.pipeline.model_stages import ModelStages
from gridtrain.pipeline.pipeline import Pipeline
from gridtrain.pipeline.profiler import Profile
from gridtrain.pipeline.stage import LossFunction
from gridtrain.pipeline.stage_departure import StageDeparture
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
from gridtrain.runtime.group_session import GroupSession, PeersOf, WaitInterrupted
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.process_hooks import install_error_hook, install_sigterm_handler
from gridtrain.runtime.state_transfer import residual_pieces
from gridtrain.sdk.reported_figures import ReportedFigures, check_names, describe_machine
from gridtrain.tools.bench.device_speed import device_flops, float32_flops
from gridtrain.tools.options.resolve import join_settings
from gridtrain.tools.options.runfile import RunFile
from gridtrain.training.checkpoint import serialization
from gridtrain.training.checkpoint.checkpoint_store import CheckpointContent, CheckpointStore
from gridtrain.training.checkpoint.flat_gradient import model_digest
from gridtrain.training.checkpoint.model_export import plain_state, save_model
from gridtrain.training.checkpoint.stage_checkpoint_store import StageCheckpointStore
from gridtrain.training.data import readers, sampler
from gridtrain.training.data.batch_sizes import (
    BatchSizes,
    check_readers,
    describe_optimizer,
    largest_state_bytes,
    parse_int,
    to_ints,
    unsupported_scaler_error,
)
from gridtrain.training.data.prefetch import Prefetcher
from gridtrain.training.grad_scaler import GridScaler
from gridtrain.training.local_sgd import LocalSGDOptimizer
from gridtrain.training.optimizer import GridOptimizer
from gridtrain.training.pause import MakeTransport, PauseController, SetRateLimits
from gridtrain.training.residual_departure import (
    LeftResidual,
    load_left_residual,
    save_left_residual,
    transfer_residual,
)
from gridtrain.training.turn_rollback import TurnRollback

log = logging.getLogger("gridtrain")

CHECKPOINT_S = 30.0
"""A checkpoint that is being written when the grid is closed gets so long."""

_NEIGHBOURS: dict[str, PeersOf] = {
    "auto": ring.neighbours,
    "ring": ring.neighbours,
    "direct": direct.neighbours,
    "all-gather": allgather.neighbours,
    "butterfly": butterfly.neighbours,
    "tree": tree.neighbours,
    "star": star.neighbours,
}


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
    handover_mib: int | None = None,
    state_dir: str | None = None,
    relay: bool | None = None,
    unencrypted: bool | None = None,
) -> Grid:
    """Join a run.  Whatever is not given comes from `GRIDTRAIN_*`, which `gridtrain worker` sets; for a
    script that was started by hand also from run.toml.

    Args:
        invitation: "gridtrain1:...", as the run's owner made it; not needed under `gridtrain worker`.
        name: what others see of this worker; a random one by default.
        listen: where peers connect to, "tcp://interface:port"; port 0 takes a free one.  By default a
            free port of the interface that leads to the coordinator.
        advertise: the address that peers are told, where it differs from `listen`.
        upload_limit, download_limit: such as "20Mbit"; always obeyed, also for what is relayed.
        export_dir: where the first worker puts the final model; the state directory by default.
        checkpoint_every: steps between two checkpoints on this worker's disk, 500 by default; 0: none.  A run
            whose workers are all gone goes on from the latest that comes back.
        checkpoint_keep: so many of the latest are kept, 2 by default.
        handover_mib: when this worker leaves before the end, it hands over at most so much of what it has not
            sent yet to another one, the largest values first; 16 by default, which is the most.
        state_dir: the folder of the checkpoints.
        relay: pass on what members that cannot reach each other send one another (sealed, so that
            nothing of it can be read here).  True by default.
        unencrypted: talk in the clear, with a coordinator that does so too; for benchmarks.

    Raises:
        ConfigError: an argument or variable is malformed, or there is no invitation.
        CoordinatorUnreachable: nobody answered in time.
        JoinRefused: the coordinator does not want this worker; the text says why.
    """
    install_error_hook()
    given: dict[str, str | None] = {
        "name": name or None,
        "listen": listen,
        "advertise": advertise,
        "upload_limit": upload_limit,
        "download_limit": download_limit,
        "export_dir": export_dir,
        "checkpoint_every": None if checkpoint_every is None else str(checkpoint_every),
        "checkpoint_keep": None if checkpoint_keep is None else str(checkpoint_keep),
        "handover_mib": None if handover_mib is None else str(handover_mib),
        "state_dir": state_dir,
        "relay": None if relay is None else "yes" if relay else "no",
        "unencrypted": "yes" if unencrypted else None,
    }
    if "GRIDTRAIN_COORDINATOR" not in os.environ:  # else the agent has looked at all of that
        given |= join_settings(given, os.environ, RunFile.find(os.environ))
    given["name"] = given["name"] or os.environ.get("GRIDTRAIN_NAME") or random_name()
    with ExitStack() as held:
        if invitation is not None:
            in_the_clear = given["unencrypted"] == "yes"
            entry = held.enter_context(
                enroll(parse(invitation), Deadlines().connect_s, unencrypted=in_the_clear)
            )
            given |= entry.join_options()
        config = JoinConfig.from_environment(None, **given)
        config = replace(config, coordinator=parse_coordinator_address(config.coordinator))
        check_names(config)
        identity, encrypted = Identity.read(Path(config.identity)), config.unencrypted != "yes"
        upload_Bps = parse_rate(config.upload_limit) if config.upload_limit else None
        download_Bps = parse_rate(config.download_limit) if config.download_limit else None
        rates = [upload_Bps, download_Bps]
        latest: list[ZeroMQTransport] = []
        planned = Faults.parse(config.faults) if config.faults else None

        def connect() -> tuple[FlowControlTransport, PeerAllowlist]:
            acquaintances = PeerAllowlist(bytes.fromhex(config.coordinator_key), relays=config.relay != "no")
            sockets = ZeroMQTransport(
                identity,
                f"gridtrain {__version__}",
                gate=acquaintances,
                encrypted=encrypted,
                plain_anywhere=not encrypted,  # where the coordinator may, which has to be told too
                upload_Bps=rates[0],
                download_Bps=rates[1],
            )
            latest[:] = [sockets]
            transport = build_stack(
                sockets,
                identity,
                may_relay=acquaintances.may_relay,
                with_faults=partial(planned.over, name=config.name) if planned is not None else None,
            )
            return transport, acquaintances

        def limit(upload_Bps: float | None, download_Bps: float | None) -> None:
            rates[:] = [upload_Bps, download_Bps]
            latest[0].set_rate_limits(upload_Bps, download_Bps)

        transport, acquaintances = connect()
        grid = Grid(transport, config, acquaintances)
        if control := os.environ.get(CONTROL_VARIABLE):
            grid.led_by(AgentLink(control, grid.moved_bytes), connect, limit)
        grid.resources = held.pop_all()  # the identity is this worker's until its grid is closed
        return grid


class Grid:
    """This worker's hold on the run.  Used from the thread that trains."""

    _scalers: tuple[GridScaler, ...] = ()  # that were made

    def __init__(
        self, transport: FlowControlTransport, config: JoinConfig, acquaintances: PeerAllowlist
    ) -> None:
        self._config = replace(config, listen=config.listen or default_listen_address(config.coordinator))
        self.resources = ExitStack()  # what is released when the grid is closed
        self._process = os.getpid()
        self._session = GroupSession(transport, self._config, acquaintances)
        try:
            self._session.connection.start()
        except BaseException:
            self._session.close()
            transport.close()  # nobody has yet if the session's thread never ran
            raise
        self._optimizer: GridOptimizer | Pipeline | None = None
        self._spec: LedgerSpec | None = None
        self._clip_norm: float | None = None
        self._figures = ReportedFigures()
        self._is_finished = self._closed = self._stopped = False
        self._pause_control = PauseController(
            self._session, NoAgent(), None, lambda upload_Bps, download_Bps: None
        )
        self._turn_rollback = TurnRollback()
        self._session.on_batch_dropped = self._turn_rollback.drop_turn
        self._batch_size = 0  # samples of a step that this worker asks for; 0: its part of the whole
        self._full_share = 0  # this worker's share of a full step, in samples
        self._pending_spans: deque[tuple[Span, ...]] = deque()  # of the turn: for the next calls of step()
        self._checkpoints: CheckpointStore | None = None
        self._stage_checkpoints: StageCheckpointStore | None = None
        self._stage_leaving: StageDeparture | None = None
        self._profile: Profile | Sequence[Layer] | None = None
        self._memory_bytes = 0  # that training may fill here, of a model in stages; 0: nobody says
        self._facts: Facts = ()
        self._added_magnitude = 0.0
        self._left_residual: LeftResidual | None = (
            None  # the residual with which this worker left, not added yet
        )
        self._checkpoint_step: int | None = None  # of the checkpoint that was found
        self._is_resumed = False  # state and residual are a checkpoint's, and no step was taken since
        atexit.register(self.close)
        install_sigterm_handler()

    # -- where we are ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank in the generation that runs; 0 before the first."""
        return self._session.snapshot.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the generation that runs; 0 before the first."""
        return self._session.snapshot.world_size

    @property
    def is_first(self) -> bool:
        """True on exactly one worker of a generation: for logging and saving."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Steps committed so far, over the whole run."""
        return self._session.snapshot.applied + 1

    @property
    def calls_per_step(self) -> int:
        """Calls of `optimizer.step` in one step of the run: H with `LocalSteps(every=H)`, else 1.

        Raises `ConfigError` before the optimizer is wrapped.
        """
        return self._calls

    @property
    def finished(self) -> bool:
        """The ledger has ended the run."""
        return self._is_finished

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes (sent, received) by message type, counted on the socket with framing."""
        return self._session.connection.traffic

    def moved_bytes(self) -> int:
        """Sent and received so far, all in all; for any thread."""
        return self._session.connection.moved_bytes

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
    ) -> GridOptimizer:
        """Wrap `optimizer`, so that `step()` applies the group's update.  See `GridOptimizer`.

        Args:
            exchange: `Dense()`, `TopK(...)`, `GTopK(...)`, or `LocalSteps(...)` around one of them, the same
                on all workers; `GTopK()` by default.  "auto" or `Auto(...)`: the coordinator chooses between
                the first three, see docs/exchanges.md.
            clip_norm: largest 2-norm of the exchanged update; not with `LocalSteps`.
            average_buffers_every: steps between two averages of floating buffers (batch norm).
            compare_every: steps between two comparisons of the workers' states; one that differs (a flipped
                bit, another kind of processor) is replaced by that of most workers.  0: never.
            overlap: `Overlap()`: exchange while backward still computes, the same on all workers.  Gradients
                must then not be changed between backward and `step` (clip with `clip_norm=`).
        """
        if self._optimizer is not None:
            raise ConfigError("grid.optimizer was called twice", remedy="one run trains one model")
        chosen = exchange_of(exchange)
        if isinstance(chosen, Auto):
            chosen = _fit_auto(chosen, optimizer, overlap)
        options: dict[str, Any] = {
            "clip_norm": clip_norm,
            "average_buffers_every": average_buffers_every,
            "compare_every": compare_every,
            "overlap": overlap,
        }
        if isinstance(chosen, LocalSteps):
            wrapped: GridOptimizer = LocalSGDOptimizer(optimizer, model, chosen, self._session, **options)
        else:
            wrapped = GridOptimizer(optimizer, model, chosen, self._session, **options)
        self._optimizer, self._clip_norm = wrapped, clip_norm
        self._track_scalers()
        largest_bytes = largest_state_bytes(model)
        self._session.tasks.attach_state(
            lambda seat, whole: wrapped.capture_state(whole), self._restore, largest_bytes
        )
        if self._pause_control.is_controlled:  # by an agent: others may ask how they compare
            self._session.report_figures({"float32_flops": float32_flops(model)})
        self._session.tasks.attach_residual(wrapped.residual_size, self._add_residual)
        self._session.tasks.attach_catch_up(
            self._copy_state, wrapped.replay_update, largest_bytes, wrapped.flat_size
        )
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
    ) -> Pipeline:
        """Train a model that no worker holds: it is cut into stages, and this worker holds one of them.

        S x R workers hold S stages in R replicas.  The batches of `grid.batches` are then of a replica: its
        members get the same samples.  One batch is one step: `loss = pipe.step(inputs, targets)`.

        Args:
            model: on the meta device, or a function that makes it, called so; or a `Blueprint`.  A chain of
                blocks: `nn.Sequential`, a list, `gridtrain.pipeline.Sequence`.
            optimizer: makes the optimizer of a stage from its parameters: `torch.optim.SGD` with arguments
                bound, `lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)`.
            stages: S; a run takes at least so many workers.
            loss_fn: of the last layer's output and the targets: a mean over the samples, as a scalar tensor.
            micro_batches: so many pieces of a batch follow each other through the stages; "auto": the first
                four steps try 4 and 8 for each stage, then all take what fits the measured times best.
            exchange: among the replicas of a stage; `GTopK()` by default.
            cuts: (S + 1,) where stages begin, and the number of blocks, the same on all workers, such as
                `gridtrain.pipeline.partition(...).cuts`; by default after the bytes of the parameters.
            schedule: "1f1b", or "fill-drain" as GPipe has it, which keeps more micro-batches.
            ahead: of 1F1B: so many micro-batches more for each stage that follows are on their way, so that
                links with latency keep nobody waiting (`protocol.schedule`).
            wire: how activations travel: "exact", "fp16", "bf16" or "int8".
            clip_norm: largest 2-norm of the whole model's update.
            average_buffers_every: steps between two averages of floating buffers over a stage's replicas.
            compare_every: steps between two comparisons of the states of a stage's replicas; 0: never.
            rematerialise: keep only the inputs of a stage for each micro-batch, and compute the rest again.
            device: where this worker's stage is.
            seed: of the first parameters, and of dropout; the same on all workers.
            init: see `gridtrain.pipeline.Blueprint`, as is what a model may be.
            profile: of the blocks (`gridtrain.pipeline.profile`), for new cuts when workers are lost; without
                it a block takes as long as it has bytes, and activations are not counted.
            memory_bytes: that training may fill on this worker; by default 90 % of the GPU's, on a CPU any.

        Raises:
            ConfigError: the model cannot be cut so; the text says what to change.
        """
        if self._optimizer is not None:
            raise ConfigError(
                "grid.pipeline was called after another model", remedy="one run trains one model"
            )
        if self._scalers:
            raise unsupported_scaler_error()
        check_stages(stages)
        plan, plan_name = schedule_for(schedule, ahead)
        options = PipelineOptions(
            stages=stages,
            micro_batches=parse_micro_batches(micro_batches),
            exchange=exchange if exchange is not None else GTopK(),
            loss=loss_fn,
            schedule=plan,
            schedule_name=plan_name,
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
        pipe = Pipeline(staging, optimizer, options, self._session)
        self._optimizer, self._clip_norm, self._profile = pipe, clip_norm, profile
        self._memory_bytes = model_costs.training_memory_bytes(memory_bytes, staging.device)
        self._session.tasks.attach_state(pipe.capture_state, self._restore, largest_state_bytes(pipe.model))
        self._session.tasks.attach_residual(0, self._add_residual)  # `Pipeline` says how long it is
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
        """Yield this worker's batches until the run's ledger ends it; every sample counts once.

        One yielded batch is one step: the loop body calls `optimizer.step()` once for each batch, or
        once for every `accumulate` batches.  In a step in which this worker holds no samples (the tail
        of a pass) it gets a stand-in batch, whose gradient counts nothing, so that schedulers and the
        like take the same number of steps everywhere.

        With `LocalSteps(every=H)` a step of the run (`steps=`, `grid.step`, what is due every so many steps)
        is H of the loop's steps; sizes and `accumulate` are of one of these.

        Args:
            dataset: the same on all workers.  One that can only be iterated over must give the same samples
                each time.  It is taken in its own order (`set_epoch(pass)` is called if there is one), and
                every worker reads past the samples of the others.
            batch_size: samples of one yielded batch on this worker.
            global_batch_size: samples of a step over all workers; held constant as workers come and go, and
                shared out by the speed that each of them shows.
            max_batch_size: with `global_batch_size`, the largest yielded batch that fits this worker.
            epochs, steps: exactly one of them ends the run, for all workers together.
            accumulate: yielded batches in one step; the loop divides the loss of each, a mean, by it.
            seed: of the order of the samples, the same on all workers.
            length: samples of a pass over an iterable data set without `__len__`.
            num_workers: processes that read batches ahead; at most 1 for an iterable data set.  What they
                have read in vain when the group changes is dropped: a sample counts where its step commits.
            prefetch_factor: steps that each of them reads ahead.
            weigh: where `accumulate` does not divide a step's samples, its batches differ by one sample; what
                the loop has accumulated is then scaled between two of them, so that each sample counts
                alike.  False: not; for a loop that reads all of a step's batches before it computes, or
                weighs them by itself.
        """
        batch_size, global_batch_size, max_batch_size, accumulate, epochs, steps, seed, length = to_ints(
            batch_size=batch_size, global_batch_size=global_batch_size, max_batch_size=max_batch_size,
            accumulate=accumulate, epochs=epochs, steps=steps, seed=seed, length=length,
        )  # fmt: skip
        check_readers(dataset, num_workers, prefetch_factor)
        sizes = BatchSizes(batch_size, global_batch_size, max_batch_size, accumulate, self._calls)
        self._join_run(dataset, sizes, epochs, steps, seed, length)
        assert self._spec is not None
        self._wrapped().set_backwards_per_step(accumulate)
        kind = readers.IterableReader if readers.is_iterable(dataset) else readers.MapReader
        reader = kind(dataset, self._spec, accumulate, collate_fn)
        ahead = Prefetcher(reader, num_workers, prefetch_factor) if num_workers else None
        try:
            for spans in self._turns():
                if ahead is not None and self._session.turn_spans:
                    batches = ahead.read(tuple(spans), self._predict_spans(ahead.depth))
                else:
                    batches = reader.read(spans)
                yield from self._weighed(batches, spans) if weigh and accumulate > 1 else batches
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
        """For `DataLoader(dataset, batch_sampler=grid.sampler(dataset, ...))`; arguments as in `batches`.

        The loader must not run ahead of the steps: use it with `num_workers=0`.  To read ahead use
        `grid.batches(..., num_workers=...)`, which knows what to drop when the group changes.
        """
        batch_size, global_batch_size, max_batch_size, epochs, steps, seed = to_ints(
            batch_size=batch_size, global_batch_size=global_batch_size, max_batch_size=max_batch_size,
            epochs=epochs, steps=steps, seed=seed,
        )  # fmt: skip
        sizes = BatchSizes(batch_size, global_batch_size, max_batch_size, calls_per_step=self._calls)
        if readers.is_iterable(dataset):
            raise ConfigError(
                f"a {type(dataset).__name__} has no index, so there is nothing to sample from",
                remedy="use grid.batches(dataset, ...)",
            )
        self._join_run(dataset, sizes, epochs, steps, seed)
        assert self._spec is not None
        return sampler.GridSampler(self._spec, self._turns)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around a long evaluation: tells the others that this worker is busy, not hung."""
        self._session.set_busy(True)
        try:
            yield
        finally:
            self._session.set_busy(False)

    def mean(self, value: float | torch.Tensor) -> float:
        """Average of a number over all workers, for logs; all of them must call it at the same place.

        It is no replicated state: if the group changes in that moment, or a worker does not call it,
        a worker gets its own number back.
        """
        return self._session.average(value.item() if isinstance(value, torch.Tensor) else float(value))

    def report(self, **figures: float) -> None:
        """Numbers for `gridtrain status` and the run's owner, such as `loss=...`.

        Those that are not finite are left out.  Raises `ConfigError` for a name of more than 64 bytes or
        with control characters, and for more than `figures.MAX_FIGURES` names.
        """
        self._session.report_figures(self._figures.filter_valid(figures))

    def track(self, **trackers: serialization.Stateful) -> None:
        """Schedulers, weight averages and the like that a joining worker must receive."""
        self._wrapped().track(**trackers)

    def scaler(self, **kwargs: Any) -> GridScaler:
        """A `torch.amp.GradScaler` whose scale stays equal on all workers, newcomers among them; not for a
        pipeline."""
        if isinstance(self._optimizer, Pipeline):
            raise unsupported_scaler_error()
        made = GridScaler(**kwargs)
        self._scalers = (*self._scalers, made)
        self._track_scalers()
        return made

    def close(self, reason: str = "the training script ended") -> None:
        """Leave the run; idempotent, and done by itself when the script ends."""
        if os.getpid() != self._process:
            return  # a child that was forked: the place in the run is its parent's
        atexit.unregister(self.close)
        try:
            if not self._is_finished and not self._closed:
                self._closed = True
                self._transfer_residual()
        finally:
            self._release(reason)

    def _release(self, reason: str) -> None:
        self._session.close("its run is finished" if self._is_finished else reason)
        if self._checkpoints is not None:
            self._checkpoints.wait(CHECKPOINT_S)
        if self._stage_checkpoints is not None:
            self._stage_checkpoints.wait(CHECKPOINT_S)
        self.resources.close()

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------

    def _track_scalers(self) -> None:
        """As soon as there is an optimizer to whose state they belong."""
        if isinstance(self._optimizer, GridOptimizer) and self._optimizer.shares_scale:
            ours = serialization.INTERNAL_PREFIX
            named = {f"{ours}scaler{number or ''}": each for number, each in enumerate(self._scalers)}
            self._optimizer.track(**named)

    def _wrapped(self) -> GridOptimizer | Pipeline:
        if self._optimizer is None:
            raise ConfigError(
                "the optimizer has not been wrapped yet",
                remedy="call optimizer = grid.optimizer(optimizer, model, ...) first",
            )
        return self._optimizer

    def _require_whole_model(self) -> GridOptimizer:
        """Of a model that this worker holds as a whole."""
        wrapped = self._wrapped()
        assert not isinstance(wrapped, Pipeline)
        return wrapped

    def _join_run(
        self,
        dataset: Any,
        sizes: BatchSizes,
        epochs: int | None,
        steps: int | None,
        seed: int,
        length: int | None = None,
    ) -> None:
        wrapped = self._wrapped()
        self._session.check_not_joined()
        sizes.check()
        self._export_folder()
        size, data_text = readers.measure_dataset(dataset, length)
        self._spec = LedgerSpec(size=size, seed=seed, epochs=epochs, steps=steps)
        data_ledger.validate(self._spec)
        facts: Facts = (
            ("model", model_digest(wrapped.model)[0]),
            ("buffers", wrapped.buffer_averaging.describe()),
            ("exchange", wrapped.describe_exchange()),
            ("optimizer", describe_optimizer(wrapped.inner)),
            ("clip_norm", str(self._clip_norm)),
            ("compared", f"every {wrapped.compare_every} steps" if wrapped.compare_every else "never"),
            ("data", data_text),
        )
        share = self._batch_size = sizes.batch_size
        neighbours = _NEIGHBOURS[round_exchange(wrapped.exchange_config).topology]
        if isinstance(wrapped, Pipeline):
            facts = (*facts, ("stages", str(wrapped.stages)), ("blocks", str(len(wrapped.defined.blueprint))))
            kept = self._open_stage_checkpoints(wrapped, facts)
            model = wrapped.described(self._profile, share)
            setup = Setup(
                facts, self._spec, share, sizes.global_batch_size, stages=wrapped.stages, stage_checkpoints=kept,
                model=model, memory_bytes=self._memory_bytes, flops=device_flops(wrapped.defined.device),
            )  # fmt: skip
            self._session.join(setup, wrapped.edges(neighbours))
            return
        held = self._resume(facts)
        self._session.join(
            Setup(
                facts,
                self._spec,
                share,
                sizes.global_batch_size,
                held,
                can_catch_up=round_exchange(wrapped.exchange_config).sparse,
                initial_state_digest=wrapped.initial_digest() if held is None else b"",
            ),
            _with_ring_peers(neighbours),
            describe_machine(wrapped.model),
            _exchange_choices(wrapped),
        )

    def _turns(self) -> Iterator[Sequence[Span]]:
        """This worker's spans for each call of `optimizer.step`; a stand-in where it holds none."""
        assert self._spec is not None
        # Batch norm, for one, cannot take a batch of one sample.
        stand_in: tuple[Span, ...] = (Span(0, min(self._spec.size, max(2, self._batch_size // self._calls))),)
        while (picture := self._next_turn()) is not None:
            assert picture.open_round is not None
            if self._stage_leaving is not None:
                self._stage_leaving.restore_residual(picture)
                self._checkpoint_stage(picture)
            else:
                self._verify_checkpoints(picture.applied + 1)
                self._restore_left_residual(picture)
                self._checkpoint(picture)
            self._pending_spans = deque(self._begin_turn(picture, stand_in))
            stand_in = self._pending_spans[-1]
            while self._pending_spans:
                yield self._pending_spans.popleft()
            if not self._session.is_turn_done:
                raise self._check_step_called(picture.open_round.step)
        if not self._stopped and not self._is_finished:  # a DataLoader may ask once more after the end
            self._finish()

    def _weighed(self, batches: Sequence[Any], spans: Sequence[Span]) -> Iterator[Any]:
        """A step's micro-batches; those of a stand-in count nothing anyway."""
        weights = readers.micro_batch_weights(data_ledger.count_samples(spans), len(batches))
        for number, batch in enumerate(batches):
            self._require_whole_model().begin_micro_batch(number, weights)
            yield batch

    def _begin_turn(self, picture: WorkerSnapshot, stand_in: tuple[Span, ...]) -> list[tuple[Span, ...]]:
        """This worker's positions, cut for the turn's calls of `optimizer.step`."""
        self._full_share = picture.shares[picture.rank][1]
        self._wrapped().begin_turn(self._calls_with_samples(picture.spans))
        if self._pause_control.is_controlled:
            self._turn_rollback.begin_turn(self._wrapped())
        return self._call_spans(picture.spans) if picture.spans else [stand_in] * self._calls

    @property
    def _calls(self) -> int:
        return self._wrapped().calls_per_turn

    def _calls_with_samples(self, spans: Sequence[Span]) -> int:
        """So many of a turn's calls have samples: a short step has fewer of them, not smaller batches."""
        samples = data_ledger.count_samples(spans)
        return min(self._calls, samples, -(-self._calls * samples // max(1, self._full_share)))

    def _call_spans(self, spans: Sequence[Span]) -> list[tuple[Span, ...]]:
        """For each of a turn's calls; those that have no samples are given the last ones again."""
        pieces = sampler.split_spans(spans, self._calls_with_samples(spans))
        return pieces + [pieces[-1]] * (self._calls - len(pieces))

    def _predict_spans(self, count: int) -> list[tuple[Span, ...]]:
        """What `_turns` yields next, at least so many unless the run ends or the group changes."""
        ahead = list(self._pending_spans)
        for spans in self._session.predict_spans(-(-count // self._calls)):
            ahead += self._call_spans(spans) if spans else [()]
        return ahead

    def _check_step_called(self, step: int) -> ConfigError:
        had = self._wrapped().local_calls
        batches = "the batch" if self._calls == 1 else f"the {self._calls} batches"
        return ConfigError(
            f"optimizer.step() was called {had} times for {batches} of step {step}; each batch is one step",
            remedy="call it once for each batch, or once for every a batches of "
            "grid.batches(..., accumulate=a)",
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def _resume(self, facts: Facts) -> CheckpointInfo | None:
        """Load the latest checkpoint of this training from the disk; what the group holds may be later."""
        assert self._spec is not None
        self._facts = (*facts, ("order", f"{self._spec.size} samples, seed {self._spec.seed}"))
        self._checkpoints = CheckpointStore(
            self._checkpoint_folder(),
            every=parse_int("checkpoint_every", self._config.checkpoint_every),
            keep=parse_int("checkpoint_keep", self._config.checkpoint_keep),
        )
        self._checkpoints.claim()
        self.resources.callback(self._checkpoints.release)
        found = self._checkpoints.latest(self._facts)
        self._left_residual = load_left_residual(
            self._checkpoint_folder(), self._facts, self._require_whole_model().residual_size
        )
        if found is None:
            return None
        try:
            self._require_whole_model().unpack(found.document, found.tensors)
        except RemoteProtocolError as error:
            raise ConfigError(
                f"the checkpoint {found.path} of step {found.step} cannot be used: {error.reason}",
                remedy="move it away: this worker then begins from an older one, or takes the others' state",
            ) from None
        if found.residual:  # none: another worker has it (`Checkpoints.void`)
            self._require_whole_model().load_residual_state(found.residual)
        if self._left_residual is not None and self._left_residual.history == found.position.history:
            self._require_whole_model().clear_residual()  # what was left is what remains of it
        self._is_resumed, self._checkpoint_step = True, found.step
        log.warning("this worker holds a checkpoint of step %d: %s", found.step, found.path)
        return found.position

    def _verify_checkpoints(self, step: int) -> None:
        """At the first turn: what was found on the disk is this training's past, or it is left alone."""
        assert self._checkpoints is not None
        if self._is_resumed:
            self._checkpoints.mark_verified()
        elif self._checkpoint_step is not None:
            text = (
                "the run goes on from step %d, not from this worker's checkpoint of step %d: it stays in %s"
            )
            log.warning(text, step, self._checkpoint_step, self._checkpoints.folder)
        self._is_resumed, self._checkpoint_step = False, None

    def _open_stage_checkpoints(self, pipe: Pipeline, facts: Facts) -> tuple[CheckpointInfo, ...]:
        """The checkpoints of stages that this worker has from an earlier life."""
        assert self._spec is not None
        self._facts = (*facts, ("order", f"{self._spec.size} samples, seed {self._spec.seed}"))
        self._stage_checkpoints = store = StageCheckpointStore(
            self._checkpoint_folder(),
            self._facts,
            every=parse_int("checkpoint_every", self._config.checkpoint_every),
            keep=parse_int("checkpoint_keep", self._config.checkpoint_keep),
            told=self._session.tasks.report_checkpoints,
            loaded=pipe.load,
            packed=lambda held: pipe.pack_aside(held, self._facts),
        )
        store.claim()
        self.resources.callback(store.release)
        self._session.tasks.attach_stage_checkpoints(store)
        keeps = parse_int("checkpoint_every", self._config.checkpoint_every) > 0
        self._stage_leaving = StageDeparture(self._session, pipe, store, self._facts, keeps)
        return store.stored_checkpoints()

    def _checkpoint_stage(self, picture: WorkerSnapshot) -> None:
        """As `_checkpoint`, of this worker's stage."""
        pipe, store = self._wrapped(), self._stage_checkpoints
        assert isinstance(pipe, Pipeline) and store is not None
        blocks = pipe.blocks_at(picture)
        if store.is_due(blocks, picture.applied + 1):
            document, tensors = pipe.pack(picture)
            held = CheckpointInfo(picture.applied, picture.history, picture.ledger)
            residual = pipe.residual_state(picture)
            store.write(blocks, CheckpointContent(held, self._facts, document, tensors, residual))

    def _restore(self, blobs: Sequence[bytes]) -> None:
        """Another worker's state.  A residual from a checkpoint belongs to the checkpoint's step alone: what
        was sent since would be sent twice."""
        if self._is_resumed:
            self._require_whole_model().clear_residual()
            self._is_resumed = False
        self._wrapped().restore_state(blobs)

    def _copy_state(self) -> Callable[[], tuple[bytes, bytes]]:
        """Between two steps; what is returned makes bytes of the copy."""
        copy = self._require_whole_model().copy_state()
        return lambda: (copy.private_bytes(), copy.shared_bytes())

    def _restore_left_residual(self, picture: WorkerSnapshot) -> None:
        """At the first turn: the residual with which this worker left, if no step was committed since."""
        left, self._left_residual = self._left_residual, None
        if left is None:
            return
        fits = (left.applied, left.history) == (picture.applied, picture.history)
        indices_K = np.flatnonzero(left.residual_N)
        entries = SparseVector(indices_K, left.residual_N[indices_K])
        back = fits and self._require_whole_model().add_residual(entries, picture.world_size)
        mass = residual_pieces.magnitude_sum([entries])
        self._session.report_figures(
            {"read_back_mass": mass if back else 0.0, "lost_mass": 0.0 if back else mass}
        )
        where = f"step {left.applied + 1}; the run is at step {picture.applied + 1}"
        log.warning("the residual of %s: mass %.3g is %s", where, mass, "read back" if back else "lost")

    def _add_residual(self, peer: bytes, entries: SparseVector) -> None:
        """What a member that has left had not sent is sent from here."""
        picture = self._session.snapshot
        added, mass = (
            self._wrapped().add_residual(entries, picture.world_size),
            residual_pieces.magnitude_sum([entries]),
        )
        self._added_magnitude += mass if added else 0.0
        self._session.report_figures({"inherited_mass": self._added_magnitude})
        what = "added to this worker's" if added else "lost: a sum with this worker's is too large to travel"
        log.warning(
            "residual of %s, %d entries, mass %.3g: %s", peer.hex()[:8], len(entries.values), mass, what
        )

    def _transfer_residual(self) -> None:
        """The others go on: give them what this worker has not sent.  What stops that costs the residual."""
        if self._optimizer is None or self._spec is None:
            return
        try:
            if isinstance(self._optimizer, Pipeline):
                if self._stage_leaving is not None:
                    self._stage_leaving.leave(self._residual_budget_bytes(), between_steps=self._stopped)
                return
            keeps = parse_int("checkpoint_every", self._config.checkpoint_every) > 0
            folder = self._checkpoint_folder() if keeps else None
            if self._left_residual is not None and folder is not None:
                save_left_residual(folder, self._facts, self._left_residual)  # no turn has come
                return
            voids = self._checkpoints.drop_residual if keeps and self._checkpoints is not None else None
            left = transfer_residual(self._session, self._optimizer, self._residual_budget_bytes(), voids)
            if folder is not None:
                save_left_residual(folder, self._facts, left)
        except GridtrainError as error:
            log.debug("nothing handed over: %s", error)  # this worker is no member (any more)

    def _residual_budget_bytes(self) -> int:
        """At most so much, and not the last of what this machine may move today."""
        return min(
            parse_int("handover_mib", self._config.handover_mib) << 20,
            self._pause_control.remaining_bytes // 2,
        )

    # -- pauses ------------------------------------------------------------------------------------

    def led_by(self, owner: AgentControl, connect: MakeTransport, limit: SetRateLimits) -> None:
        """This worker rests when its `owner` says so: see `optim.pausing`.

        Args:
            connect: makes what a new place in the group needs, after a pause.
            limit: changes the rates of the connection that stands.
        """
        self._pause_control = PauseController(self._session, owner, connect, limit)

    def _next_turn(self) -> WorkerSnapshot | None:
        """As `GroupSession.await_turn`, with pauses; None also where the owner has said stop."""
        self._turn_rollback.end_turn()
        while True:
            try:
                picture = self._session.await_turn()
            except WaitInterrupted:
                self._stopped = not self._pause()
                if self._stopped:
                    return None
                continue
            except JoinRefused as refusal:
                if not self._pause_control.is_run_over(refusal):
                    raise
                self._is_finished = self._stopped = True
                return None
            self._pause_control.begin_turn()
            return picture

    def _pause(self) -> bool:
        """Leave between two steps, wait, and come back; False: there is nothing to come back to."""
        if self._pause_control.should_stop:
            log.warning("this worker's owner has said stop: its loop ends after step %d", self.step - 1)
            return False
        wrapped, picture = self._wrapped(), self._session.snapshot
        keeps = parse_int("checkpoint_every", self._config.checkpoint_every) > 0
        held: CheckpointInfo | None = None
        if isinstance(wrapped, Pipeline):
            assert self._stage_leaving is not None
            self._stage_leaving.rest(self._residual_budget_bytes())
        else:
            if self._left_residual is None:  # else no turn has come since the last time
                voids = self._checkpoints.drop_residual if keeps and self._checkpoints is not None else None
                self._left_residual = transfer_residual(
                    self._session, wrapped, self._residual_budget_bytes(), voids
                )
            wrapped.clear_residual()
            if picture.is_synced and picture.applied >= 0:
                held = CheckpointInfo(picture.applied, picture.history, picture.ledger)
        came_back = self._pause_control.pause(held, touched=picture.is_modified or picture.applied >= 0)
        self._is_finished = self._is_finished or self._pause_control.has_missed_end
        return came_back

    def _checkpoint(self, picture: WorkerSnapshot) -> None:
        """Between two steps: copy what is due to be written."""
        assert self._checkpoints is not None
        if self._checkpoints.is_due(picture.applied + 1):
            wrapped = self._require_whole_model()
            document, tensors = wrapped.pack()
            held = CheckpointInfo(picture.applied, picture.history, picture.ledger)
            residual = wrapped.residual_state()
            self._checkpoints.write(CheckpointContent(held, self._facts, document, tensors, residual))

    def _checkpoint_folder(self) -> Path:
        """Each worker of a machine has its own, under the key that its coordinator has."""
        if self._config.state_dir:
            return Path(self._config.state_dir)
        worker = Path(self._config.identity).stem or self._config.name
        run = state_directory(self._config.run)
        return run / "checkpoints" / self._config.coordinator_key[:16] / run_folder_name(worker)

    def _finish(self) -> None:
        self._is_finished = True
        exports = self._is_exporter()
        if exports:
            self._export()
        if not self._session.wait_for_members():
            log.warning("left before the coordinator had declared the run finished")
        if not exports and self._has_become_first():
            self._export()

    def _has_become_first(self) -> bool:
        """The first worker was lost after the last step, perhaps before its export: this one follows it."""
        with suppress(GridtrainError):  # what ended the session; who knows nothing of the group is not first
            return self.world_size > 0 and self._is_exporter()
        return False

    def _is_exporter(self) -> bool:
        wrapped = self._wrapped()
        return wrapped.exports if isinstance(wrapped, Pipeline) else self.is_first

    def _export_folder(self) -> Path:
        """Made and tried before the training, since after it is too late to choose another."""
        folder = Path(self._config.export_dir or state_directory(self._config.run))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            raise ConfigError(
                f"the final model cannot be written to {folder}: {error.strerror or error}",
                remedy="name a folder with --export-dir (or gridtrain.join(export_dir=...))",
            ) from None

    def _export(self) -> None:
        """The final model as safetensors, written aside and renamed."""
        wrapped = self._wrapped()
        if isinstance(wrapped, Pipeline):
            wrapped.export(self._export_folder())
            return
        path = self._export_folder() / "final.safetensors"
        save_model(plain_state(wrapped.model), path)
        log.warning("the run is finished; the model is in %s", path)


def _with_ring_peers(neighbours: PeersOf) -> PeersOf:
    """Averages of buffers, tables of trials and, in retries, settings go round the ring in any exchange."""
    return lambda rank, world_size: neighbours(rank, world_size) | ring.neighbours(rank, world_size)


def _exchange_choices(wrapped: GridOptimizer) -> dict[str, PeersOf]:
    """The edges of each exchange that a VIEW may name; with "" among them it need not name one."""
    if round_exchange(wrapped.exchange_config) == Dense():
        return {"": ring.neighbours, DIRECT_DENSE: _with_ring_peers(direct.neighbours)}
    return {each.describe(): _with_ring_peers(_NEIGHBOURS[each.topology]) for each in wrapped.choices}


def _fit_auto(auto: Auto, inner: torch.optim.Optimizer, overlap: Overlap | None) -> Auto:
    """What the coordinator may choose behind this optimizer."""
    if overlap is not None:
        raise ConfigError(
            'overlap with exchange="auto", whose buckets would depend on what is chosen',
            remedy='name an exchange, such as the one that a run with exchange="auto" has chosen',
        )
    return replace(auto, density=None, sparse=False) if "betas" in inner.defaults else auto
