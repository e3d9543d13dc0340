"""A whole training run with a rival in our place: the demo's model, text, recipe and held-out measure.

Decides how the rival is used.  The model, the data and what is measured are gridtrain.demo's, so that only
the exchange of gradients differs.  One process for each rank; rank 0 writes FOLDER/steps.jsonl:

    {"step": 10, "seconds": 1.9, "loss": 4.1, "held_out": 3.9, "sent_bytes": 7400000}      one line a step
    held_out: null on the steps where it is not measured; seconds: from the first batch on, without measuring
    sent_bytes: by rank 0's interface since then, headers included; null where the ranks share one

    gloo       DistributedDataParallel over gloo, dense
    powersgd   the same with torch's PowerSGD hook (Vogels et al. 2019) with error feedback and warm start
    hivemind   one averaging of the gradient a step, all members, no compression

The run ends when the held-out loss is at most --until-loss, or after --steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gridtrain.demo.model import ByteGPT, Windows
from gridtrain.demo.recipe import BATCH_SIZE, HELD_OUT_WINDOWS, MEASURE_EVERY, RECIPES, SIZES
from gridtrain.demo.text import load_corpus
from rivals.contract import INTERFACE, TRAINERS, Request
from rivals.measure import sent_bytes

ADAMW_LEARNING_RATE = 0.003
"""With it dense AdamW learns fastest on the demo's model, of those tried."""

DATA_SEED = 1


class Exchange(Protocol):
    """Between a loss and the optimizer's step."""

    def backward(self, x_BT: Tensor, y_BT: Tensor) -> float:
        """The loss; afterwards every parameter's `grad` is the mean of all ranks'."""

    def stop(self, mine: bool) -> bool:
        """Whether rank 0 has said so; all ranks ask together."""

    def close(self) -> None:
        """When all ranks are here."""


class Loss(nn.Module):
    """DDP wants a module whose result is the loss."""

    def __init__(self, model: ByteGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        return self.model.loss(x_BT, y_BT)


class Gloo:
    """DistributedDataParallel; see `Exchange`."""

    def __init__(self, options: argparse.Namespace, model: ByteGPT) -> None:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        from rivals.gloo import join

        join(request_of(options))
        self._dist = dist
        self._parallel = DistributedDataParallel(Loss(model))
        if options.rival == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=options.powersgd_rank,
                start_powerSGD_iter=options.powersgd_start,
                use_error_feedback=True,
                warm_start=True,
            )
            self._parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def backward(self, x_BT: Tensor, y_BT: Tensor) -> float:
        loss = self._parallel(x_BT, y_BT)
        loss.backward()
        return float(loss)

    def stop(self, mine: bool) -> bool:
        flag = torch.tensor([float(mine)])
        self._dist.broadcast(flag, 0)
        return bool(flag)

    def close(self) -> None:
        self._dist.barrier()
        self._dist.destroy_process_group()


