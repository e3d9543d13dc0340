"""The training script of these tests: an ordinary training loop that reports what happens.

    python train.py '{"exchange": "dense", "batch_size": 8, "steps": 200}'      see `Options`

Several arguments are several runs, one after the other: importing torch takes longer than most of them.
Each line of stdout is one JSON object; `mark` names it, `exchange` the run:

    loaded    torch is imported; next the script waits for its gate, if it has one, and joins the group
    begin     before the first batch: the global step, a digest of the parameters
    at gate   the loop waits before step `step`, until the gate opens
    round     an attempt at a step begins: `round` = [generation, step, attempt], `samples` in this batch
    outcome   of that attempt; `at_s` is the machine's monotonic clock
    dying     SIGKILL comes now
    end       the ledger ended the run

It uses private attributes of the session and the driver, to see rounds and to die in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gridtrain
from gridtrain.core import messages as m
from gridtrain.core.group.member_events import MessageReceived
from gridtrain.training.checkpoint import nested_values, serialization

FEATURES, WIDTH, CLASSES = 16, 128, 8
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Options:
    """One JSON object on the command line is one run.

    Attributes:
        invitation: to the run; None: the one that the agent has used already.
        seed: of the initial parameters; None: a different one in each process.
        rates: a learning rate schedule, tracked by the grid.
        join_gate, step_gate: FIFOs; a byte in one lets the worker join, or begin step `gated_step`, or each
            step from `gated_from` on.
        die: "apply": at the first payload that arrives in step `die_step`; "votes": as the root, when all
            others have voted YES on it; "restore", "capture": when the worker is to load the group's state,
            or to send it; "block": when `StateBlock` number `die_block` is to be sent.
        die_rank, die_of: the rank that dies, in the first group of `die_of` workers.
        width: of the model's middle layer.
        frozen: whether the middle layer is frozen, with the same values in each process.
    """

    invitation: str | None = None
    exchange: str = "dense"
    batch_size: int | None = None
    global_batch_size: int | None = None
    steps: int | None = None
    epochs: int | None = None
    samples: int = 1280
    batch_norm: bool = False
    seed: int | None = None
    rates: bool = False
    join_gate: str = ""
    step_gate: str = ""
    gated_step: int = -1
    gated_from: int = -1
    die: str = ""
    die_step: int = -1
    die_rank: int = -1
    die_of: int = 0
    die_block: int = -1
    width: int = WIDTH
    frozen: bool = False


def say(mark: str, **fields: object) -> None:
    """Print in a single write, so that the lines of two threads do not mix."""
    line = {"mark": mark, "at_s": time.monotonic(), **fields}
    os.write(1, (json.dumps(line) + "\n").encode())


def die() -> None:
    say("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_gate(path: str) -> None:
    with open(path, "rb", buffering=0) as gate:
        gate.read(1)


# -- model and data --------------------------------------------------------------------------------


class Points:
    """(features, class, its own index), from a fixed random teacher."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._x = torch.randn(count, FEATURES, generator=generator)
        self._y = (self._x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._x[index], self._y[index], index


def build_model(seed: int, batch_norm: bool = False, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(width)] if batch_norm else []
    first, middle, last = nn.Linear(FEATURES, width), nn.Linear(width, width), nn.Linear(width, CLASSES)
    return nn.Sequential(first, *norm, nn.ReLU(), middle, nn.ReLU(), last)


def build_optimizer(model: nn.Module, exchange: str) -> torch.optim.Optimizer:
    momentum = 0.9 if exchange == "dense" else 0.0  # the sparse exchanges have their own
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=momentum)


EXCHANGES = {
    "dense": gridtrain.Dense(),
    "topk": gridtrain.TopK(density=0.05, momentum=0.9),
    "gtopk": gridtrain.GTopK(density=0.05, momentum=0.9),
    "butterfly": gridtrain.GTopK(density=0.05, momentum=0.9, topology="butterfly"),
    "direct": gridtrain.GTopK(density=0.05, momentum=0.9, topology="direct"),
    "auto": "auto",
}


# -- recording attempts ----------------------------------------------------------------------------


