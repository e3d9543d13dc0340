"""Runs the processes that torchrun starts at one site (one or more machines) as one worker of a run.

    torchrun --nproc-per-node 8 train.py

    with Site.enter() as site:
        optimizer = site.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, exchange=...)
        for x, y in site.batches(dataset, batch_size=32, steps=1000):
            loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()

One process of a site, the leader (rank 0), is the worker: only the leader takes part in the run and holds the
optimizer's state and the residual.  The processes communicate with each other through torch.distributed: NCCL
for tensors on GPUs, gloo for everything else.

    leader       <--- the digest of the base --- every process, once
    leader       <--- ready ------------------------------- every process
    leader       turn: the site's samples, the state -----> every process
    each process its part of the samples, backward
    leader       <--- ready ------------------------------- every process
    leader       reduce ----------------------------------> every process
    leader       <--- sum of share * gradient -------------- every process
                 step: exchange with the other workers, apply the update
                 ... next turn: the updated state ------------> every process

A process's share is its fraction of the site's samples.

The leader sends all trained parameters and buffers, about as many bytes as a dense update.  Every change of
the leader's model (a skipped step, another member's state, a repair) therefore reaches all processes, and no
other process needs optimizer state.  Frozen parameters are never sent (see `frozen_base`).

A process that fails sends the reason before it exits: the leader to all processes, any other process to the
leader, which then leaves the run with that reason.  Broadcast and reduce, which a failure would block,
therefore start only when every process is ready and the leader has announced them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import IntEnum
from itertools import groupby
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FullyShardedDataParallel

from gridtrain.adapters.gloo_channel import GlooChannel
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.runtime.process_hooks import closed_at_exit, describe_end
from gridtrain.sdk.grid import Grid
from gridtrain.sdk.join import join
from gridtrain.training.checkpoint.flat_gradient import FlatGradient
from gridtrain.training.checkpoint.frozen_base import FrozenBase, state_parameters
from gridtrain.training.checkpoint.joint_optimizer import as_one
from gridtrain.training.data import sampler
from gridtrain.training.data.batch_sizes import BatchSizes
from gridtrain.training.single_samples import SingleSampleBatches
from gridtrain.training.wrapping_optimizer import WrappingOptimizer

LEADER = 0
_WRAPPERS = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)
_MAX_SAMPLES = 1 << 24
_MAX_TEXT_BYTES = 4096
_END_TIMEOUT_S = 5.0  # until the other processes have received the reason why this one ends
_PROCESS_TIMEOUT_S = 1800.0  # until a process has trained on its batch
_LEADER_TIMEOUT_S = 30 * 86400.0  # the leader may wait for the run; if it exits, the connection breaks
_STOPPED = "its site was stopped, perhaps because another of its processes failed"


class SiteFailed(GridtrainError):
    """Another process of this site has failed or exited."""


class _SiteMessage(IntEnum):
    TURN = 1  # from the leader: the samples of the next step
    END = 2  # from the leader: there is no further step; a text gives the error, if there was one
    READY = 3  # from another process: it waits for the next turn, or its gradient is complete
    FAILED = 4  # from another process: it failed, with the reason
    BASE = 5  # from another process: the description of its base
    REDUCE = 6  # from the leader: all gradients are complete and will be summed


class Site:
    """This process's part of the site.  Use it in a `with` statement, on the training thread.

    Attributes:
        grid: the leader's `Grid`; None on the other processes.
        rank, world_size: this process's rank in the site, and the number of processes in the site.
    """

    def __init__(self, grid: Grid | None, channel: GlooChannel) -> None:
        self.grid = grid
        self.rank, self.world_size = channel.rank, channel.world_size
        self._channel = channel
        self._optimizer: SiteOptimizer | None = None
        self._weight = 0.0  # the weight of this process's gradient in the site's gradient
        self._has_ended = self._is_delaying = False
        self._delayed_signal: int | None = None
        self._owns_group = False  # torch.distributed was set up by `enter`

    @classmethod
    def enter(cls, invitation: str | None = None, **options: Any) -> Site:
        """Set up torch.distributed from torchrun's variables, join the run on rank 0, and return the site.

        Without torchrun, the site consists of this process only.  The arguments are those of
        `gridtrain.join`.  At the end of the `with` statement, the leader leaves the run and, unless an error
        was raised, every process closes its connections to the others.
        """
        owns_group = not dist.is_initialized()
        if owns_group:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            if "RANK" in os.environ:
                dist.init_process_group(backend)
            else:
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        channel = GlooChannel(dist.new_group(backend="gloo"))
        site = cls(None, channel)
        site._owns_group = owns_group
        site._stop_cleanly()
        if channel.rank == LEADER:
            try:
                site.grid = join(invitation, **options)
            except BaseException as error:
                site._end(f"it could not join: {type(error).__name__}: {error}")
                raise
        return site

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    @property
    def is_first(self) -> bool:
        """Whether this process is the one in the run that should log and save."""
        return self.grid is not None and self.grid.is_first

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        model: nn.Module,
        **options: Any,
    ) -> SiteOptimizer:
        """Wrap `optimizer`.  Every process of the site must call this method, which has the
        arguments of `grid.optimizer`.

        Raises:
            ConfigError: an argument is invalid, or a process's base differs from the leader's.
        """
        if self._optimizer is not None:
            raise ConfigError("site.optimizer was called twice", remedy="call site.optimizer only once")
        if options.get("overlap") is not None:
            raise ConfigError(
                "a site cannot overlap its exchange with the backward pass",
                remedy="remove the argument overlap=",
            )
        if options.get("weigh_by", "samples") != "samples":
            raise ConfigError(
                "a site's processes are weighted by their samples", remedy="remove the argument weigh_by="
            )
        _refuse_wrapped(model)
        inner: torch.optim.Optimizer = as_one(optimizer)
        flat = FlatGradient(model, inner, has_used=options.get("unused") == "skip")
        if self.grid is not None:
            inner = wrapped = self.grid.optimizer(inner, model, **options)
            self._compare_bases(wrapped.base)
        else:
            base = FrozenBase(model, sent=options.get("send_frozen", ()), rule="any")  # the leader compares
            self._channel.send(LEADER, [_SiteMessage.BASE], base.describe().encode())
        self._optimizer = SiteOptimizer(self, inner, model, flat)
        return self._optimizer

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
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] = sampler.collate,
    ) -> Generator[Any, None, None]:
        """Yield this process's batches until the run ends; call `optimizer.step()` once for each batch.

        Args:
            batch_size: the number of samples per process; the site's batch is `world_size` times as large.
            global_batch_size: the number of samples in a step over all workers of the run.
            max_batch_size: the maximum number of samples per process.

        The other arguments are those of `Grid.batches`.

        Raises:
            ConfigError: an argument is invalid, or `step` was not called for a batch.
            SiteFailed: another process of the site has failed or exited.
        """
        if self._optimizer is None:
            raise ConfigError("the optimizer has not been wrapped yet", remedy="call site.optimizer first")
        sizes = {"batch_size": batch_size, "max_batch_size": max_batch_size}
        ours = {name: None if each is None else each * self.world_size for name, each in sizes.items()}
        turns = self._follow()
        if self.grid is not None:
            options: dict[str, Any] = {"epochs": epochs, "steps": steps, "seed": seed, **ours}
            turns = self._lead(self.grid.sampler(dataset, global_batch_size=global_batch_size, **options))
        # a site's batch is divided among its processes, as with accumulate=world_size
        is_one = BatchSizes(batch_size, global_batch_size, max_batch_size, self.world_size).is_one
        single_samples = SingleSampleBatches(self._optimizer.model, batch_size_is_one=is_one)
        for indices in turns:
            part = _share_of(indices, self.rank, self.world_size)
            self._weight = len(part) / len(indices)
            self._optimizer.stepped = False
            chosen = part or indices[:2]  # a stand-in, of two samples if possible, for batch norm
            batch = sampler.fetch_batch(dataset, chosen, collate_fn)
            with single_samples.allow() if len(chosen) == 1 else nullcontext():
                yield batch
            if not self._optimizer.stepped:
                raise ConfigError(
                    "optimizer.step() was not called for a batch; each batch is one step",
                    remedy="call optimizer.step() once for each batch on all processes of the site",
                )

    def _compare_bases(self, base: FrozenBase) -> None:
        for rank in range(1, self.world_size):
            with self._signals_delayed():
                theirs = self._listen_to(rank, _SiteMessage.BASE)
            if base.rule != "any" and theirs != base.describe():
                raise ConfigError(
                    f"the frozen base of process {rank} of this site differs from the leader's: "
                    f"{theirs or 'no frozen parameters'} in that process and "
                    f"{base.describe() or 'no frozen parameters'} in the leader",
                    remedy="load the same model from the same files, freeze parameters in the same way, and "
                    'pass the same send_frozen= on all processes; base="any" allows different bases',
                )

    # -- turns ---------------------------------------------------------------------------------------

    def _lead(self, turns: sampler.GridSampler) -> Iterator[list[int]]:
        for indices in turns:
            with self._signals_delayed():
                self._announce(_SiteMessage.TURN, np.asarray(indices, np.int64).tobytes())
                self._share_state()
            yield indices
        with self._signals_delayed():
            self._announce(_SiteMessage.END)
            self._has_ended = True
            self._share_state()

    def _follow(self) -> Iterator[list[int]]:
        word = _SiteMessage.TURN
        while word is _SiteMessage.TURN:
            with self._signals_delayed():
                word, payload = self._await_announcement()
                self._share_state()
            if word is _SiteMessage.TURN:
                yield np.frombuffer(payload, np.int64).tolist()

    def _share_state(self) -> None:
        """Copy the leader's parameters, excluding the base, and its buffers to all processes, one message for
        each dtype."""
        assert self._optimizer is not None
        model = self._optimizer.model
        parameters = [parameter for _, parameter in state_parameters(model)]
        tensors = [tensor.detach() for tensor in (*parameters, *model.buffers())]
        if self.world_size == 1:
            return
        by_kind = sorted(tensors, key=_kind)
        for _, alike in groupby(by_kind, key=_kind):
            group = list(alike)
            flat_N = torch.cat([tensor.flatten() for tensor in group])
            with _named(self._another):
                dist.broadcast(flat_N, LEADER)
            if self.is_leader:
                continue
            for tensor, piece in zip(group, torch.split(flat_N, [t.numel() for t in group]), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def sum_up(self, flat_N: Tensor) -> None:
        """Sum the vectors `flat_N` of all processes into the leader's `flat_N`.

        Each vector is weighted by its process's share of the site's samples.  On other processes, `flat_N`
        is undefined afterwards.
        """
        if self._weight:
            flat_N.mul_(self._weight)
        else:
            flat_N.zero_()  # without samples its values are arbitrary
        if self.world_size == 1:
            return
        with self._signals_delayed():
            if self.is_leader:
                self._announce(_SiteMessage.REDUCE)
            else:
                self._await_announcement()
            with _named(self._another):
                dist.reduce(flat_N, LEADER)

    # -- messages --------------------------------------------------------------------------------------

    @property
    def _another(self) -> str:
        """How an error names another process."""
        return "another process" if self.is_leader else "the leader"

    def _announce(self, word: _SiteMessage, payload: bytes = b"") -> None:
        """Wait until all other processes are ready, and send them the message."""
        for rank in range(1, self.world_size):
            self._listen_to(rank, _SiteMessage.READY)
        with _named(self._another):
            self._broadcast(word, payload)

    def _await_announcement(self) -> tuple[_SiteMessage, bytes]:
        """Tell the leader that this process is ready, and return the leader's next message."""
        self._channel.send(LEADER, [_SiteMessage.READY])
        word, payload = self._listen(LEADER, 8 * _MAX_SAMPLES)
        if word is _SiteMessage.END:
            self._has_ended = True
            if payload:
                self._obey_delayed_signal()
                reason = payload.decode(errors="replace")
                raise SiteFailed(f"the leader of this site ended: {reason}", remedy="see its output")
        with _named("the leader"):
            self._channel.wait_sent()
        return word, payload

    def _broadcast(self, word: _SiteMessage, payload: bytes, timeout_s: float | None = None) -> None:
        for rank in range(1, self.world_size):
            self._channel.send(rank, [word], payload)
        self._channel.wait_sent(timeout_s)

    def _listen_to(self, rank: int, expected: _SiteMessage) -> str:
        """Receive the expected message from another process and return its text.

        Raises `SiteFailed` if a message that reports a failure arrives instead, or if the process has exited.
        """
        word, payload = self._listen(rank, _MAX_TEXT_BYTES)
        text = payload.decode(errors="replace")
        if word is not expected:
            if text in (_STOPPED, describe_end(KeyboardInterrupt())):
                self._obey_delayed_signal()  # the same signal has stopped both
            raise SiteFailed(f"process {rank} of this site failed: {text}", remedy="see its output")
        return text

    def _listen(self, rank: int, most_bytes: int) -> tuple[_SiteMessage, bytes]:
        """Receive a message from `rank`; raise `SiteFailed` if that process has exited or does not answer."""
        who, timeout_s = f"process {rank}", _PROCESS_TIMEOUT_S
        if rank == LEADER:
            who, timeout_s = "the leader", _LEADER_TIMEOUT_S
        with _named(who):
            head, payload = self._channel.receive(rank, most_bytes, timeout_s)
        return _SiteMessage(head[0]), payload

    # -- the end ---------------------------------------------------------------------------------------

    def _stop_cleanly(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_delaying:
            self._delayed_signal = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    @contextmanager
    def _signals_delayed(self) -> Iterator[None]:
        """Delay SIGTERM and Ctrl-C while the processes do something together.

        Otherwise, those that have not received the signal would wait for this process.  An error in the
        `with` block is raised instead of the signal: torchrun stops all processes when one has failed, and
        the error must still be reported.
        """
        self._is_delaying = True
        try:
            yield
        finally:
            self._is_delaying = False
        self._obey_delayed_signal()

    def _obey_delayed_signal(self) -> None:
        self._is_delaying = False
        number, self._delayed_signal = self._delayed_signal, None
        if number is not None:
            self._on_signal(number, None)

    def _end(self, reason: str) -> None:
        """Send the reason why this process is ending to all other processes, or to the leader if this process
        is not the leader."""
        if self._has_ended:
            return
        self._has_ended = True
        text = reason.encode()[:_MAX_TEXT_BYTES]
        with suppress(RuntimeError):  # raised by gloo: the receiver has exited, or does not answer
            if self.is_leader:
                self._broadcast(_SiteMessage.END, text, _END_TIMEOUT_S)
                return
            self._channel.send(LEADER, [_SiteMessage.FAILED], text)
            deadline_s, word = time.monotonic() + _END_TIMEOUT_S, None
            while word != _SiteMessage.END:  # the leader, too, may be waiting until it has sent its reason
                left_s = max(0.001, deadline_s - time.monotonic())
                (word, *_), _ = self._channel.receive(LEADER, 8 * _MAX_SAMPLES, left_s)

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reason = "the training script ended" if error is None else _reason(error)
        self._is_delaying = True  # torchrun stops this process if another one ends first
        try:
            if self.grid is not None:
                self.grid.close(reason)
        finally:
            self._end(reason)
        if error is None:
            self._channel.close()
            if self._owns_group:
                dist.destroy_process_group()
            self._obey_delayed_signal()


class SiteOptimizer(WrappingOptimizer):
    """The result of `site.optimizer`: `step` sums the site's gradients and, on the leader, takes the step.

    Attributes:
        inner: the group's optimizer on the leader; on other processes, the user's optimizer, without state.
        stepped: whether `step` was called for the latest batch.
    """

    _step_supports_amp_scaling = True  # otherwise a GradScaler could skip the step on one process only

    def __init__(
        self, site: Site, inner: torch.optim.Optimizer, model: nn.Module, flat: FlatGradient
    ) -> None:
        self._wrap(inner)
        self.model = model
        self._site, self._flat = site, flat
        self.stepped = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if closure is not None or getattr(self, "grad_scale", None) is not None:
            raise ConfigError(
                "a site's step was called with a closure, or through a GradScaler",
                remedy="call loss.backward() and optimizer.step(); bfloat16 needs no scaler",
            )
        self._flat.gather()
        self._site.sum_up(self._flat.flat_N)
        self.stepped = True
        if self._site.is_leader:
            self._flat.scatter()
            self.inner.step()


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise `ConfigError` if torch averages the gradients or divides the parameters of `model`."""
    found = {type(module).__name__ for module in model.modules() if isinstance(module, _WRAPPERS)}
    # A DTensor is recognized by its mesh.
    found |= {type(p.data).__name__ for p in model.parameters() if hasattr(p.data, "device_mesh")}
    if found:
        raise ConfigError(
            f"the model has parts of type {', '.join(sorted(found))}, which combine the gradients of the "
            "processes themselves; a site weights each process's own gradient by its samples",
            remedy="use the model without DistributedDataParallel, FSDP and fully_shard",
        )


def _share_of(indices: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return this rank's part of `indices`, in order.  Parts differ by at most one sample; with fewer samples
    than processes, some parts are empty."""
    n = len(indices)
    return list(indices[n * rank // world_size : n * (rank + 1) // world_size])


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device.type}"


@contextmanager
def _named(who: str) -> Iterator[None]:
    """Raise `SiteFailed` with the name of a process instead of gloo's error about the connection to it."""
    try:
        yield
    except RuntimeError as error:
        if "gloo/transport" not in str(error):
            raise
        what = "has disconnected"
        if late := re.search(r"Timed out waiting (\d+)ms", str(error)):
            what = f"has not answered for {int(late[1]) / 1000:g} s"
        raise SiteFailed(f"{who} of this site {what}", remedy="see its output") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, GridtrainError):
        return error.reason
    if isinstance(error, KeyboardInterrupt):
        return describe_end(error)
    if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
        return _STOPPED
    return f"{type(error).__name__}: {error}"