class Hivemind:
    """One averaging a step; see `Exchange`."""

    def __init__(self, options: argparse.Namespace, model: ByteGPT) -> None:
        from rivals import hivemind as rival
        from rivals.rendezvous import Rendezvous

        request = request_of(options)
        self._stack, self._model = contextlib.ExitStack(), model
        self._group = self._stack.enter_context(Rendezvous(request))
        self._dht = rival.start_dht(request, self._group)
        self._size = sum(parameter.numel() for parameter in model.parameters())
        self._averager = rival.start_averager(torch.zeros(self._size), self._dht, request.world)
        self._average = rival.average

    def backward(self, x_BT: Tensor, y_BT: Tensor) -> float:
        loss = self._model.loss(x_BT, y_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients: list[Tensor] = [p.grad for p in self._model.parameters() if p.grad is not None]
        with self._averager.get_tensors() as (mean_N,):
            torch.cat([gradient.flatten() for gradient in gradients], out=mean_N)
        self._average(self._averager, self._group.world)
        with self._averager.get_tensors() as (mean_N,):
            parts = mean_N.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return float(loss)

    def stop(self, mine: bool) -> bool:
        return bool(self._group.exchange(mine)[0])

    def close(self) -> None:
        self._group.exchange(None)
        self._averager.shutdown()
        self._dht.shutdown()
        self._stack.close()


EXCHANGES: dict[str, Any] = {"gloo": Gloo, "powersgd": Gloo, "hivemind": Hivemind}


def request_of(options: argparse.Namespace) -> Request:
    """What the rivals' joining asks for."""
    rank, world, master = options.rank, options.world, options.master
    return Request(rank, world, master, "all_reduce", 1, options.folder, interface=options.interface)


class Batches:
    """The same order on all ranks; of the world's BATCH_SIZE windows each, a rank takes its own."""

    def __init__(self, windows: Windows, rank: int, world: int) -> None:
        self._windows, self._rank, self._world = windows, rank, world
        self._generator = torch.Generator().manual_seed(DATA_SEED)
        self._order: list[int] = []

    def next(self) -> tuple[Tensor, Tensor]:
        count = BATCH_SIZE * self._world
        if len(self._order) < count:
            self._order += torch.randperm(len(self._windows), generator=self._generator).tolist()
        taken, self._order = self._order[:count], self._order[count:]
        pairs = [self._windows[i] for i in taken[self._rank * BATCH_SIZE : (self._rank + 1) * BATCH_SIZE]]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


class Recorder:
    """Rank 0's clock, bytes and file.  The clock stands still while `measuring`."""

    def __init__(self, options: argparse.Namespace) -> None:
        options.folder.mkdir(parents=True, exist_ok=True)
        self._file = (options.folder / "steps.jsonl").open("w", buffering=1)
        self._interface, self._sent = options.interface, sent_bytes(options.interface)
        self._began_s, self._paused_s = time.perf_counter(), 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self._began_s - self._paused_s

    def paused(self, took_s: float) -> None:
        self._paused_s += took_s

    def write(self, step: int, seconds: float, loss: float, held_out: float | None) -> None:
        now = sent_bytes(self._interface)
        sent = None if now is None or self._sent is None else now - self._sent
        record = {"step": step, "seconds": seconds, "loss": loss, "held_out": held_out, "sent_bytes": sent}
        self._file.write(json.dumps(record) + "\n")


def optimizer_of(options: argparse.Namespace, model: ByteGPT) -> torch.optim.Optimizer:
    recipe = RECIPES["dense"]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=options.learning_rate or ADAMW_LEARNING_RATE)
    learning_rate = options.learning_rate or recipe.learning_rate
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=recipe.momentum)


def train(options: argparse.Namespace) -> None:
    """One rank's run."""
    size, corpus = SIZES[options.model], load_corpus()
    held_out = Windows(corpus.held_out, size.context).spread(HELD_OUT_WINDOWS)
    batches = Batches(Windows(corpus.train, size.context), options.rank, options.world)
    model = ByteGPT(size, seed=options.seed)
    exchange: Exchange = EXCHANGES[options.rival](options, model)
    optimizer = optimizer_of(options, model)
    exchange.stop(False)  # all are here
    recorder = Recorder(options) if options.rank == 0 else None
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = exchange.backward(*batches.next())
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPES["dense"].clip_norm)
        optimizer.step()
        reached, measure = False, step % options.measure_every == 0 or step == options.steps
        if recorder is not None:
            seconds, held = recorder.seconds(), None
            if measure:
                began_s = time.perf_counter()
                with torch.no_grad():
                    held = float(model.loss(*held_out))
                recorder.paused(time.perf_counter() - began_s)
                reached = held <= options.until_loss
            recorder.write(step, seconds, loss, held)
        if measure and exchange.stop(reached):
            break
    exchange.close()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rivals.train", description="one rank of a training run")
    parser.add_argument("--rival", choices=sorted(TRAINERS), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--master", required=True, metavar="HOST:PORT")
    parser.add_argument("--interface", default=INTERFACE)
    parser.add_argument("--folder", type=Path, required=True, help="where rank 0 writes steps.jsonl")
    parser.add_argument("--until-loss", type=float, default=0.0, metavar="NATS")
    parser.add_argument("--steps", type=int, default=RECIPES["dense"].steps)
    parser.add_argument("--measure-every", type=int, default=MEASURE_EVERY, metavar="STEPS")
    parser.add_argument("--model", choices=sorted(SIZES), default="small")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--learning-rate", type=float, default=0.0, help="default: the recipe's")
    parser.add_argument("--powersgd-rank", type=int, default=2)
    parser.add_argument("--powersgd-start", type=int, default=10, metavar="STEP", help="dense before it")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # several ranks share this machine's cores
    train(parse())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # hivemind's threads and processes wait for each other at the interpreter's end
