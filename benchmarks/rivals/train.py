"""A training run with a rival: workload, settings and held-out measure are those of gridtrain's runs.

There is one process for each rank; rank 0 writes a line for each step to steps.jsonl in the folder of its
`out` (see `accuracy.recorder`):

    held_out: null on steps where it is not measured; seconds: since the first batch, without measuring, for
    which all ranks wait; sent_bytes: of rank 0's interface since then; null where ranks share an interface

    gloo       DistributedDataParallel over gloo, dense
    powersgd   the same with torch's PowerSGD hook (Vogels et al. 2019) with error feedback and warm start
    hivemind   all members average the change of `every` local steps

The run ends when the held-out loss is at most `until_loss`, or after `steps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from accuracy.recorder import MEASURE_EVERY, Recorder
from accuracy.workloads import WORKLOADS, Pair, Workload, trained_of
from procfs import sent_bytes
from rivals.contract import Rank, leave

DATA_SEED = 1
POWERSGD_RANK, POWERSGD_START = 2, 10  # and the step before which it is dense


@dataclass(frozen=True, kw_only=True)
class Training(Rank):
    """A rank that trains.

    Attributes:
        trainer: one of `contract.TRAINERS`.
        settings: the family of the workload's settings: "dense", "adamw" or "local".
        every: hivemind's local steps between averagings.
        compression: of hivemind: "none", "float16" or "int8".
        learning_rate, batch_size: instead of the workload's.
    """

    trainer: str
    workload: str = "gpt"
    settings: str = "dense"
    steps: int = 250
    measure_every: int = MEASURE_EVERY
    until_loss: float = 0.0
    every: int = 1
    compression: str = "none"
    learning_rate: float | None = None
    batch_size: int | None = None
    seed: int = 0


class Loss(nn.Module):
    """A module that returns the loss, as DDP needs one."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.workload, self.model = workload, model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.workload.loss(self.model, x, y)


class Gloo:
    """DistributedDataParallel over gloo."""

    def __init__(self, options: Training, workload: Workload, model: nn.Module) -> None:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        from rivals.gloo import join

        join(options)
        self._dist = dist
        # PowerSGD's hook waits inside gloo's callbacks, which would wait for each other with several buckets
        # in flight.  A given size also applies to the first bucket, which otherwise has 1 MiB.
        one_bucket = {"bucket_cap_mb": 25} if options.trainer == "powersgd" else {}
        # All ranks have drawn the same parameters, so rank 0 need not send its own, with a frozen base.
        self._parallel = DistributedDataParallel(Loss(workload, model), init_sync=False, **one_bucket)
        if options.trainer == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=POWERSGD_RANK,
                start_powerSGD_iter=POWERSGD_START,
                use_error_feedback=True,
                warm_start=True,
            )
            self._parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def backward(self, x_BT: Tensor, y_BT: Tensor) -> float:
        """Return the loss; each `grad` is then the mean of all ranks, with hivemind only the own one."""
        loss = self._parallel(x_BT, y_BT)
        loss.backward()
        return float(loss)

    def stepped(self) -> None:
        """Called after the optimizer's step."""

    def stop(self, own: bool) -> bool:
        """Return rank 0's value of `own`; all ranks call it together, and wait for rank 0."""
        flag = torch.tensor([float(own)])
        self._dist.broadcast(flag, 0)
        return bool(flag)

    def close(self) -> None:
        """Wait for all ranks, then leave the group."""
        self._dist.barrier()
        self._dist.destroy_process_group()


class Hivemind:
    """hivemind's averaging after `every` local steps; its methods are those of `Gloo`."""

    def __init__(self, options: Training, workload: Workload, model: nn.Module) -> None:
        from rivals import hivemind as rival
        from rivals.rendezvous import Rendezvous

        self._stack, self._model, self._workload = contextlib.ExitStack(), model, workload
        self._group = self._stack.enter_context(Rendezvous(options))
        self._dht = rival.start_dht(options, self._group)
        self._trained, self._every, self._steps = trained_of(model), options.every, 0
        self._world = options.world
        self._common = [parameter.detach().clone() for parameter in self._trained]
        size = sum(parameter.numel() for parameter in self._trained)
        self._averager = rival.start_averager(
            torch.zeros(size), self._dht, options.world, options.compression
        )
        self._average = rival.average

    def backward(self, x_BT: Tensor, y_BT: Tensor) -> float:
        loss = self._workload.loss(self._model, x_BT, y_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss)

    @torch.no_grad()
    def stepped(self) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        changes = [p - common for p, common in zip(self._trained, self._common, strict=True)]
        self._average_tensors(changes)
        for parameter, common, change in zip(self._trained, self._common, changes, strict=True):
            parameter.copy_(common.add_(change))

    def _average_tensors(self, tensors: list[Tensor]) -> None:
        with self._averager.get_tensors() as (mean_N,):
            torch.cat([tensor.flatten() for tensor in tensors], out=mean_N)
        self._average(self._averager, self._world)
        with self._averager.get_tensors() as (mean_N,):
            parts = mean_N.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def stop(self, own: bool) -> bool:
        return bool(self._group.exchange(own)[0])

    def close(self) -> None:
        self._group.barrier()
        self._averager.shutdown()
        self._dht.shutdown()
        self._stack.close()


EXCHANGES: dict[str, Any] = {"gloo": Gloo, "powersgd": Gloo, "hivemind": Hivemind}


def batches_of(data: Dataset[Pair], size: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's batches without end, in an order of samples that is the same on all ranks."""
    generator, order = torch.Generator().manual_seed(DATA_SEED), list[int]()
    while True:
        while len(order) < size * world:
            order += torch.randperm(len(data), generator=generator).tolist()  # type: ignore[arg-type]
        pairs = [data[i] for i in order[rank * size : (rank + 1) * size]]
        order = order[size * world :]
        yield torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def train(options: Training) -> None:
    """Train as one rank."""
    workload = WORKLOADS[options.workload]()
    size = options.batch_size or workload.batch_size
    batches = batches_of(workload.train, size, options.rank, options.world)
    model = workload.model(options.seed)
    settings = workload.settings[options.settings].at(options.learning_rate)
    exchange = EXCHANGES[options.trainer](options, workload, model)
    optimizer = settings.build(model)
    exchange.stop(False)  # a barrier before the clock starts
    recorder = Recorder(Path(options.out).with_name("steps.jsonl"), lambda: sent_bytes(options.interface))
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = exchange.backward(*next(batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        exchange.stepped()
        reading, held_out, stop = recorder.read(), None, False
        if step % options.measure_every == 0 or step == options.steps:
            with recorder.paused():
                held_out = workload.held_out(model) if options.rank == 0 else None
                stop = exchange.stop(held_out is not None and held_out <= options.until_loss)
        if options.rank == 0:
            recorder.write(step, reading, loss, held_out)
        if stop:
            break
    exchange.close()


if __name__ == "__main__":
    torch.set_num_threads(1)  # several ranks share this machine's cores
    train(Training.from_argv())
    leave()