class AttemptRecorder:
    """Wraps `session.run`: prints every attempt, and kills its process at the point that `options` name."""

    def __init__(self, grid: gridtrain.Grid, optimizer: gridtrain.GridOptimizer, options: Options) -> None:
        self.batch: list[int] = []
        self.loss = 0.0
        self._session, self._optimizer, self._options = grid._session, optimizer, options
        self._run, self._session.run = self._session.run, self.run
        if options.die == "restore":
            self._session.tasks._restore = lambda blobs: die()
        elif options.die == "capture":
            self._session.tasks._capture = lambda snapshot, whole: die()
        elif options.die == "block":
            transport = self._session.connection.loop._transport
            send = transport.send

            def send_or_die(peer, message):
                if isinstance(message, m.StateBlock) and message.index == options.die_block:
                    die()
                send(peer, message)

            transport.send = send_or_die

    def run(self, plan, workspaces, skip, salt):
        round_id = self._session._turn.open_round
        name = [round_id.generation, round_id.step, round_id.attempt]
        say(
            "round",
            round=name,
            exchange=self._options.exchange,
            rank=plan.rank,
            of=plan.world_size,
            samples=self.batch if plan.samples else [],  # without samples the batch is a placeholder
            loss=self.loss,
            residual=digest_of(self._optimizer.residual.state().values()),
        )
        chosen = (self._options.die_step, self._options.die_rank, self._options.die_of)
        if (plan.step, plan.rank, plan.world_size) == chosen:
            self._arm(workspaces[0], plan.world_size)
        outcome = self._run(plan, workspaces, skip, salt)
        say("outcome", round=name, exchange=self._options.exchange, committed=outcome.is_committed)
        return outcome

    def _arm(self, workspace, world_size: int) -> None:
        """Let the I/O thread die at an exact point of the exchange."""
        if self._options.die == "apply":
            workspace.apply = lambda effect: die()
        elif self._options.die == "votes":
            driver, voters = self._session.connection.loop, set()
            handle = driver._handle

            def handle_or_die(event):
                if (
                    isinstance(event, MessageReceived)
                    and isinstance(event.message, m.Vote)
                    and event.message.yes
                ):
                    voters.add(event.peer)
                    if len(voters) == world_size - 1:
                        die()
                handle(event)

            driver._handle = handle_or_die


def digest_of(tensors) -> str:
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(nested_values.tensor_bytes(tensor).data)
    return total.hexdigest()


def train(options: Options) -> None:
    say("loaded")
    if options.join_gate:
        wait_for_gate(options.join_gate)
    grid = gridtrain.join(options.invitation)
    seed = os.getpid() if options.seed is None else options.seed
    model = build_model(seed, options.batch_norm, options.width)
    if options.frozen:
        model[-3].load_state_dict(build_model(11, options.batch_norm, options.width)[-3].state_dict())
        model[-3].requires_grad_(False)
    optimizer = grid.optimizer(
        build_optimizer(model, options.exchange),
        model,
        exchange=EXCHANGES[options.exchange],
        average_buffers_every=50,
    )
    decay = 0.99 if options.rates else 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: decay**steps)
    grid.track(scheduler=scheduler)
    recorder = AttemptRecorder(grid, optimizer, options)
    sizes = {"batch_size": options.batch_size, "global_batch_size": options.global_batch_size}
    for x_BF, y_B, indices_B in grid.batches(
        Points(options.samples), **sizes, epochs=options.epochs, steps=options.steps
    ):
        if not recorder.batch:
            say("begin", step=grid.step, parameters=digest_of(model.parameters()))
        if grid.step == options.gated_step or 0 <= options.gated_from <= grid.step:
            with grid.evaluation():
                say("at gate", step=grid.step)
                wait_for_gate(options.step_gate)
        loss = nn.functional.cross_entropy(model(x_BF), y_B)
        loss.backward()
        recorder.batch, recorder.loss = indices_B.tolist(), loss.item()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    say(
        "end",
        exchange=options.exchange,
        digest=serialization.replica_digest(model, optimizer).hex(),
        parameters=digest_of(model.parameters()),
        buffers=digest_of(model.buffers()),
        scheduler_steps=scheduler.last_epoch,
        lr=optimizer.param_groups[0]["lr"],
        step=grid.step,
        rank=grid.rank,
        of=grid.world_size,
        n=sum(p.numel() for p in model.parameters()),
        skipped_steps=optimizer.skipped_steps,
        used=str(optimizer.current_exchange),
        sent_bytes={name: sent for name, (sent, _) in grid.traffic.items()},
    )
    grid.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        train(Options(**json.loads(argument)))
